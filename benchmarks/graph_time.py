"""Time of a piece of device work, from replays of a CUDA graph: what it costs once launches are free."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

COPY_BYTES_PER_S = 4.27e12
"""One H200: a large device-to-device copy, bytes read plus written."""
MATRIX_FLOPS_PER_S = 790e12
"""One H200: a large bf16 matrix product."""


def graph_time(work: Callable[[], object], *, copies: int = 8, repeats: int = 7) -> float:
    """Median milliseconds of one `work()`; `copies` of it are captured, and the graph is replayed `repeats` times."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            work()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / copies)
    return median(times)


def floor_ms(*, num_bytes: float, flops: float) -> float:
    """The larger of the time to move the bytes and the time to do the operations."""
    return 1e3 * max(num_bytes / COPY_BYTES_PER_S, flops / MATRIX_FLOPS_PER_S)


def refuse_unless(ok: bool, what: str) -> None:
    """Ends the benchmark if a check failed: a wrong kernel has no speed."""
    if not ok:
        raise SystemExit(f"{what}: the check failed, nothing was measured")
