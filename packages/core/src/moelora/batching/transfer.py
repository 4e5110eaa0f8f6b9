"""Between host and device without waiting: several arrays go over in one copy, scores come back behind the work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

_ALIGN = 256
"""Bytes that each array starts at a multiple of: kernels compile once for all batches, and read whole lines."""


def send(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, as tensors of the same dtypes and shapes. Work that is queued later finds them there.

    On CUDA they travel in one page-locked buffer, which the host does not wait for. On the CPU they are not copied.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, nbytes = _layout(arrays)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    _write(host.numpy(), arrays, starts)
    # The allocator keeps the pinned memory back until the stream has passed this copy.
    return _read(host.to(device, non_blocking=True), arrays, starts)


def _layout(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Where each array starts in one buffer, and the buffer's bytes."""
    sizes = [-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays]
    ends = list(accumulate(sizes))
    return [end - size for end, size in zip(ends, sizes, strict=True)], sum(sizes)


def _write(flat: np.ndarray, arrays: Sequence[np.ndarray], starts: Sequence[int]) -> None:
    for start, array in zip(starts, arrays, strict=True):
        flat[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _read(flat: torch.Tensor, like: Sequence[np.ndarray], starts: Sequence[int]) -> list[torch.Tensor]:
    """Views of a buffer of bytes, one for each of `like`."""
    return [
        flat[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, like, strict=True)
    ]


class Fetch:
    """Tensors on their way to the host. Made when the work that computes them is queued."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if not any(tensor.is_cuda for tensor in tensors):
            self._host = list(tensors)
            return
        self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for here, there in zip(self._host, tensors, strict=True):
            here.copy_(there, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, as soon as they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
