"""How far two results of one request lie apart, and the sum of that by adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from moelora.types import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """What is still taken for agreement. on: "largest" or "mean", the difference that `nats` bounds."""

    nats: float
    on: Literal["largest", "mean"]

    @staticmethod
    def of(dtype: torch.dtype, nats: float | None = None) -> Tolerance:
        """The tolerance of a dtype, or `nats` in its place.

        float32: two orders of summation lie 1e-5 apart, in deep models some 1e-4; anything left out of an adapter moves
        some token by far more than 1e-3. 16-bit: a token near the border of two experts is routed otherwise by
        rounding alone, and then is a nat away from the truth with nothing wrong. Measured on examples/tiny-moe:
        largest 1.2 in both 16-bit dtypes, mean 0.02 in bfloat16 and 0.003 in float16; without its adapter, a row is
        1.0 to 2.8 away in the mean. So the mean is judged, by 0.1.
        """
        if dtype == torch.float32:
            return Tolerance(nats=1e-3 if nats is None else nats, on="largest")
        return Tolerance(nats=0.1 if nats is None else nats, on="mean")

    def admits(self, one: Comparison) -> bool:
        """Whether an adapter agrees with its reference."""
        return (one.largest if self.on == "largest" else one.mean) <= self.nats


@dataclass(slots=True, kw_only=True)
class Comparison:
    """One adapter against its reference ("plain", "peft" or "merged"). note: why that one; empty for the usual one.

    rows, tokens: compared requests and log-probabilities of tokens. largest, mean: of the absolute differences, in
    nats; infinite where a score is not finite. worst_line: where the largest was found. greedy_agree of greedy_total:
    arg-max decisions (the next token; whether a choice is greedy) on which both agree.
    """

    adapter: str
    reference: str
    note: str = ""
    rows: int = 0
    tokens: int = 0
    largest: float = 0.0
    worst_line: int | None = None
    greedy_agree: int = 0
    greedy_total: int = 0
    _sum: float = 0.0

    @property
    def mean(self) -> float:
        """The mean absolute difference; 0 where nothing was compared."""
        return self._sum / self.tokens if self.tokens else 0.0

    def add(self, line: int, ours: Result, theirs: Result) -> None:
        """Takes in one request, from `line` of the input."""
        self.rows += 1
        for difference, tokens in _differences(ours, theirs):
            self.tokens += tokens
            self._sum += difference * tokens
            if difference > self.largest or self.worst_line is None:
                self.largest, self.worst_line = difference, line
        decisions = [_next_id(ours) == _next_id(theirs)]
        decisions += [a.is_greedy == b.is_greedy for a, b in zip(ours.choices, theirs.choices, strict=True)]
        self.greedy_agree += sum(decisions)
        self.greedy_total += len(decisions)


def _differences(ours: Result, theirs: Result) -> Iterator[tuple[float, int]]:
    """Absolute differences, and of how many tokens each is the mean: one token, or all of a choice."""
    for a, b in zip(ours.token_logprobs, theirs.token_logprobs, strict=True):
        if a is not None and b is not None:
            yield _apart(a, b), 1
    for mine, other in zip(ours.choices, theirs.choices, strict=True):
        yield _apart(mine.logprob, other.logprob) / mine.num_tokens, mine.num_tokens
    if ours.next_token is not None and theirs.next_token is not None:
        yield _apart(ours.next_token.logprob, theirs.next_token.logprob), 1


def _apart(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf


def _next_id(result: Result) -> int | None:
    return None if result.next_token is None else result.next_token.token_id
