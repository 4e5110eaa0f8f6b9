"""From requests to the sequences that run through the model, and the rows of each that must be scored."""

from __future__ import annotations

from dataclasses import dataclass

from moelora.types import Request

NO_TARGET = -1
"""The target of a row of which only the arg-max and the top k are wanted."""

PROMPT = -1
"""The choice index of rows that belong to the request itself."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A position whose next-token distribution is wanted.

    position: in the sequence; the distribution is that of the token after it. target: that token, or NO_TARGET.
    choice: index of the choice it counts towards, or PROMPT.
    """

    position: int
    target: int
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """Tokens that run through the model contiguously under one adapter. `request`: index of the request it serves."""

    request: int
    adapter: str
    token_ids: tuple[int, ...]
    rows: tuple[ScoredRow, ...]
    top_k: int

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return len(self.token_ids)


def expand(index: int, request: Request) -> list[Sequence]:
    """The sequences of one request: the request itself, or, with choices, the request continued by each of them.

    The first sequence also scores the request's own tokens: attention is causal, so what follows does not change them.
    Choices whose read tokens are the same (all those of one token) share a sequence.
    """
    context = tuple(map(int, request.token_ids))
    last = len(context) - 1
    first = max(request.score_from, 1)
    own = [ScoredRow(i - 1, context[i], PROMPT) for i in range(first, len(context))]
    own.append(ScoredRow(last, NO_TARGET, PROMPT))
    rows_by_tokens: dict[tuple[int, ...], list[ScoredRow]] = {}
    choices = [tuple(map(int, choice)) for choice in request.choices] or [()]
    for number, choice in enumerate(choices):
        # The last choice token is only predicted, never read.
        rows = rows_by_tokens.setdefault(context + choice[:-1], own if number == 0 else [])
        rows.extend(ScoredRow(last + i, token, number) for i, token in enumerate(choice))
    return [
        Sequence(
            request=index,
            adapter=request.adapter,
            token_ids=tokens,
            rows=tuple(rows),
            top_k=request.top_k if number == 0 else 0,
        )
        for number, (tokens, rows) in enumerate(rows_by_tokens.items())
    ]
