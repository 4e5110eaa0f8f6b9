"""Which sequences go together: batches that fit the budget of tokens, ordered so that each adapter is loaded once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
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
    """Sequences that run together. `adapters`: those of the batch, and those that are needed before and after it."""

    sequences: tuple[Sequence, ...]
    adapters: tuple[str, ...]


def plan(sequences: Seq[Sequence], limits: BatchLimits) -> Iterator[PlannedBatch]:
    """Orders `sequences` into batches, adapter by adapter, so that each adapter needs a slot for one stretch of them.

    A pure function of its arguments, whatever lies on the device: resumed runs and shards run the same batches. The
    base comes first, since it needs no slot and gives time to bring the first adapters; the others follow by first
    appearance. One adapter's sequences stand together, which makes long runs that kernels take in few tiles, and leaves
    slots free for the adapters that are next. A sequence longer than the token budget forms a batch of its own.
    """
    place = {BASE_ADAPTER: 0}
    for one in sequences:
        place.setdefault(one.adapter, len(place))
    pending = deque(sorted(sequences, key=lambda s: place[s.adapter]))
    left = Counter(s.adapter for s in sequences)
    opened: set[str] = set()
    while pending:
        batch, adapters = _fill(pending, opened, limits)
        left.subtract(s.adapter for s in batch)
        yield PlannedBatch(sequences=tuple(batch), adapters=tuple(sorted(adapters, key=place.__getitem__)))
        opened = {name for name in adapters if left[name]}


def _fill(pending: deque[Sequence], opened: set[str], limits: BatchLimits) -> tuple[list[Sequence], set[str]]:
    """Takes the next batch out of `pending`; returns it with the adapters that must be resident meanwhile.

    In order, except that sequences which do not fit are passed over. Looks at most `_LOOKAHEAD` sequences past the
    first of these, so that nothing waits long for its turn. opened: adapters with sequences both behind and ahead.
    """
    batch: list[Sequence] = []
    passed: list[Sequence] = []
    adapters, tokens = set(opened), 0
    held_back: set[str] = set()
    while pending and len(passed) <= _LOOKAHEAD and tokens < limits.max_tokens and len(batch) < limits.max_sequences:
        one = pending.popleft()
        name = one.adapter
        known = name == BASE_ADAPTER or name in adapters
        # An adapter that was passed over comes first in the next batch, and must find a slot there.
        has_slot = known or len(adapters) + bool(held_back - {name}) < limits.max_adapters
        if has_slot and (not batch or tokens + one.num_tokens <= limits.max_tokens):
            batch.append(one)
            tokens += one.num_tokens
            if not known:
                adapters.add(name)
                held_back.discard(name)
        else:
            passed.append(one)
            if not known:
                held_back.add(name)
    pending.extendleft(reversed(passed))
    return batch, adapters
