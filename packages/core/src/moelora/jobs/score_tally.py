"""The distribution of a run's scores, adapter by adapter, in memory that does not grow with the rows."""

from __future__ import annotations

import json
import re
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelora.jobs.parquet import ENDING, require_pyarrow
from moelora.jobs.writer import RowSink

BIN_NATS = 0.05
"""Width of a bin of mean log-probability per token."""

_MOST_VALUES = 10_000
"""Rows of an adapter up to which the median is exact: 80 kB of values."""

_FIELDS = ("adapter", "num_tokens", "logprob_sum", "error")


@dataclass(slots=True)
class AdapterScores:
    """Scores of one adapter. bins: rows by their mean log-probability per token, in steps of `BIN_NATS`, rounded down.

    values: the same means as they are, as long as there are at most `_MOST_VALUES`; then none, and the bins must do.
    tokens: those that have a log-probability; rows of a single token have none. errors: rows without scores.
    """

    rows: int = 0
    errors: int = 0
    tokens: int = 0
    logprob_sum: float = 0.0
    bins: Counter[int] = field(default_factory=Counter)
    values: array[float] = field(default_factory=lambda: array("d"))

    @property
    def mean(self) -> float | None:
        """Nats per token over all rows."""
        return self.logprob_sum / self.tokens if self.tokens else None

    @property
    def median(self) -> float | None:
        """Of the rows' means: the middle one, or the mean of the middle two. Within half a bin if not `is_exact`."""
        count = self.bins.total()
        if not count:
            return None
        if self.is_exact:
            return statistics.median(self.values)
        return (self._ranked((count - 1) // 2) + self._ranked(count // 2)) / 2

    @property
    def is_exact(self) -> bool:
        """Whether the median is of the rows' own values."""
        return len(self.values) == self.bins.total()

    def add_mean(self, mean: float) -> None:
        """One row's mean log-probability per token, in nats."""
        self.bins[int(mean // BIN_NATS)] += 1
        if self.bins.total() <= _MOST_VALUES:
            self.values.append(mean)
        else:
            del self.values[:]

    def _ranked(self, rank: int) -> float:
        """The middle of the bin that holds the value at `rank`, counted from 0, in ascending order."""
        seen = 0
        for index in sorted(self.bins):
            seen += self.bins[index]
            if seen > rank:
                return (index + 0.5) * BIN_NATS
        raise AssertionError("a rank below the number of rows")


class ScoreTally:
    """Takes output rows one by one. `adapters`: scores by adapter, in the order in which they came."""

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterScores] = {}

    def add(self, row: dict[str, Any]) -> None:
        """One output row; of a row whose adapter is null nothing is counted, as it belongs to none."""
        if row["adapter"] is None:
            return
        scores = self.adapters.setdefault(row["adapter"], AdapterScores())
        if row["error"] is not None or row["logprob_sum"] is None:
            scores.errors += 1
            return
        scores.rows += 1
        tokens = row["num_tokens"] - 1
        if tokens > 0:
            scores.tokens += tokens
            scores.logprob_sum += row["logprob_sum"]
            scores.add_mean(row["logprob_sum"] / tokens)


class TallySink(RowSink):
    """A sink that counts the lines on their way to another."""

    def __init__(self, sink: RowSink, tally: ScoreTally) -> None:
        self._sink = sink
        self._tally = tally

    def write(self, line: bytes) -> None:
        """Counts one line, then passes it on."""
        self._tally.add(json.loads(line))
        self._sink.write(line)

    def __enter__(self) -> TallySink:
        self._sink.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._sink.__exit__(*failure)


def tally_output(path: Path, *, shard: tuple[int, int] | None = None) -> ScoreTally:
    """Counts a finished output: a file of rows, or of a folder of parts those of shard I of N."""
    tally = ScoreTally()
    for row in _shard_rows(path, *shard) if shard is not None else _file_rows(path):
        tally.add(row)
    return tally


def _file_rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.name.lower().endswith(ENDING):
        with path.open("rb") as file:
            yield from map(json.loads, file)
        return
    require_pyarrow(str(path))
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        for batch in table.iter_batches(columns=list(_FIELDS)):
            yield from batch.to_pylist()


def _shard_rows(folder: Path, index: int, count: int) -> Iterable[dict[str, Any]]:
    for part in sorted(folder.glob("part-*.jsonl")):
        window = int(re.sub(r"\D", "", part.stem))
        if window % count == index:
            with part.open("rb") as file:
                next(file, None)  # the header
                yield from map(json.loads, file)
