"""What was run, or would be: batches by mode and bucket, why some of them ran eagerly, tokens and padding."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from moelora.capacity import Admission, EagerReason
from moelora.types import Phase, RunMode


@dataclass(slots=True)
class Counts:
    """Batches, and what was in them.

    passes: batches by mode and bucket. padded_tokens: rows that held no token. largest_batch: tokens of the largest
    batch, padding apart, which are more than the budget where a sequence is longer and runs alone.
    """

    passes: Counter[tuple[RunMode, int | None]] = field(default_factory=Counter)
    eager_reasons: Counter[EagerReason] = field(default_factory=Counter)
    tokens: int = 0
    padded_tokens: int = 0
    largest_batch: int = 0

    def add(self, mode: RunMode, admission: Admission, tokens: int) -> None:
        """Counts one batch of `tokens` tokens, padding apart."""
        self.passes[mode, admission.bucket] += 1
        if admission.reason is not None:
            self.eager_reasons[admission.reason] += 1
        self.tokens += tokens
        self.largest_batch = max(self.largest_batch, tokens)
        if admission.bucket is not None:
            self.padded_tokens += admission.bucket - tokens

    @property
    def padding_share(self) -> float:
        """Rows that held no token, over all rows, in [0, 1]."""
        return self.padded_tokens / max(self.tokens + self.padded_tokens, 1)

    def report(self) -> dict[str, Any]:
        """For the report, in JSON types: `passes`, `eager_reasons`, `tokens`, `padding_share` and `largest_batch`."""
        return {
            "passes": [
                {"phase": str(Phase.PREFILL), "mode": str(mode), "bucket": bucket, "count": count}
                for (mode, bucket), count in sorted(self.passes.items(), key=str)
            ],
            "eager_reasons": {str(reason): count for reason, count in self.eager_reasons.items()},
            "tokens": self.tokens,
            "padding_share": self.padding_share,
            "largest_batch": self.largest_batch,
        }
