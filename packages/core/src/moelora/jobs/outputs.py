"""The output row: which fields it has, and what stands in them when there is no score."""

from __future__ import annotations

from typing import Any

from moelora.jobs.rows import Row
from moelora.jobs.text import Encoded
from moelora.types import ChoiceScore, Result, TokenScore


def result_row(row: Row, adapter: str, encoded: Encoded, result: Result, *, tokens: bool, top_k: int) -> dict[str, Any]:
    """The output row of a scored request. `tokens` adds `token_ids` and `token_logprobs`; `top_k` > 0 `top_logprobs`.

    Log-probabilities are in nats. A result that holds an error and no scores gives an error row.
    """
    if result.error is not None and result.next_token is None:
        return error_row(row, adapter, encoded, f"line {row.line}: {result.error}")
    out: dict[str, Any] = {
        "id": row.id,
        "adapter": adapter,
        "num_tokens": result.num_tokens,
        "truncated_tokens": encoded.truncated_tokens,
        "logprob_sum": result.logprob_sum,
        "is_greedy": result.is_greedy,
    }
    if tokens:
        out["token_ids"] = list(encoded.token_ids)
        out["token_logprobs"] = list(result.token_logprobs)
    out["next_token"] = None if result.next_token is None else _token(result.next_token)
    if top_k:
        out["top_logprobs"] = [_token(entry) for entry in result.top_logprobs]
    if row.has_choices:
        out["choices"] = [_choice(row, index, score) for index, score in enumerate(result.choices)]
    out["mode"] = str(result.mode.value)
    out["metadata"] = row.metadata
    out["error"] = None if result.error is None else f"line {row.line}: {result.error}"
    return out


def error_row(row: Row, adapter: str | None, encoded: Encoded | None, error: str) -> dict[str, Any]:
    """The output row of something that was not scored: the fields that every row has, null, and the reason."""
    return {
        "id": row.id,
        "adapter": adapter,
        "num_tokens": None if encoded is None else len(encoded.token_ids),
        "truncated_tokens": 0 if encoded is None else encoded.truncated_tokens,
        "logprob_sum": None,
        "is_greedy": None,
        "next_token": None,
        "mode": None,
        "metadata": row.metadata,
        "error": error,
    }


def dry_row(row: Row, adapter: str | None, encoded: Encoded | None, error: str | None) -> dict[str, Any]:
    """What a dry run says of a request: its token ids as the model would get them."""
    out: dict[str, Any] = {
        "id": row.id,
        "adapter": adapter,
        "num_tokens": None if encoded is None else len(encoded.token_ids),
        "truncated_tokens": 0 if encoded is None else encoded.truncated_tokens,
        "token_ids": None if encoded is None else list(encoded.token_ids),
    }
    if row.has_choices and encoded is not None:
        out["choices"] = [
            {**({"text": row.choices[index]} if row.choices else {}), "token_ids": list(ids)}
            for index, ids in enumerate(encoded.choices)
        ]
    out["error"] = error
    return out


def _token(score: TokenScore) -> dict[str, Any]:
    return {"token_id": score.token_id, "logprob": score.logprob}


def _choice(row: Row, index: int, score: ChoiceScore) -> dict[str, Any]:
    """One choice, with its log-probability as it is, per token and per byte: rankings differ between the three.

    Bytes are those of the choice's text as given, in UTF-8, without white space that moved over from the context.
    """
    text = row.choices[index] if row.choices else None
    num_bytes = None if text is None else len(text.encode("utf-8"))
    return {
        **({"text": text} if text is not None else {"token_ids": list(score.token_ids)}),
        "logprob": score.logprob,
        "logprob_per_token": score.logprob / score.num_tokens,
        "logprob_per_byte": None if num_bytes is None else score.logprob / num_bytes,
        "num_tokens": score.num_tokens,
        "num_bytes": num_bytes,
        "is_greedy": score.is_greedy,
    }
