"""Timing of dense ops: graph replays with a cold or a warm L2, and the floor that bytes and FLOPs set on one H200."""

from __future__ import annotations

from collections.abc import Callable

import torch

BYTES_PER_SECOND = 4.27e12
FLOPS_PER_SECOND = 790e12


def floor_ms(*, moved_bytes: float, flops: float = 0.0) -> float:
    """The larger of the two times, in milliseconds."""
    return 1e3 * max(moved_bytes / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)


def measure_ms(run: Callable[[], object], *, cold: bool = True, repeats: int = 30) -> float:
    """The median time of a graph replay of `run`; `cold` overwrites L2 before each."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats + 3):
        if cold:
            flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in times[3:])[repeats // 2]


def report(name: str, measured: float, floor: float, note: str = "") -> None:
    """One line: what, measured, floor, their ratio."""
    print(
        f"{name:<58} {measured:8.4f} ms   floor {floor:8.4f} ms   ×{measured / max(floor, 1e-9):5.2f}  {note}",
        flush=True,
    )


def require(correct: bool, name: str) -> None:
    """Nothing is reported for an op that is wrong."""
    if not correct:
        raise SystemExit(f"{name}: the correctness check failed, so nothing is measured")


def close(got: torch.Tensor, want: torch.Tensor, limit: float) -> bool:
    """‖got − want‖ ≤ limit · ‖want‖, in fp64."""
    got, want = got.double(), want.double()
    return bool(torch.isfinite(got).all()) and float((got - want).norm()) <= limit * float(want.norm())
