"""Which sequences go together: rounds of adapters that fit the slots, batches that fit the budget of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from moelora.batching.sequences import Sequence
from moelora.types import BASE_ADAPTER

_LOOKAHEAD = 128
"""Sequences that are looked at to fill what is left of a batch: with lengths up to a tenth of it, over 99 % full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """What a batch may hold: tokens, sequences, distinct adapters (the base apart)."""

    max_tokens: int
    max_sequences: int
    max_adapters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """Sequences that run together. `adapters`: those of the whole round, which must stay resident until it ends."""

    sequences: tuple[Sequence, ...]
    adapters: tuple[str, ...]


def plan(sequences: Seq[Sequence], limits: BatchLimits) -> Iterator[PlannedBatch]:
    """Orders `sequences` into batches so that no adapter is needed in two rounds.

    A pure function of its arguments, whatever lies on the device: resumed runs and shards run the same batches. Rounds
    follow first appearance; the base joins the first. A sequence longer than the token budget forms a batch of its own.
    """
    for round_adapters in _rounds(sequences, limits):
        named = tuple(name for name in round_adapters if name != BASE_ADAPTER)
        place = {name: i for i, name in enumerate(round_adapters)}
        pending = [s for s in sequences if s.adapter in round_adapters]
        while pending:
            batch, pending = _fill(pending, limits)
            # Neighbours of one adapter make longer runs, which kernels take in fewer tiles.
            batch.sort(key=lambda s: place[s.adapter])
            yield PlannedBatch(sequences=tuple(batch), adapters=named)


def _fill(pending: Seq[Sequence], limits: BatchLimits) -> tuple[list[Sequence], list[Sequence]]:
    """The next batch, and what is left: in order, except that sequences which no longer fit are passed over.

    Looks at most `_LOOKAHEAD` sequences past the first that did not fit, so that nothing waits long for its turn.
    """
    batch, tokens = [pending[0]], pending[0].num_tokens
    left: list[Sequence] = []
    for i in range(1, len(pending)):
        if len(left) > _LOOKAHEAD or tokens >= limits.max_tokens or len(batch) >= limits.max_sequences:
            return batch, [*left, *pending[i:]]
        if tokens + pending[i].num_tokens <= limits.max_tokens:
            batch.append(pending[i])
            tokens += pending[i].num_tokens
        else:
            left.append(pending[i])
    return batch, left


def _rounds(sequences: Seq[Sequence], limits: BatchLimits) -> list[dict[str, None]]:
    wanted = dict.fromkeys(s.adapter for s in sequences)
    named = [name for name in wanted if name != BASE_ADAPTER]
    size = max(limits.max_adapters, 1)
    rounds = [dict.fromkeys(named[i : i + size]) for i in range(0, len(named), size)] or [{}]
    if BASE_ADAPTER in wanted:
        rounds[0][BASE_ADAPTER] = None
    return rounds


def assign_slots(needed: Seq[str], residents: Seq[str | None]) -> dict[str, int]:
    """A slot for every adapter of a round: its own where it is resident, else an empty one, else one not needed now."""
    slot_of = {name: residents.index(name) for name in needed if name in residents}
    taken = set(slot_of.values())
    free = [i for i, name in enumerate(residents) if i not in taken]
    free.sort(key=lambda i: residents[i] is not None)
    for name in needed:
        if name not in slot_of:
            slot_of[name] = free.pop(0)
    return slot_of


def due_loads(planned: PlannedBatch, slot_of: Mapping[str, int], residents: Seq[str | None]) -> list[str]:
    """The adapters that must be loaded before the batch runs: those it needs itself, not yet in their slot."""
    needed = {s.adapter for s in planned.sequences}
    return [name for name, slot in slot_of.items() if name in needed and residents[slot] != name]
