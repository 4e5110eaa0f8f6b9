"""Two lines of device work, copies and compute, and the order between them. Knows nothing of adapters or slots.

Whatever is queued on one line runs in order; between the lines there is no order but the one that marks make.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from moelora.adapters.arena import page_locked
from moelora.environment import cpu_count, one_core_threads

Transfer = tuple[torch.Tensor, torch.Tensor]
"""What is to be written, and the values for it, of the same dtype and a shape that can be expanded to it."""

_CHUNK = 4 << 20
_CARRIERS = 8
"""Threads that copy from ordinary memory, each through two page-locked buffers of `_CHUNK` bytes."""

Mark = Any
"""A place in a line; what stands before it is done once it is passed. None: passed already."""


class Streams(ABC):
    """Copies run beside the compute that the caller queues in the usual way."""

    @abstractmethod
    def copy(self, work: Callable[[], None], after: Sequence[Mark]) -> Mark:
        """Queues `work` behind earlier copies and behind the marks `after`. Returns the mark of its end."""

    def put(self, transfers: Iterable[Transfer]) -> None:
        """To be called in the work of `copy`: writes values that lie on the host."""
        for to, values in transfers:
            to.copy_(values, non_blocking=True)

    @abstractmethod
    def compute_mark(self) -> Mark:
        """The mark of everything that was queued for compute until now."""

    @abstractmethod
    def compute_waits(self, mark: Mark, reads: Sequence[torch.Tensor] = ()) -> None:
        """Whatever is queued for compute from now on runs behind `mark`. reads: tensors that the copy has made."""


class InOrder(Streams):
    """Devices without streams: a copy is done when `copy` returns."""

    def copy(self, work: Callable[[], None], after: Sequence[Mark]) -> Mark:
        work()

    def compute_mark(self) -> Mark:
        return None

    def compute_waits(self, mark: Mark, reads: Sequence[torch.Tensor] = ()) -> None:
        pass


class CudaStreams(Streams):
    """A side stream for copies; compute is whatever stream is current. Neither ever waits on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def copy(self, work: Callable[[], None], after: Sequence[Mark]) -> Mark:
        for mark in after:
            if mark is not None:
                self._side.wait_event(mark)
        with torch.cuda.stream(self._side):
            work()
            return self._side.record_event()

    def put(self, transfers: Iterable[Transfer]) -> None:
        """Page-locked memory is copied by the device, while the host goes on; for ordinary memory the host waits.

        From ordinary memory a driver copies in one thread. Here several do, and each goes on while the device copies
        what it has brought into page-locked memory.
        """
        ordinary: list[Transfer] = []
        for to, values in transfers:
            if values.device.type != "cpu" or values.is_pinned() or values.nbytes < _CHUNK // 4:
                to.copy_(values, non_blocking=True)
            else:
                ordinary += pieces(to, values, _CHUNK)
        carriers = min(_CARRIERS, cpu_count(), len(ordinary))
        if carriers:
            with one_core_threads(carriers) as pool:
                list(pool.map(self._carry, (ordinary[i::carriers] for i in range(carriers))))

    def _carry(self, transfers: Sequence[Transfer]) -> None:
        """Copies one after the other: while the device empties one buffer the other is filled."""
        with torch.cuda.stream(self._side):
            buffers: list[tuple[torch.Tensor, Mark]] = [(page_locked(0), None)] * 2
            for i, (to, values) in enumerate(transfers):
                room, taken = buffers[i % 2]
                if taken is not None:
                    taken.synchronize()
                if len(room) < values.nbytes:
                    room = page_locked(max(values.nbytes, _CHUNK))
                staged = room[: values.nbytes].view(values.dtype).view(values.shape)
                staged.copy_(values)
                to.copy_(staged, non_blocking=True)
                buffers[i % 2] = room, self._side.record_event()

    def compute_mark(self) -> Mark:
        return torch.cuda.current_stream(self._device).record_event()

    def compute_waits(self, mark: Mark, reads: Sequence[torch.Tensor] = ()) -> None:
        compute = torch.cuda.current_stream(self._device)
        if mark is not None:
            compute.wait_event(mark)
        for tensor in reads:
            tensor.record_stream(compute)  # else its memory could be given to a copy while compute still reads it


def pieces(to: torch.Tensor, values: torch.Tensor, nbytes: int) -> Iterator[Transfer]:
    """Cuts a transfer along the first dimension into pieces of `nbytes` at most, or of one row."""
    if to.shape != values.shape:
        yield to, values
        return
    rows = max(1, nbytes * len(values) // values.nbytes)
    yield from zip(to.split(rows), values.split(rows), strict=True)


def streams_for(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else InOrder()
