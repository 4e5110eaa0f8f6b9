"""How far two results of one request lie apart, and the sum of that by adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moelora.types import Result

FP32_TOLERANCE = 1e-3
HALF_TOLERANCE = 0.15


def default_tolerance(dtype: torch.dtype) -> float:
    """Nats that a log-probability may differ by where nothing is wrong.

    fp32: two orders of summation differ by 1e-5, and by some 1e-4 in deep models; an adapter dropped or scaled wrongly
    moves scores by far more than 1e-3. 16-bit: a weight or activation is rounded by up to 2⁻⁹ (bfloat16), logits of 10 to
    30 by 0.03 to 0.06 each, and a token near the border of two experts may be routed otherwise.
    """
    return FP32_TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE


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
