"""Milliseconds of some work on the device, as a batch pays for it: launched eagerly, or replayed from a graph."""

from __future__ import annotations

from collections.abc import Callable

import triton

Timer = Callable[[Callable[[], object]], float]
"""Milliseconds of some work on the device."""


def eager_ms(work: Callable[[], object]) -> float:
    """Milliseconds of `work`, the host's launches included where they take longer than what they launch."""
    return float(triton.testing.do_bench(work, warmup=5, rep=20, return_mode="median"))


def graph_ms(work: Callable[[], object]) -> float:
    """Milliseconds of `work` replayed from a CUDA graph, so that the host's launches do not count."""
    return float(triton.testing.do_bench_cudagraph(work, rep=20, return_mode="median"))
