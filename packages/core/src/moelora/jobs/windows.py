"""A run in windows of input rows, each scored as a whole: what runs together never depends on what was done before.

Windows that are finished already are read over, not scored.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from moelora.jobs.parts import PartStore
from moelora.jobs.rows import Row
from moelora.jobs.run import PrefillJob
from moelora.jobs.stats import JobStats
from moelora.jobs.writer import RowSink

_REQUESTS = 4096
"""Requests of one window: some seconds of work on a fast GPU, which is what a crash can cost."""
_MOST_REQUESTS = 65_536

_PAUSE_SECONDS = 0.2
"""Between looks at what other workers hold."""


def window_requests(adapters: int, slots: int) -> int:
    """Requests of one window: 4,096, more where adapters take turns in the slots.

    A pure function of the run's options: shards and resumed runs cut the input alike. With more adapters than slots
    each window loads every adapter once, so it is made longer by as many turns as that takes.
    """
    turns = -(-max(adapters, 1) // max(slots, 1))
    return min(_REQUESTS * turns, _MOST_REQUESTS)


def windows(rows: Iterable[Row], size: int, requests_of: Callable[[Row], int]) -> Iterator[tuple[int, list[Row]]]:
    """Cuts rows into numbered windows that end with the row that brings them to `size` requests."""
    number, requests = 0, 0
    window: list[Row] = []
    for row in rows:
        window.append(row)
        requests += requests_of(row)
        if requests >= size:
            yield number, window
            number, requests, window = number + 1, 0, []
    if window:
        yield number, window


class ShardSize:
    """How much of an input falls to one shard: what its windows took as far as they are known, the rest by their mean.

    total: of the input, as `Row.size` counts. mine: whether a window is one of the shard's.
    """

    def __init__(self, total: int, mine: Callable[[int], bool]) -> None:
        self._total, self._mine = total, mine
        self._read = self._own = self._windows = 0

    def add(self, number: int, window: Iterable[Row]) -> None:
        """The next window, of whichever shard."""
        size = sum(row.size for row in window)
        self._windows = number + 1
        self._read += size
        self._own += size if self._mine(number) else 0

    def expected(self) -> int:
        """What the shard will have scored in the end, if windows go on as they were."""
        mean = max(self._read // self._windows, 1)
        starts = enumerate(range(self._read, self._total, mean), self._windows)
        return self._own + sum(min(mean, self._total - start) for number, start in starts if self._mine(number))


def run_into_parts(
    job: PrefillJob,
    read: Callable[[], Iterable[Row]],
    size: int,
    store: PartStore,
    on_part: Callable[[JobStats, JobStats], None] = lambda stats, earlier: None,
    on_window: Callable[[int, list[Row]], None] = lambda number, window: None,
) -> int:
    """Scores every window of `size` requests of this shard that has no part yet. Returns how many the input has.

    `read` gives the rows from the first on. The counts of parts that were there already are added to `job.stats`. A
    worker passes over windows that others have claimed, and comes back for those whose worker died. `on_part` gets
    `job.stats` and `job.earlier` behind every part that this process has written; `on_window` each window of the input,
    of any shard, when it has been read.
    """
    seen: set[int] = set()
    while True:
        count, claimed = 0, 0
        for number, window in windows(read(), size, job.requests_of):
            count = number + 1
            on_window(number, window)
            if not store.mine(number) or number in seen:
                continue
            with store.claim(number) as may_score:
                if store.has(number):
                    job.take_over(store.stats(number))
                elif may_score:
                    _score_window(job, number, window, store)
                    on_part(job.stats, job.earlier)
                else:
                    claimed += 1
                    continue
            seen.add(number)
        if not claimed:
            store.end(count)
            return count
        time.sleep(_PAUSE_SECONDS)


def _score_window(job: PrefillJob, number: int, window: list[Row], store: PartStore) -> None:
    lines = _Lines()
    before = copy.deepcopy(job.stats)
    job.run(window, lines)
    store.write_part(number, job.stats.since(before), lines.held)


class _Lines(RowSink):
    """Holds the lines of one window, which are few, until the counts that stand before them are known."""

    def __init__(self) -> None:
        self.held: list[bytes] = []

    def write(self, line: bytes) -> None:
        self.held.append(line)

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: Any) -> None:
        pass
