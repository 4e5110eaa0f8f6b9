"""What the device can do at best, measured: bytes copied and operations of a matrix product, per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
_GEMM_SIZE = {"cuda": 8192, "cpu": 768}
_RUNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """bytes_per_second: read and written together. flops_per_second: of a square product in the run's dtype."""

    bytes_per_second: float
    flops_per_second: float


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of a few runs each. Takes about 4 GiB of device memory on CUDA, and gives it back."""
    copied = 2 * _COPY_BYTES[device.type]
    operations = 2 * _GEMM_SIZE[device.type] ** 3
    found = Ceilings(
        bytes_per_second=copied / _best(_copy(device), device),
        flops_per_second=operations / _best(_gemm(device, dtype), device),
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _copy(device: torch.device) -> Callable[[], object]:
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _gemm(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    size = _GEMM_SIZE[device.type]
    # Random values: products of zeros draw less power, and so run at a clock that no real product reaches.
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _best(work: Callable[[], object], device: torch.device) -> float:
    for _ in range(3):
        work()
    seconds = []
    for _ in range(_RUNS):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
    return min(seconds)
