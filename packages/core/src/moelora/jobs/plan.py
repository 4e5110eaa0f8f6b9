"""What a run would do, found without weights: the run's own rows, checks, capacity and planner, and no forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from moelora.adapters.bank import BankLayout
from moelora.adapters.base import Adapter
from moelora.adapters.loader import AdapterLoader, refuse_all
from moelora.batching.planner import PlannedBatch, plan
from moelora.batching.sequences import expand
from moelora.batching.slots import SlotSchedule
from moelora.capacity import Admission, EagerReason, admit
from moelora.checks import check_request, count_tokens, vocab_size_of
from moelora.counts import Counts
from moelora.environment import resolve_device
from moelora.errors import AdapterError
from moelora.graphs.select import first_mode
from moelora.memory import MemoryPlan, Sizing, choose_capacity, plan_memory
from moelora.models.base_model import open_base, resolve_dtype
from moelora.models.catalogue import build_catalogue
from moelora.options import (
    WINDOW_REQUESTS,
    EngineOptions,
    batch_limits,
    choose_backend,
    derive_buckets,
)
from moelora.types import GraphMode, Request, Result, RunMode


class PlanningEngine:
    """Stands in for `PrefillEngine` in a job: plans every batch and counts it, and answers with empty results.

    Refuses what the engine would refuse, except what only weights can tell. Reads the model's config, the headers of
    its files and those of adapters. `report()` has the engine's keys, as far as they are known beforehand.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapters: Mapping[str, Path],
        options: EngineOptions,
        workers: int = 1,
        on_event: Callable[[str], None] = lambda text: None,
    ) -> None:
        """workers: processes that share the windows, each with slots of its own."""
        self._options = options
        self._device = resolve_device(options.device)
        self._backend = choose_backend(options, self._device)
        self._source = open_base(model, load_format=options.load_format)
        self._dtype = resolve_dtype(options.dtype, self._source.config, self._device)
        skeleton = self._source.skeleton()
        self._catalogue = build_catalogue(skeleton)
        loader = AdapterLoader(
            self._catalogue,
            dtype=self._dtype,
            base_weight=self._source.stored_tensor,
            lora_b_layout=options.lora_b_layout,
        )
        self._adapters: dict[str, Adapter] = {}
        refused: list[AdapterError] = []
        for name, path in adapters.items():
            on_event(f"checking adapter {name} in {path}")
            try:
                self._adapters[name] = loader.outline(path, name=name)
            except AdapterError as error:
                refused.append(error)
        refuse_all(refused, len(adapters))
        self._layout = BankLayout.of(self._adapters.values())
        self._sizing = Sizing(
            skeleton=skeleton,
            catalogue=self._catalogue,
            architecture=self._source.architecture,
            adapters=self._adapters.values(),
            device=self._device,
            dtype=self._dtype,
        )
        self._capacity, self._memory = choose_capacity(options, self._sizing, on_event)
        self._buckets = tuple(sorted(set(derive_buckets(options, self._capacity))))
        self._mode, self._blocked = self._graphs()
        self._schedules = [SlotSchedule(self._capacity.bank_slots) for _ in range(workers)]
        self._schedule = self._schedules[0]
        self._counts = Counts()
        self._longer = 0
        self._room = 0

    @property
    def vocab_size(self) -> int:
        """V: token ids lie in [0, V)."""
        return vocab_size_of(self._source.config.get_text_config())

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model has positions for; None if the config names no limit."""
        return getattr(self._source.config.get_text_config(), "max_position_embeddings", None)

    @property
    def adapter_names(self) -> list[str]:
        """Names that a request may use besides `__base__`."""
        return list(self._adapters)

    @property
    def slots(self) -> int:
        """Adapters that lie on the device at once."""
        return self._capacity.bank_slots

    @property
    def memory(self) -> MemoryPlan:
        """What the batches so far need, and at least those that `max_tokens` allows: a longer sequence needs more."""
        longest = self._counts.largest_batch
        if longest <= self._capacity.max_tokens:
            return self._memory
        return plan_memory(
            self._sizing,
            self._options,
            self._capacity,
            backend=choose_backend(self._options, self._device),
            free=self._memory.free,
            total=self._memory.total,
            longest=longest,
        )

    def begin_window(self, number: int) -> None:
        """What is scored from now on belongs to that window. Workers are taken to claim windows in turns."""
        self._schedule = self._schedules[number % len(self._schedules)]

    def check(self, request: Request) -> str | None:
        """Why a request cannot be scored, or None if it can."""
        return check_request(
            request, adapters=self._adapters, vocab_size=self.vocab_size, max_positions=self.max_positions
        )

    def score_stream(
        self, requests: Iterable[Request], on_batch: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Result]]:
        """Plans window by window, as the engine does; a result says no more than the number of tokens."""
        numbered = enumerate(requests)
        while window := list(islice(numbered, WINDOW_REQUESTS)):
            errors = {index: self.check(request) for index, request in window}
            sequences = [s for index, request in window if errors[index] is None for s in expand(index, request)]
            for batch in plan(sequences, batch_limits(self._capacity)):
                self._count(batch)
            for index, request in window:
                yield index, Result(num_tokens=count_tokens(request), error=errors[index])
            on_batch()

    def report(self) -> dict[str, Any]:
        """Counts so far, and what would run where. All values are JSON types.

        longer_sequences: those over the budget of tokens, each a batch of its own. memory: counts the longest of them,
        which an engine cannot know of. fill_share: tokens over what the batches have room for, in [0, 1]; a longer
        sequence fills its own.
        """
        architecture = self._source.architecture
        return {
            "model": str(self._source.folder),
            "architecture": architecture.model_type,
            "packed": architecture.packs,
            "packing_reason": architecture.reason,
            "device": str(self._device),
            "dtype": str(self._dtype).removeprefix("torch."),
            "backend": self._backend.capabilities.name,
            "graph": str(self._options.graph),
            "graph_mode": str(self._mode),
            "buckets": list(self._buckets) if self._mode is not GraphMode.OFF else [],
            "batches": self._counts.passes.total(),
            **self._counts.report(),
            "longer_sequences": self._longer,
            "fill_share": self._counts.tokens / max(self._room, 1),
            "adapters": len(self._adapters),
            "adapter_loads": sum(schedule.loads for schedule in self._schedules),
            "slots": self._capacity.slots,
            "max_tokens": self._capacity.max_tokens,
            "max_requests": self._capacity.max_requests,
            "bytes_per_slot": self._layout.bytes_per_slot(self._catalogue, self._dtype),
            "score_chunk_rows": self._memory.score_chunk_rows,
            "memory": self.memory.to_json(),
        }

    def _graphs(self) -> tuple[GraphMode, EagerReason | None]:
        """The mode that would be captured first, or OFF with the reason. Whether capture succeeds, only a run tells."""
        return first_mode(
            self._options.graph,
            device=self._device,
            architecture=self._source.architecture,
            has_replacements=bool(self._layout.replaced),
            modes=self._backend.capabilities.graph_modes,
        )

    def _count(self, planned: PlannedBatch) -> None:
        self._schedule.place(planned)
        tokens = sum(s.num_tokens for s in planned.sequences)
        admission = self._admit(tokens, len(planned.sequences))
        mode = RunMode.EAGER if admission.reason is not None else RunMode(str(self._mode))
        self._counts.add(mode, admission, tokens)
        self._longer += tokens > self._capacity.max_tokens
        self._room += max(tokens, self._capacity.max_tokens)

    def _admit(self, tokens: int, requests: int) -> Admission:
        if self._mode is GraphMode.OFF:
            return Admission(bucket=None, reason=self._blocked)
        return admit(tokens=tokens, requests=requests, mode=self._mode, buckets=self._buckets, capacity=self._capacity)
