"""Scores batches one behind the other: while the device runs one, the host reads scores of the last, packs the next.

Nothing here waits for the device but the reading of scores, and by then the next batch is queued behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields

import torch

from moelora.adapters.residency import Placement, Residency
from moelora.backends.fused_ops import RowScores
from moelora.batching.packing import head_rows, pack
from moelora.batching.sequences import Sequence as Tokens
from moelora.batching.transfer import Fetch
from moelora.counts import Counts
from moelora.graphs.base import GraphRunner
from moelora.scoring.head import ScoringHead
from moelora.scoring.results import HostScores, ResultBuilder
from moelora.types import Result, RunMode

_SCORES = tuple(one.name for one in fields(RowScores))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A batch whose turn has come. placement: the slots of its adapters. upcoming: those of the batches behind it.

    builders: of every request of the batch, by its index; requests that failed are taken out.
    """

    sequences: Sequence[Tokens]
    placement: Placement
    upcoming: Sequence[Placement]
    builders: dict[int, ResultBuilder]


@dataclass(frozen=True, slots=True)
class _Queued:
    """A batch that the device works on, and its scores, which are on their way."""

    sequences: Sequence[Tokens]
    builders: Mapping[int, ResultBuilder]
    scores: Fetch
    mode: RunMode


class BatchPipeline:
    """Runs turns through body and head. Several threads may, with generators of their own: their batches take turns.

    counts: what has run. memory_splits: how often a batch did not fit into memory, single sequences included.
    """

    def __init__(
        self,
        runner: GraphRunner,
        head: ScoringHead,
        residency: Residency,
        *,
        device: torch.device,
        lock: AbstractContextManager[object],
        say: Callable[[str], None],
    ) -> None:
        """lock: held while a batch is queued; slots, static buffers and the model's modules belong to one at a time."""
        self.counts = Counts()
        self.memory_splits = 0
        self._runner = runner
        self._head = head
        self._residency = residency
        self._device = device
        self._lock = lock
        self._say = say
        self._under_way = self._stopping = False

    def stop(self) -> bool:
        """Lets `run` end by `KeyboardInterrupt` behind the batches that are queued.

        For signal handlers. Returns False, and changes nothing, if none is, or if `run` waits for turns: then the
        handler may raise where it is, and what is queued is handed out none the less.
        """
        self._stopping = self._under_way
        return self._under_way

    def run(self, turns: Iterable[Turn], on_batch: Callable[[], None] = lambda: None) -> Iterator[tuple[int, Result]]:
        """Yields (index, result) of every request, once its last sequence is scored: a batch behind the queued one.

        A batch that does not fit into memory is halved until it does; a single sequence that does not is an error.
        Results of what was queued before an exception are still yielded. `on_batch` is called when all results of a
        batch have been taken, before the next one is waited for.
        """
        queued: _Queued | None = None
        try:
            for turn in self._until_stopped(turns):
                waiting = [turn.sequences]
                while waiting:
                    sequences = waiting.pop()
                    behind = self._queue_or_none(sequences, turn)
                    if queued is not None:
                        before, queued = queued, None
                        yield from _collect(before)
                        on_batch()
                    queued = behind
                    if behind is None:
                        yield from self._make_room(sequences, waiting, turn.builders)
        except (Exception, KeyboardInterrupt):
            if queued is not None:
                yield from _collect(queued)
                on_batch()
            raise
        finally:
            self._under_way = False
        if queued is not None:
            yield from _collect(queued)
            on_batch()

    def _until_stopped(self, turns: Iterable[Turn]) -> Iterator[Turn]:
        source = iter(turns)
        while True:
            self._under_way = False
            turn = next(source, None)
            if turn is None:
                return
            self._under_way = True
            yield turn
            if self._stopping:
                self._stopping = False
                raise KeyboardInterrupt

    def _queue_or_none(self, sequences: Sequence[Tokens], turn: Turn) -> _Queued | None:
        """None if there is no memory. Returns outside the except block, whose traceback would keep tensors alive."""
        try:
            return self._queue(sequences, turn)
        except torch.OutOfMemoryError:
            return None

    def _queue(self, sequences: Sequence[Tokens], turn: Turn) -> _Queued:
        with self._lock, torch.inference_mode():
            self._residency.bring(turn.placement)
            try:
                batch = pack(sequences, turn.placement, self._device)
                output = self._runner.run(batch)
                # From here on the device has work, and nothing waits for the host.
                self._residency.prefetch(turn.placement, turn.upcoming)
                self.counts.add(output.mode, output.admission, batch.num_tokens)
                rows = head_rows(sequences, batch)
                scores = self._head.score(output.hidden_TH, rows, top_k=max(s.top_k for s in sequences))
                fetch = Fetch([getattr(scores, name) for name in _SCORES])
            finally:
                self._residency.release(turn.placement)
        return _Queued(sequences, turn.builders, fetch, output.mode)

    def _make_room(
        self, sequences: Sequence[Tokens], waiting: list[Sequence[Tokens]], builders: dict[int, ResultBuilder]
    ) -> Iterator[tuple[int, Result]]:
        """Puts both halves of a batch that did not fit back into `waiting`, or fails a single sequence."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.memory_splits += 1
        if len(sequences) == 1:
            index, tokens = sequences[0].request, sequences[0].num_tokens
            if builders.pop(index, None) is not None:  # once, however many of its sequences fail
                yield index, Result(num_tokens=tokens, error=f"out of device memory at {tokens} tokens in one sequence")
            return
        self._say(f"out of device memory with {len(sequences)} sequences; going on with half of them at a time")
        middle = len(sequences) // 2
        waiting += [sequences[middle:], sequences[:middle]]  # the first half is taken first


def _collect(queued: _Queued) -> Iterator[tuple[int, Result]]:
    """Waits for the scores of a batch and hands out the requests that they complete."""
    scores = HostScores.of(RowScores(**dict(zip(_SCORES, queued.scores.wait(), strict=True))))
    first = first_open = 0
    for sequence in queued.sequences:
        builder = queued.builders.get(sequence.request)
        result = builder.add(sequence, scores, first, first_open, queued.mode) if builder is not None else None
        first += sequence.num_rows
        first_open += sum(run.is_open for run in sequence.runs)
        if result is not None:
            yield sequence.request, result
