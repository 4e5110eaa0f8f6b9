"""Time of a piece of device work, from replays of a CUDA graph: what it costs once launches are free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

COPY_BYTES_PER_S = 4.27e12
"""One H200: a large device-to-device copy, bytes read plus written."""
MATRIX_FLOPS_PER_S = 790e12
"""One H200: a large bf16 matrix product."""


def graph_times(works: Sequence[Callable[[], object]], *, copies: int = 8, repeats: int = 9) -> list[float]:
    """Median milliseconds of one call of each: `copies` are captured, and the graphs are replayed in turn.

    In turn, because the card slows down as it warms up: what is measured first would look best.
    """
    graphs = []
    for work in works:
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
        # The next work may share buffers with this one and warms up on another stream.
        torch.cuda.synchronize()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for graph, taken in zip(graphs, times, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end) / copies)
    return [median(taken) for taken in times]


def graph_time(work: Callable[[], object], *, copies: int = 8, repeats: int = 9) -> float:
    """`graph_times` of a single work."""
    return graph_times([work], copies=copies, repeats=repeats)[0]


def floor_ms(*, num_bytes: float, flops: float) -> float:
    """The larger of the time to move the bytes and the time to do the operations."""
    return 1e3 * max(num_bytes / COPY_BYTES_PER_S, flops / MATRIX_FLOPS_PER_S)


def refuse_unless(ok: bool, what: str) -> None:
    """Ends the benchmark if a check failed: a wrong kernel has no speed."""
    if not ok:
        raise SystemExit(f"{what}: the check failed, nothing was measured")
