"""The prefill job: rows in, one output line per (row, adapter) out, in the order of the input.

Everything heavy is behind the `Scorer`; everything about files is in `reader` and `writer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from moelora.errors import ConfigError, RequestError, choose_from
from moelora.jobs.outputs import dry_row, error_row, result_row
from moelora.jobs.rows import Row
from moelora.jobs.stats import JobStats
from moelora.jobs.text import Encoded, TextEncoder, fit
from moelora.jobs.writer import RowSink, encode_row, finite_row
from moelora.types import BASE_ADAPTER, Request, Result

ALL_ADAPTERS = "*"
"""Stands for all adapters of the run wherever an adapter's name may stand."""


class Scorer(Protocol):
    """What the job needs of the engine; `PrefillEngine` has it."""

    @property
    def vocab_size(self) -> int:
        """Token ids lie in `[0, vocab_size)`."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model takes, in tokens; None if it has no limit."""
        ...

    @property
    def adapter_names(self) -> list[str]:
        """The adapters of the run, in order, without the base."""
        ...

    def check(self, request: Request) -> str | None:
        """Why the request cannot be scored, or None."""
        ...

    def score_stream(
        self, requests: Iterable[Request], on_batch: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Result]]:
        """Results with the index of their request, in any order. `on_batch` is called behind those of each batch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What is scored and what is said of it.

    default_adapter: for rows that name none: a name, "*", "__base__", or None for "*" if there are adapters, else the
        base. with_base: "*" includes the base, first. logprobs: "tokens" adds `token_ids` and `token_logprobs`.
    top_k: entries of `top_logprobs`. max_length: most tokens of a prompt and its longest choice together, None for the
        model's positions. on_long: refuse a longer row, or cut its prompt on the left.
    """

    default_adapter: str | None = None
    with_base: bool = False
    logprobs: Literal["sum", "tokens"] = "sum"
    top_k: int = 0
    max_length: int | None = None
    on_long: Literal["error", "truncate-left"] = "error"


@dataclass(slots=True)
class _Pending:
    """An input row whose lines are not all there yet. results: those without an error, by adapter."""

    lines: list[bytes | None]
    results: dict[str, Result] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Unit:
    """One (row, adapter): a request to be scored, or the reason why there is none."""

    row: Row
    adapter: str | None
    encoded: Encoded | None = None
    error: str | None = None

    def request(self, top_k: int) -> Request:
        assert self.encoded is not None
        assert self.adapter is not None
        return Request(
            token_ids=self.encoded.token_ids, adapter=self.adapter, choices=self.encoded.choices, top_k=top_k
        )


class PrefillJob:
    """Scores rows with one engine. Raises `ConfigError` if the options do not fit the engine.

    A row that cannot be read gives one output row whose adapter is null; a row that can be read but not scored gives
    one per adapter, like any other.

    stats: all that counts for the run; earlier: what of it was scored elsewhere or before. `on_progress` gets both,
    behind every batch: results of one come all at once, and then nothing until the next is finished.
    """

    def __init__(
        self,
        engine: Scorer,
        encoder: TextEncoder,
        options: JobOptions = JobOptions(),
        on_progress: Callable[[JobStats, JobStats], None] | None = None,
    ) -> None:
        self._engine = engine
        self._encoder = encoder
        self._options = options
        self._on_progress = on_progress or (lambda stats, earlier: None)
        self._default = default_adapters(options, engine.adapter_names)
        limits = [(options.max_length, "max length"), (engine.max_positions, "positions of the model")]
        given = [(limit, origin) for limit, origin in limits if limit is not None]
        self._limit: int | None
        self._limit, self._limit_origin = min(given, default=(None, ""))
        if options.top_k > engine.vocab_size:
            raise ConfigError(f"top_k is {options.top_k}, and the vocabulary has only {engine.vocab_size} tokens")
        self.stats = JobStats()
        self.earlier = JobStats()
        self._pending: deque[_Pending] = deque()
        self._waiting: dict[int, tuple[_Pending, int, _Unit]] = {}

    def run(self, rows: Iterable[Row], sink: RowSink) -> JobStats:
        """Scores rows and writes their lines to `sink`; may be called again for further rows, `stats` counts on.

        A bad row costs that row; what is raised ends the job.
        """
        for index, result in self._engine.score_stream(self._requests(rows, sink), self._show):
            pending, place, unit = self._waiting.pop(index)
            self._finish(pending, place, unit, result)
            self._flush(sink)
        self._flush(sink)
        if self._waiting or self._pending:
            raise RuntimeError(f"the engine left {len(self._waiting)} requests without a result")
        self._show()
        return self.stats

    def _show(self) -> None:
        self._on_progress(self.stats, self.earlier)

    def take_over(self, stats: JobStats) -> None:
        """Counts rows that need no scoring, as an earlier run or another worker has scored them."""
        self.stats.add(stats)
        self.earlier.add(stats)

    def dry_run(self, rows: Iterable[Row], sink: RowSink) -> JobStats:
        """Writes the token ids that would be scored, one line per (row, adapter); the engine scores nothing."""
        for row in rows:
            self.stats.rows += 1
            for unit in self._units(row):
                self.stats.count_line(unit.error)
                if unit.encoded is not None and unit.error is None:
                    self._count_cut(unit.encoded)
                sink.write(encode_row(dry_row(unit.row, unit.adapter, unit.encoded, unit.error)))
        return self.stats

    def requests(self, rows: Iterable[Row]) -> Iterator[tuple[Row, Request]]:
        """What would be scored, in the order of the input, each with its row; other rows are counted as errors."""
        for row in rows:
            self.stats.rows += 1
            for unit in self._units(row):
                self.stats.count_line(unit.error)
                if unit.error is None:
                    yield row, unit.request(self._options.top_k)

    def requests_of(self, row: Row) -> int:
        """How many output lines a row gives: one per adapter, and one if it gives an error as a whole."""
        if row.error is not None:
            return 1
        try:
            return len(self._adapters_of(row))
        except RequestError:
            return 1

    def _adapters_of(self, row: Row) -> list[str]:
        names, with_base = self._engine.adapter_names, self._options.with_base
        return expand_adapters(row.adapters or self._default, names, with_base)

    def _requests(self, rows: Iterable[Row], sink: RowSink) -> Iterator[Request]:
        """The requests of all rows, in order; the place of each one's line is kept in `_waiting` by its number."""
        number = 0
        for row in rows:
            self.stats.rows += 1
            units = list(self._units(row))
            pending = _Pending(lines=[None] * len(units))
            self._pending.append(pending)
            for place, unit in enumerate(units):
                if unit.error is not None:
                    self.stats.count_line(unit.error)
                    self.stats.count_input(row.size, place, len(units))
                    pending.lines[place] = encode_row(error_row(row, unit.adapter, unit.encoded, unit.error))
                    continue
                self._waiting[number] = (pending, place, unit)
                number += 1
                yield unit.request(self._options.top_k)
            if None not in pending.lines:
                self._flush(sink)  # no result will come for this row: a million bad ones must not pile up

    def _units(self, row: Row) -> Iterator[_Unit]:
        if row.error is not None:
            yield _Unit(row, None, error=row.error)
            return
        encoded: Encoded | None = None
        error: str | None = None
        try:
            adapters = self._adapters_of(row)
        except RequestError as problem:
            yield _Unit(row, None, error=f"line {row.line}: {problem}")
            return
        try:
            encoded = fit(
                self._encoder.encode(row),
                limit=self._limit,
                truncate=self._options.on_long == "truncate-left",
                opening=self._encoder.opening,
                origin=self._limit_origin,
            )
        except RequestError as problem:
            error = f"line {row.line}: {problem}"
        for adapter in adapters:
            unit = _Unit(row, adapter, encoded, error)
            if error is None and (reason := self._engine.check(unit.request(self._options.top_k))) is not None:
                unit = replace(unit, error=f"line {row.line}: {reason}")
            yield unit

    def _finish(self, pending: _Pending, place: int, unit: _Unit, result: Result) -> None:
        assert unit.encoded is not None
        assert unit.adapter is not None
        tokens = self._options.logprobs == "tokens"
        row = result_row(unit.row, unit.adapter, unit.encoded, result, tokens=tokens, top_k=self._options.top_k)
        try:
            line = encode_row(row)
        except ValueError:
            row = finite_row(row, where=f"line {unit.row.line}: ")
            line = encode_row(row)
        self.stats.count_line(row["error"])
        self.stats.count_input(unit.row.size, place, len(pending.lines))
        self._count_cut(unit.encoded)
        self.stats.requests += 1
        self.stats.tokens += len(unit.encoded.token_ids) + sum(map(len, unit.encoded.choices))
        pending.lines[place] = line
        if row["error"] is None:
            pending.results[unit.adapter] = result

    def _flush(self, sink: RowSink) -> None:
        while self._pending and None not in self._pending[0].lines:
            done = self._pending.popleft()
            for line in done.lines:
                assert line is not None
                sink.write(line)
            self.stats.compare(done.results)

    def _count_cut(self, encoded: Encoded) -> None:
        if encoded.truncated_tokens:
            self.stats.truncated_rows += 1
            self.stats.truncated_tokens += encoded.truncated_tokens


def default_adapters(options: JobOptions, names: Sequence[str]) -> tuple[str, ...]:
    """The adapters of a row that names none. Raises `ConfigError` for a default that the run does not have."""
    if options.default_adapter is None:
        return (ALL_ADAPTERS,) if names else (BASE_ADAPTER,)
    if options.default_adapter == ALL_ADAPTERS and not names and not options.with_base:
        raise ConfigError("the default adapter is '*', but no adapters are given")
    if options.default_adapter not in (ALL_ADAPTERS, BASE_ADAPTER, *names):
        raise ConfigError(choose_from("default adapter", options.default_adapter, [ALL_ADAPTERS, BASE_ADAPTER, *names]))
    return (options.default_adapter,)


def expand_adapters(given: Sequence[str], names: Sequence[str], with_base: bool) -> list[str]:
    """Names for `given`, with "*" replaced by all `names` (and the base before them). Each comes once.

    Unknown names stay, to become errors of their own. Raises `RequestError` if "*" stands for nothing.
    """
    expanded: list[str] = []
    for name in given:
        everything = ([BASE_ADAPTER] if with_base else []) + list(names)
        expanded += everything if name == ALL_ADAPTERS else [name]
    if not expanded:
        raise RequestError("adapter is '*', but no adapters are given")
    return list(dict.fromkeys(expanded))
