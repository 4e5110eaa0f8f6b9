"""Two lines of device work, copies and compute, and the order between them. Knows nothing of adapters or slots.

Whatever is queued on one line runs in order; between the lines there is no order but the one that marks make.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

Mark = Any
"""A place in a line; what stands before it is done once it is passed. None: passed already."""


class Streams(ABC):
    """Copies run beside the compute that the caller queues in the usual way."""

    @abstractmethod
    def copy(self, work: Callable[[], None], after: Sequence[Mark]) -> Mark:
        """Queues `work` behind earlier copies and behind the marks `after`. Returns the mark of its end."""

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

    def compute_mark(self) -> Mark:
        return torch.cuda.current_stream(self._device).record_event()

    def compute_waits(self, mark: Mark, reads: Sequence[torch.Tensor] = ()) -> None:
        compute = torch.cuda.current_stream(self._device)
        if mark is not None:
            compute.wait_event(mark)
        for tensor in reads:
            tensor.record_stream(compute)  # else its memory could be given to a copy while compute still reads it


def streams_for(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else InOrder()
