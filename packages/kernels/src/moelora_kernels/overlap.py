"""Programmatic dependent launch: a kernel that starts while the one in front of it is still at work.

The kernel in front calls `let_next_start`, the next one is launched with `overlapping`, and calls `wait_for_last`
before it reads what the kernel in front wrote, or writes what that one reads. What older kernels wrote is there without
a wait: the kernel in front began after them. Hopper or later; elsewhere both functions do nothing, and launches follow
one another whole. Needs CUDA 12.3 or later to be captured in a graph.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moelora_kernels.launch import hopper_or_later

MIN_ROWS = 2048
"""Rows of a batch from which on launches overlap. Below, it is all the same: at 512 rows of one H200 a shrink and an
expand take 14 µs together either way."""


def overlapping(device: torch.device, rows: int) -> dict[str, bool]:
    """Options of a launch that may start early, for a batch of `rows`; the kernel takes OVERLAP."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device, rows) else {"OVERLAP": False}


def overlaps(device: torch.device, rows: int) -> bool:
    """Whether launches for a batch of `rows` overlap."""
    return rows >= MIN_ROWS and hopper_or_later(device)


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """From here on the next kernel may take the places that this one leaves free, once all programs are past here."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):
    """Waits until the kernel in front has ended and its writes are seen; at once if it has."""
    if OVERLAP:
        gdc_wait()
