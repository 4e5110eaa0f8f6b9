"""From requests to the sequences that run through the model, and the positions of each that must be scored."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from moelora.types import Request

NO_TARGET = -1
"""The target of a position of which only the arg-max and the top k are wanted."""

PROMPT = -1
"""The choice index of positions that belong to the request itself."""

_OPEN = (NO_TARGET,)


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """Neighbouring positions whose next-token distributions are wanted: one object for all of them, not one for each.

    first: the first position in the sequence; each position's distribution is that of the token after it. targets:
    those tokens, or `(NO_TARGET,)`. choice: index of the choice they count towards, or PROMPT.
    """

    first: int
    targets: Seq[int]
    choice: int

    @property
    def is_open(self) -> bool:
        """Whether it is a single position without a target."""
        return len(self.targets) == 1 and self.targets[0] == NO_TARGET


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """Tokens that run through the model contiguously under one adapter. `request`: index of the request it serves.

    runs: in the order in which their scores are handed back.
    """

    request: int
    adapter: str
    token_ids: Seq[int]
    runs: tuple[ScoredRun, ...]
    top_k: int

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Positions that are scored."""
        return sum(len(run.targets) for run in self.runs)


def expand(index: int, request: Request) -> list[Sequence]:
    """The sequences of one request: the request itself, or, with choices, the request continued by each of them.

    The first sequence also scores the request's own tokens: attention is causal, so what follows does not change them.
    Choices whose read tokens are the same (all those of one token) share a sequence.
    """
    context = _plain(request.token_ids)
    last = len(context) - 1
    first = max(request.score_from, 1)
    own = [ScoredRun(first - 1, context[first:], PROMPT)] if first <= last else []
    own.append(ScoredRun(last, _OPEN, PROMPT))
    if not len(request.choices):
        return [
            Sequence(request=index, adapter=request.adapter, token_ids=context, runs=tuple(own), top_k=request.top_k)
        ]
    runs_by_tokens: dict[tuple[int, ...], list[ScoredRun]] = {}
    for number, choice in enumerate(map(_plain, request.choices)):
        # The last choice token is only predicted, never read.
        runs = runs_by_tokens.setdefault(tuple(map(int, choice[:-1])), own if number == 0 else [])
        runs.append(ScoredRun(last, choice, number))
    return [
        Sequence(
            request=index,
            adapter=request.adapter,
            token_ids=[*context, *read],
            runs=tuple(runs),
            top_k=request.top_k if number == 0 else 0,
        )
        for number, (read, runs) in enumerate(runs_by_tokens.items())
    ]


def _plain(ids: Any) -> Seq[int]:
    """Token ids as a sequence of Python's own: arrays and tensors become lists, other sequences stay as they are."""
    return ids.tolist() if hasattr(ids, "tolist") else ids
