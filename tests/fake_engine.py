"""An engine without a model, for tests of everything around the engine.

Scores are a fixed function of (adapter, previous token, token); results come in another order than the requests.
"""

from __future__ import annotations

import math
import os
import sys
import time
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from moelora.checks import check_request
from moelora.errors import AdapterError
from moelora.types import BASE_ADAPTER, ChoiceScore, GraphMode, Request, Result, RunMode, TokenScore

VOCAB_SIZE = 2000
MAX_POSITIONS = 64


def logprob(adapter: str, previous: int, token: int) -> float:
    """The score of `token` after `previous`, in nats."""
    return -(zlib.crc32(f"{adapter}/{previous}/{token}".encode()) % 9973) / 1000 - 0.001


def path_logprobs(adapter: str, previous: int, tokens: Iterable[int]) -> list[float]:
    """The scores of `tokens`, one after the other."""
    scores = []
    for token in tokens:
        scores.append(logprob(adapter, previous, token))
        previous = token
    return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of the real engine."""

    backend: str = "auto"
    graph: GraphMode = GraphMode.AUTO
    device: str = "auto"
    dtype: str = "auto"
    max_tokens: int | None = None
    max_requests: int | None = None
    slots: int | None = None
    buckets: tuple[int, ...] | None = None
    load_format: str = "auto"
    attention: str = "auto"
    batch_invariant: bool = False
    score_chunk_rows: int | None = None
    lora_b_layout: str | None = None
    seed: int = 0
    host_bytes: int | None = None


class FakeEngine:
    """Has what `PrefillEngine` has. Adapters called `twin…` score as the base; a token 13 scores -inf, 14 NaN.

    A request that holds token 15 raises; `window` requests are taken at a time and answered backwards. Each takes
    FAKE_ENGINE_SECONDS longer, and says that it runs if that is at least one.
    """

    def __init__(
        self,
        model: Any = "fake",
        *,
        adapters: Mapping[str, Any] | None = None,
        options: EngineOptions = EngineOptions(),
        on_event: Any = None,
        window: int = 3,
    ) -> None:
        for name, path in (adapters or {}).items():
            if "broken" in str(path):
                raise AdapterError(f"adapter {name!r} in {path} is broken\n  - in every way")
        self.vocab_size = VOCAB_SIZE
        self.max_positions: int | None = MAX_POSITIONS
        self.adapter_names = list(adapters or {})
        self.slots = options.slots or 8
        self.eager_buckets: list[list[int]] = []
        self.attention_choice: dict[str, Any] = {}
        self.score_chunk_rows = 100
        self.options = options
        self.window = window
        self.seconds = float(os.environ.get("FAKE_ENGINE_SECONDS", "0"))
        self._in_batch = self._stopping = False
        print("a library prints to stdout")
        if on_event is not None:
            on_event("loaded [bold]nothing[/bold]")

    def check(self, request: Request) -> str | None:
        """As the real engine does."""
        return check_request(
            request, adapters=self.adapter_names, vocab_size=self.vocab_size, max_positions=self.max_positions
        )

    def score_stream(
        self, requests: Iterable[Request], on_batch: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Result]]:
        """Windows of requests, each answered backwards."""
        numbered = enumerate(requests)
        while window := list(islice(numbered, self.window)):
            self._in_batch = True
            results = [(index, self.score_one(request)) for index, request in reversed(window)]
            if self.seconds >= 1:
                print("a batch runs", file=sys.stderr, flush=True)
            time.sleep(self.seconds)
            self._in_batch = False
            yield from results
            on_batch()
            if self._stopping:
                self._stopping = False
                raise KeyboardInterrupt

    def stop(self) -> bool:
        """Ends behind the window that is being scored, if one is."""
        self._stopping = self._in_batch
        return self._in_batch

    def score_one(self, request: Request) -> Result:
        """The result of one request."""
        ids = list(request.token_ids)
        if 15 in ids:
            raise RuntimeError("token 15 breaks the engine")
        adapter = BASE_ADAPTER if request.adapter.startswith("twin") else request.adapter
        scores: list[float | None] = [None]
        for previous, token in pairwise(ids):
            value = {13: -math.inf, 14: math.nan}.get(token, logprob(adapter, previous, token))
            scores.append(value)
        best = sorted(((logprob(adapter, ids[-1], token), token) for token in range(50)), reverse=True)
        choices = []
        for choice in request.choices:
            total = sum(path_logprobs(adapter, ids[-1], choice))
            choices.append(ChoiceScore(token_ids=tuple(choice), logprob=total, num_tokens=len(choice), is_greedy=False))
        return Result(
            num_tokens=len(ids),
            logprob_sum=sum(s for s in scores if s is not None),
            token_logprobs=scores,
            is_greedy=False,
            next_token=TokenScore(best[0][1], best[0][0]),
            top_logprobs=[TokenScore(token, value) for value, token in best[: request.top_k]],
            choices=choices,
            mode=RunMode.EAGER,
        )

    def report(self) -> dict[str, Any]:
        """What the real engine would say of its batches."""
        return {
            "passes": [
                {"phase": "prefill", "mode": "eager", "bucket": None, "count": 3},
                {"phase": "prefill", "mode": "full", "bucket": 64, "count": 2},
            ],
            "eager_reasons": {"graph_off": 3},
            "padding_share": 0.1,
        }


def install() -> None:
    """Puts this engine in the place of `moelora.engine`."""
    module = types.ModuleType("moelora.engine")
    module.PrefillEngine = FakeEngine  # type: ignore[attr-defined]
    module.EngineOptions = EngineOptions  # type: ignore[attr-defined]
    sys.modules["moelora.engine"] = module
