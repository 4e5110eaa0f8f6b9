"""The distribution of a run's scores, adapter by adapter, in memory that does not grow with the rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelora.jobs.parquet import ENDING, require_pyarrow
from moelora.jobs.writer import RowSink

BIN_NATS = 0.05
"""Width of a bin of mean log-probability per token."""

_FIELDS = ("adapter", "num_tokens", "logprob_sum", "error")


@dataclass(slots=True)
class AdapterScores:
    """Scores of one adapter. bins: rows by their mean log-probability per token, in steps of `BIN_NATS`, rounded down.

    tokens: those that have a log-probability; rows of a single token have none. errors: rows without scores.
    """

    rows: int = 0
    errors: int = 0
    tokens: int = 0
    logprob_sum: float = 0.0
    bins: Counter[int] = field(default_factory=Counter)

    @property
    def mean(self) -> float | None:
        """Nats per token over all rows."""
        return self.logprob_sum / self.tokens if self.tokens else None

    @property
    def median(self) -> float | None:
        """Of the rows' means, to the width of a bin."""
        half, seen = sum(self.bins.values()) / 2, 0
        for index in sorted(self.bins):
            seen += self.bins[index]
            if seen >= half:
                return (index + 0.5) * BIN_NATS
        return None


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
            scores.bins[int(row["logprob_sum"] / tokens // BIN_NATS)] += 1


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
