"""From scored rows back to requests: sums, choices, the first new token, and what is wrong with a row's numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from moelora.backends.fused_ops import RowScores
from moelora.batching.sequences import PROMPT, Sequence, expand
from moelora.types import ChoiceScore, Request, Result, RunMode, TokenScore


@dataclass(frozen=True, slots=True, kw_only=True)
class HostScores:
    """`RowScores` as arrays of the host: a piece of a tensor costs ten times that of an array, and there are many."""

    target_logprob_N: np.ndarray
    is_greedy_N: np.ndarray
    best_id_N: np.ndarray
    best_logprob_N: np.ndarray
    top_ids_MK: np.ndarray
    top_logprobs_MK: np.ndarray

    @staticmethod
    def of(scores: RowScores) -> HostScores:
        """Views of tensors that lie on the host."""
        return HostScores(**{one.name: getattr(scores, one.name).numpy() for one in fields(HostScores)})


class ResultBuilder:
    """Collects the scored sequences of one request until all are there."""

    def __init__(self, index: int, request: Request) -> None:
        self.request = request
        self.sequences = expand(index, request)
        self._missing = len(self.sequences)
        self._logprobs: list[Any] = [None] if request.score_from == 0 else []
        self._greedy = True
        self._next: TokenScore | None = None
        self._top: list[TokenScore] = []
        self._choices: list[tuple[list[float], bool]] = [([], True) for _ in request.choices]
        self._mode = RunMode.EAGER

    def add(self, sequence: Sequence, scores: HostScores, first: int, first_open: int, mode: RunMode) -> Result | None:
        """Takes in the scores of one sequence. Returns the result once complete.

        first: where the sequence's rows begin; first_open: the same among the rows without a target.
        """
        self._mode = mode
        for run in sequence.runs:
            if run.is_open:
                self._add_open(sequence.top_k, scores, first, first_open)
            else:
                # Lists at once: there is one element per token.
                rows = slice(first, first + len(run.targets))
                logprobs, greedy = scores.target_logprob_N[rows].tolist(), bool(scores.is_greedy_N[rows].all())
                if run.choice == PROMPT:
                    self._logprobs += logprobs
                    self._greedy &= greedy
                else:
                    self._choices[run.choice] = (logprobs, greedy)
            first += len(run.targets)
        self._missing -= 1
        return self._finish() if self._missing == 0 else None

    def _add_open(self, top_k: int, scores: HostScores, row: int, open_row: int) -> None:
        self._next = TokenScore(int(scores.best_id_N[row]), float(scores.best_logprob_N[row]))
        if top_k:
            ids, best = scores.top_ids_MK[open_row].tolist(), scores.top_logprobs_MK[open_row].tolist()
            self._top = [TokenScore(i, p) for i, p in zip(ids, best, strict=True)][:top_k]

    def _finish(self) -> Result:
        choices = [
            ChoiceScore(
                token_ids=tuple(map(int, ids)), logprob=math.fsum(values), num_tokens=len(values), is_greedy=greedy
            )
            for ids, (values, greedy) in zip(self.request.choices, self._choices, strict=True)
        ]
        scored = self._logprobs[1:] if self.request.score_from == 0 else self._logprobs  # position 0 has none
        logprob_sum = math.fsum(scored)
        return Result(
            num_tokens=len(self.request.token_ids),
            logprob_sum=logprob_sum,
            token_logprobs=self._logprobs,
            is_greedy=self._greedy,
            next_token=self._next,
            top_logprobs=self._top,
            choices=choices,
            mode=self._mode,
            error=self._not_finite(logprob_sum, choices),
        )

    def _not_finite(self, logprob_sum: float, choices: list[ChoiceScore]) -> str | None:
        """The first score that is no finite number, in words."""
        if not math.isfinite(logprob_sum):  # of numbers up to 0: finite if and only if all of them are
            for i, value in enumerate(self._logprobs, start=self.request.score_from):
                if value is not None and not math.isfinite(value):
                    return f"the log-probability of token {i} is {value}"
        for i, choice in enumerate(choices):
            if not math.isfinite(choice.logprob):
                return f"the log-probability of choice {i} is {choice.logprob}"
        scores = [self._next, *self._top] if self._next is not None else self._top
        for score in scores:
            if not math.isfinite(score.logprob):
                return f"the log-probability of next token {score.token_id} is {score.logprob}"
        return None
