"""The device bank: `L` slots of factors for every target that some adapter of the run touches, and nothing more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from moelora.adapters.base import Adapter, Catalogue, Factors, TargetKind
from moelora.adapters.streams import Mark, Streams, Transfer, streams_for
from moelora.backends.base import DenseSlots, ExpertSlots
from moelora.errors import AdapterError

Slots = DenseSlots | ExpertSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class BankLayout:
    """How large each target's bank is, decided from the adapters of the run before anything is allocated.

    ranks: the largest rank by target. a_shared, b_shared: experts targets whose A (or B) is one for all experts in
    every adapter. replaced: targets that some adapter replaces as a whole.
    """

    ranks: Mapping[str, int]
    a_shared: frozenset[str] = frozenset()
    b_shared: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()

    @property
    def max_rank(self) -> int:
        """The largest rank of any target."""
        return max(self.ranks.values(), default=0)

    @staticmethod
    def of(adapters: Iterable[Adapter], *, rank_multiple: int = 1) -> BankLayout:
        """The layout that holds any of `adapters`, ranks rounded up to what kernels ask for (`rank_multiple`)."""
        ranks: dict[str, int] = {}
        a_shared: dict[str, bool] = {}
        b_shared: dict[str, bool] = {}
        replaced: set[str] = set()
        for adapter in adapters:
            for name, factors in adapter.factors.items():
                rounded = -(-factors.rank // rank_multiple) * rank_multiple
                ranks[name] = max(ranks.get(name, 0), rounded)
                a_shared[name] = a_shared.get(name, True) and factors.a.ndim == 3 and factors.a.shape[0] == 1
                b_shared[name] = b_shared.get(name, True) and factors.b.ndim == 3 and factors.b.shape[0] == 1
            replaced |= set(adapter.replacements)
        return BankLayout(
            ranks=ranks,
            a_shared=frozenset(n for n, shared in a_shared.items() if shared),
            b_shared=frozenset(n for n, shared in b_shared.items() if shared),
            replaced=frozenset(replaced),
        )

    def bytes_per_slot(self, catalogue: Catalogue, dtype: torch.dtype) -> int:
        """Device bytes of one slot, replacements apart."""
        total = 0
        for name, rank in self.ranks.items():
            target = catalogue.targets[name]
            experts = max(target.num_experts, 1)
            copies_a = 1 if name in self.a_shared else experts
            copies_b = 1 if name in self.b_shared else experts
            total += rank * (target.in_features * copies_a + target.out_features * copies_b)
        return total * dtype.itemsize


@dataclass(slots=True)
class _Resident:
    """written: when the slot's copies are done; read: when the last batch that reads the slot is."""

    name: str | None = None
    replacements: dict[str, torch.Tensor] = field(default_factory=dict)
    written: Mark = None
    read: Mark = None


class AdapterBank:
    """Slots on the device. `load` writes a whole slot, so that nothing of a former tenant survives.

    The tensors of `slots` keep their addresses for the life of the bank: captured graphs may bake them in. Copies run
    beside the compute of the batches: `begin_reading` before a batch and `end_reading` behind it keep them in order.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        layout: BankLayout,
        *,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
        streams: Streams | None = None,
    ) -> None:
        self.layout = layout
        self._streams = streams or streams_for(device)
        self.num_slots = slots
        self.loads = 0
        self._residents = [_Resident() for _ in range(slots)]
        self.slots: dict[str, Slots] = {}
        for name, rank in layout.ranks.items():
            target = catalogue.targets[name]
            ranks_L = torch.zeros(slots, dtype=torch.int32, device=device)

            def zeros(*shape: int) -> torch.Tensor:
                return torch.zeros(shape, dtype=dtype, device=device)

            if target.kind is TargetKind.EXPERTS:
                experts_a = 1 if name in layout.a_shared else target.num_experts
                experts_b = 1 if name in layout.b_shared else target.num_experts
                self.slots[name] = ExpertSlots(
                    a_LERI=zeros(slots, experts_a, rank, target.in_features),
                    b_LEOR=zeros(slots, experts_b, target.out_features, rank),
                    ranks_L=ranks_L,
                )
            else:
                self.slots[name] = DenseSlots(
                    a_LRI=zeros(slots, rank, target.in_features),
                    b_LOR=zeros(slots, target.out_features, rank),
                    ranks_L=ranks_L,
                )
        self._device = device
        made = self._streams.compute_mark()
        for resident in self._residents:
            resident.read = made

    @property
    def residents(self) -> tuple[str | None, ...]:
        """The adapter's name by slot; None where a slot is empty."""
        return tuple(r.name for r in self._residents)

    def replacement(self, target: str, slot: int) -> torch.Tensor | None:
        """The whole weight that the tenant of `slot` puts in place of the target's, or None."""
        return self._residents[slot].replacements.get(target)

    def replaced_slots(self, target: str) -> list[tuple[int, torch.Tensor]]:
        """Every slot whose tenant replaces `target`, with the weight."""
        return [(i, r.replacements[target]) for i, r in enumerate(self._residents) if target in r.replacements]

    def load(self, slot: int, adapter: Adapter) -> None:
        """Has `adapter` written into `slot` as soon as no batch reads the slot. Does not wait for it.

        Raises `AdapterError`, changing nothing, if it does not fit.
        """
        for name, factors in adapter.factors.items():
            room = self.layout.ranks.get(name, 0)
            if factors.rank > room:
                raise AdapterError(
                    f"adapter {adapter.name!r} has rank {factors.rank} on {name}, the bank was made for {room}"
                )
        unknown = set(adapter.replacements) - self.layout.replaced
        if unknown:
            raise AdapterError(
                f"adapter {adapter.name!r} replaces {sorted(unknown)[0]}, which the bank was not made for"
            )
        self._rewrite(slot, adapter.factors, adapter.replacements).name = adapter.name
        self.loads += 1

    def clear(self, slot: int) -> None:
        """Empties a slot: its rows then behave like base rows."""
        self._rewrite(slot, {}, {})

    def _rewrite(
        self, slot: int, factors: Mapping[str, Factors], replacements: Mapping[str, torch.Tensor]
    ) -> _Resident:
        before = self._residents[slot]
        # Nameless until all of it is queued: a copy that finds no memory must not leave half an adapter behind a name.
        resident = self._residents[slot] = _Resident(read=before.read, written=before.written)

        def write() -> None:
            transfers: list[Transfer] = []
            for name, slots in self.slots.items():
                transfers += _write(slots, slot, factors.get(name))
            self._streams.put(transfers)
            resident.replacements = {n: w.to(self._device, non_blocking=True) for n, w in replacements.items()}

        resident.written = self._streams.copy(write, after=[before.read])
        return resident

    def begin_reading(self, slots: Iterable[int]) -> None:
        """To be called before a batch that reads `slots` is queued: it will run behind their copies."""
        for slot in slots:
            resident = self._residents[slot]
            self._streams.compute_waits(resident.written, list(resident.replacements.values()))

    def end_reading(self, slots: Iterable[int]) -> None:
        """To be called when the batch is queued: what is loaded into `slots` from now on will be copied behind it."""
        mark = self._streams.compute_mark()
        for slot in slots:
            self._residents[slot].read = mark


def _tensors(slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
    return (slots.a_LERI, slots.b_LEOR) if isinstance(slots, ExpertSlots) else (slots.a_LRI, slots.b_LOR)


def _write(slots: Slots, slot: int, factors: Factors | None) -> list[Transfer]:
    """Zeroes what the factors leave of the slot, and says where they go; those shared by all experts are broadcast.

    None empties it: its rows then behave like base rows on this target.
    """
    a, b = _tensors(slots)
    rank = 0 if factors is None else factors.rank
    if rank < a.shape[-2]:
        a[slot, ..., rank:, :].zero_()
        b[slot, ..., rank:].zero_()
    slots.ranks_L[slot] = rank
    return [] if factors is None else [(a[slot, ..., :rank, :], factors.a), (b[slot, ..., :rank], factors.b)]
