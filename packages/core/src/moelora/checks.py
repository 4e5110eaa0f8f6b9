"""Why a request cannot be scored: its types, its adapter, its tokens. Needs no weights, so that a plan checks alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import index as as_integer
from typing import Any

from moelora.errors import choose_from
from moelora.types import BASE_ADAPTER, Request


def vocab_size_of(text_config: Any) -> int:
    """V: token ids lie in [0, V). An embedding may have more rows, as padding, which some heads give no logits for."""
    size = int(text_config.vocab_size)
    return min(size, getattr(text_config, "unpadded_vocab_size", None) or size)


def check_request(
    request: Request, *, adapters: Collection[str], vocab_size: int, max_positions: int | None
) -> str | None:
    """Why a request cannot be scored, or None if it can. Whatever a caller put into it, nothing is raised."""
    problem = _malformed(request)
    if problem:
        return problem
    if request.adapter != BASE_ADAPTER and request.adapter not in adapters:
        return unknown_adapter(request.adapter, adapters)
    if not len(request.token_ids):
        return "the prompt has no tokens"
    empty = [i for i, choice in enumerate(request.choices) if not len(choice)]
    if empty:
        return f"choice {empty[0]} has no tokens"
    for ids in (request.token_ids, *request.choices):
        if min(ids) < 0 or max(ids) >= vocab_size:
            outside = next(t for t in ids if not 0 <= t < vocab_size)
            return f"token id {outside} is outside the vocabulary [0, {vocab_size})"
    # The last choice token is predicted but never read, yet counting it keeps the rule simple to state.
    longest = len(request.token_ids) + max(map(len, request.choices), default=0)
    if max_positions is not None and longest > max_positions:
        return f"{longest} tokens are more than the model's {max_positions} positions"
    if not 0 <= request.top_k <= vocab_size:
        return f"top_k {request.top_k} is outside [0, {vocab_size}]"
    if not 0 <= request.score_from <= len(request.token_ids):
        return f"score_from {request.score_from} is outside [0, {len(request.token_ids)}]"
    return None


def _malformed(request: Request) -> str | None:
    """What of a request has the wrong type. Arrays of numpy and tensors of torch may stand for sequences."""
    if not isinstance(request, Request):
        return f"must be a Request, got {type(request).__name__}"
    if not isinstance(request.adapter, str):
        return f"adapter must be a name, got {type(request.adapter).__name__}"
    for name in ("top_k", "score_from"):
        if not _is_integer(getattr(request, name)):
            return f"{name} must be an integer, got {getattr(request, name)!r:.40}"
    if not _is_sequence(request.choices):
        return f"choices must be a sequence of sequences of integers, got {type(request.choices).__name__}"
    named = [("token_ids", request.token_ids), *((f"choices[{i}]", c) for i, c in enumerate(request.choices))]
    for name, ids in named:
        if not _is_sequence(ids):
            return f"{name} must be a sequence of integers, got {type(ids).__name__}"
        if not set(map(type, ids)) <= {int}:  # the usual case, at the speed of C
            wrong = [i for i, token in enumerate(ids) if not _is_integer(token)]
            if wrong:
                return f"{name}[{wrong[0]}] must be an integer, got {ids[wrong[0]]!r:.40}"
    return None


def _is_sequence(value: Any) -> bool:
    if type(value) in (tuple, list):  # the usual case: to ask whether it is a `Sequence` takes ten times as long
        return True
    if isinstance(value, str | bytes | bytearray):
        return False
    return isinstance(value, Sequence) or len(getattr(value, "shape", ())) > 0


def _is_integer(value: Any) -> bool:
    try:
        as_integer(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)


def count_tokens(request: Any) -> int:
    """Tokens of a request that may be none."""
    ids = getattr(request, "token_ids", ())
    return len(ids) if _is_sequence(ids) else 0


def unknown_adapter(name: str, adapters: Collection[str]) -> str:
    """The sentence for a name that is not among `adapters`."""
    if not adapters:
        return f"unknown adapter {name!r}: no adapters were given"
    return choose_from("adapter", name, [*adapters, BASE_ADAPTER])
