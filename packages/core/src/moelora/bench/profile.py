"""One run under torch's profiler: which kernels ran, and when."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import DeviceType

from moelora.bench.parts import KernelRun


def profile_kernels(work: Callable[[], object]) -> list[KernelRun]:
    """Runs `work` once and lists every kernel and copy on the CUDA device, in order of their beginning."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    runs = [
        KernelRun(name=event.name, begin_s=event.time_range.start / 1e6, end_s=event.time_range.end / 1e6)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
    return sorted(runs, key=lambda run: run.begin_s)
