"""Host memory for the values of adapters: ordinary, or page-locked and cut from large blocks. Knows no adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from threading import Lock

import torch

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Makes a contiguous tensor of a shape, its values left undefined. Any number of threads may call it at once."""


def ordinary(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in ordinary memory."""
    return torch.empty(tuple(shape), dtype=dtype)


def page_locked(nbytes: int) -> torch.Tensor:
    """Memory `[nbytes]` from which a CUDA device copies while the host goes on.

    Making it takes longer than filling it. So torch keeps it, when it is let go, for the next such allocation.
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class Arena:
    """Tensors cut one behind the other from blocks; a block goes when the last tensor in it does.

    Blocks double in size from `FIRST` to `BLOCK` bytes, so that little memory is taken for little, and are powers of
    two, to which torch rounds page-locked allocations up.
    """

    FIRST = 1 << 20
    BLOCK = 64 << 20
    _ALIGN = 256

    def __init__(self, allocate: Callable[[int], torch.Tensor] = page_locked) -> None:
        self._allocate = allocate
        self._lock = Lock()
        self._next = self.FIRST
        self._left: torch.Tensor | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor, its values undefined. Any number of threads may call it at once."""
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            room = self._cut(nbytes)
        return room.view(dtype).view(tuple(shape))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def _cut(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.BLOCK // 4:  # would leave too much of a block behind
            return self._allocate(nbytes)
        if self._left is None or nbytes > len(self._left):
            size = max(self._next, 1 << max(nbytes - 1, 0).bit_length())
            self._left, self._next = self._allocate(size), min(2 * size, self.BLOCK)
        room, self._left = self._left[:nbytes], self._left[-(-nbytes // self._ALIGN) * self._ALIGN :]
        return room
