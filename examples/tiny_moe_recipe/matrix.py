"""From scored rows to the matrix of kinds and adapters. Needs nothing but the standard library, for the demo's sake."""

from collections.abc import Iterable, Mapping
from typing import Any

BASE = "__base__"
"""The name under which the base model's rows are written."""


def mean_logprobs(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean log-probability per scored token, in nats, by kind and then by adapter.

    Takes rows as `moelora prefill` writes them. A prompt of n tokens has n - 1 scored ones: nothing
    predicts the first.
    """
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for row in rows:
        key = (row["metadata"]["kind"], row["adapter"])
        total, tokens = sums.get(key, (0.0, 0))
        sums[key] = (total + row["logprob_sum"], tokens + row["num_tokens"] - 1)
    result: dict[str, dict[str, float]] = {}
    for (kind, adapter), (total, tokens) in sums.items():
        result.setdefault(kind, {})[adapter] = total / tokens
    return result
