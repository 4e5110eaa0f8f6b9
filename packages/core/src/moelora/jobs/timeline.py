"""How many tokens a run had scored at which second: what its report draws as throughput over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from moelora.jobs.run import Scorer
from moelora.types import Request, Result

_MOST_POINTS = 512
_SAME_MOMENT = 0.005
"""Seconds. The results of one batch come one after the other within less, and are one point."""

Points = list[tuple[float, int]]
"""(seconds since the run began, tokens scored until then), ascending in both."""


class Timeline:
    """Collects points while a run goes on, and keeps at most 512 of them, evenly spread over its time.

    began: seconds since the epoch, which is what timelines of several processes have in common.
    """

    def __init__(self) -> None:
        self.begin()
        self._points: Points = [(0.0, 0)]
        self._tokens = 0
        self._step = _SAME_MOMENT

    def begin(self) -> None:
        """Scoring begins now, with nothing scored. Until this is called, it began when the timeline was made."""
        self.began = time.time()
        self._start = time.monotonic()

    def add(self, tokens: int) -> None:
        """`tokens` more have been scored just now."""
        self._tokens += tokens
        now = time.monotonic() - self._start
        last = self._points[-1][0]
        if last > 0 and now - last < self._step:
            self._points[-1] = (last, self._tokens)
            return
        self._points.append((now, self._tokens))
        if len(self._points) >= _MOST_POINTS:
            self._points = self._points[::2]
            self._step = max(2 * now / _MOST_POINTS, _SAME_MOMENT)

    def as_json(self, seconds: float) -> dict[str, Any]:
        """`began`, and the points, the last of them at the end of scoring, `seconds` behind the beginning."""
        last = (max(seconds, self._points[-1][0]), self._tokens)
        return {"began": self.began, "points": [[round(t, 4), n] for t, n in [*self._points, last]]}


class TimedScorer:
    """A scorer that notes on a timeline what it has scored; in all else the one behind it."""

    def __init__(self, scorer: Scorer, timeline: Timeline) -> None:
        self._scorer = scorer
        self._timeline = timeline

    @property
    def vocab_size(self) -> int:
        """Of the scorer behind."""
        return self._scorer.vocab_size

    @property
    def max_positions(self) -> int | None:
        """Of the scorer behind."""
        return self._scorer.max_positions

    @property
    def adapter_names(self) -> list[str]:
        """Of the scorer behind."""
        return self._scorer.adapter_names

    def check(self, request: Request) -> str | None:
        """What the scorer behind says."""
        return self._scorer.check(request)

    def score_stream(
        self, requests: Iterable[Request], on_batch: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Result]]:
        """What the scorer behind yields."""
        for index, result in self._scorer.score_stream(requests, on_batch):
            if result.next_token is not None:
                self._timeline.add(result.num_tokens + sum(choice.num_tokens for choice in result.choices))
            yield index, result


def joined(timelines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One timeline out of those of several processes, whose tokens add up at each moment."""
    if not timelines:
        return {"began": 0.0, "points": []}
    began = min(t["began"] for t in timelines)
    steps: Points = []
    for one in timelines:
        before = 0
        for seconds, tokens in one["points"]:
            steps.append((one["began"] - began + seconds, tokens - before))
            before = tokens
    points, total = [], 0
    for seconds, more in sorted(steps):
        total += more
        points.append([round(seconds, 4), total])
    return {"began": began, "points": points}


def rates(points: Sequence[Sequence[float]], bins: int = 100) -> Points:
    """(middle of a bin in seconds, tokens per second in it), over bins of equal length.

    Tokens between two points count as evenly spread.
    """
    end = points[-1][0] if points else 0.0
    if end <= 0:
        return []
    width = end / bins
    counts = [0.0] * bins
    for (t0, n0), (t1, n1) in pairwise(points):
        if n1 == n0:
            continue
        first, last = min(int(t0 / width), bins - 1), min(int(t1 / width), bins - 1)
        if t1 <= t0 or first == last:
            counts[last] += n1 - n0
            continue
        for i in range(first, last + 1):
            overlap = min(t1, (i + 1) * width) - max(t0, i * width)
            counts[i] += (n1 - n0) * max(overlap, 0.0) / (t1 - t0)
    return [((i + 0.5) * width, int(count / width)) for i, count in enumerate(counts)]
