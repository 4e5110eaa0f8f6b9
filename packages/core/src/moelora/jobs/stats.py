"""What a job counts, in one process or in several, and the adapters that seem to do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from moelora.types import BASE_ADAPTER, Result
from moelora.wording import counted

_SHOWN_ERRORS = 5

_EQUAL_NATS = 1e-5
"""Nats per token by which float32 scores of one row differ beside other rows; an adapter changes far more."""
_CLOSE_NATS = 1e-3
"""The same for 16-bit, on average, where at least half of the rows have the same bits."""


@dataclass(slots=True, kw_only=True)
class TwinCount:
    """How an adapter's scores compare with the base's on the same rows. distance: nats per token, summed over rows."""

    rows: int = 0
    equal_rows: int = 0
    distance: float = 0.0

    @property
    def is_twin(self) -> bool:
        """Whether the adapter scores as the base does: as a rule, one that was not applied."""
        if not self.rows:
            return False
        mean = self.distance / self.rows
        return mean <= _EQUAL_NATS or (2 * self.equal_rows >= self.rows and mean <= _CLOSE_NATS)


@dataclass(slots=True, kw_only=True)
class JobStats:
    """What a job has done so far. rows: input rows read. output_rows: lines written; error_rows: those with an error.

    input_done: how much of the input the lines written stand for, as `Row.size` counts.
    requests: sequences scored. tokens: their tokens, choices included. truncated_rows: output rows that were cut.
    twins: by adapter, on the rows that were scored under the base too.
    """

    rows: int = 0
    output_rows: int = 0
    error_rows: int = 0
    input_done: int = 0
    requests: int = 0
    tokens: int = 0
    truncated_rows: int = 0
    truncated_tokens: int = 0
    first_errors: list[str] = field(default_factory=list)
    twins: dict[str, TwinCount] = field(default_factory=dict)

    def count_line(self, error: str | None) -> None:
        """One output line."""
        self.output_rows += 1
        if error is not None:
            self.error_rows += 1
            self._note_errors([error])

    def count_input(self, size: int, place: int, lines: int) -> None:
        """Line `place` of the `lines` of a row is done: its part of the row's `size`, to which they add up."""
        self.input_done += size * (place + 1) // lines - size * place // lines

    def compare(self, results: Mapping[str, Result]) -> None:
        """The results of one row by adapter."""
        base = results.get(BASE_ADAPTER)
        if base is None:
            return
        values = _values(base)
        for adapter, result in results.items():
            if adapter == BASE_ADAPTER:
                continue
            own = _values(result)
            twin = self.twins.setdefault(adapter, TwinCount())
            twin.rows += 1
            twin.equal_rows += own == values
            tokens = max(base.num_tokens, 1) + sum(choice.num_tokens for choice in base.choices)
            twin.distance += sum(abs(a - b) for a, b in zip(own, values, strict=True)) / tokens

    @property
    def warnings(self) -> list[str]:
        """One sentence for each adapter that scores as the base does."""
        return [
            f"adapter {adapter!r} scores {'exactly' if twin.equal_rows == twin.rows else 'up to rounding'} as the base "
            f"in every row scored with both ({counted(twin.rows, 'row')}); check that it is the adapter you mean "
            "(moelora inspect shows what it changes)"
            for adapter, twin in self.twins.items()
            if twin.is_twin
        ]

    def add(self, other: JobStats) -> None:
        """Adds what was counted elsewhere, or earlier, for other rows."""
        for one in fields(self):
            if isinstance(value := getattr(other, one.name), int):
                setattr(self, one.name, getattr(self, one.name) + value)
        self._note_errors(other.first_errors)
        for adapter, theirs in other.twins.items():
            own = self.twins.setdefault(adapter, TwinCount())
            own.rows += theirs.rows
            own.equal_rows += theirs.equal_rows
            own.distance += theirs.distance

    def since(self, before: JobStats) -> JobStats:
        """What was counted after `before`, an earlier copy of these counts."""
        later = JobStats(first_errors=self.first_errors[len(before.first_errors) :])
        for one in fields(self):
            if isinstance(value := getattr(self, one.name), int):
                setattr(later, one.name, value - getattr(before, one.name))
        for adapter, twin in self.twins.items():
            old = before.twins.get(adapter, TwinCount())
            later.twins[adapter] = TwinCount(
                rows=twin.rows - old.rows,
                equal_rows=twin.equal_rows - old.equal_rows,
                distance=max(twin.distance - old.distance, 0.0),
            )
        return later

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> JobStats:
        """What `to_json` gave."""
        twins = {adapter: TwinCount(**twin) for adapter, twin in value["twins"].items()}
        return JobStats(**{**value, "first_errors": list(value["first_errors"]), "twins": twins})

    def _note_errors(self, errors: list[str]) -> None:
        for error in errors:
            if len(self.first_errors) < _SHOWN_ERRORS and error not in self.first_errors:
                self.first_errors.append(error)


def _values(result: Result) -> tuple[float, ...]:
    """The numbers that tell one result from another."""
    following = 0.0 if result.next_token is None else result.next_token.logprob
    return (result.logprob_sum, following, *(choice.logprob for choice in result.choices))
