"""Recording device work once and playing it back: CUDA graphs behind a small interface.

A recorder knows nothing of models or batches. Tests put a recorder of their own in its place that simply runs the work
again, so that everything around it is tested without a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

import torch

from moelora.environment import collector_paused


class Recording(ABC):
    """Work that was recorded. Buffers it reads and writes keep their addresses."""

    @abstractmethod
    def replay(self) -> None:
        """Does the work again on what its buffers hold now."""


class Recorder(ABC):
    """Records work, whole or in parts with eager work between them."""

    @abstractmethod
    def record(self, work: Callable[[], None]) -> Recording:
        """Records everything that `work` does on the device."""

    @abstractmethod
    def record_parts(self, work: Callable[[Callable[[Callable[[], None]], None]], None]) -> Recording:
        """Records `work(pause)`; each `pause(eager)` ends a part, and `eager` runs there, now and at every replay."""

    @abstractmethod
    def forget(self) -> None:
        """To be called when all recordings are gone, before others are made."""

    @abstractmethod
    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without keeping it alive: what eager work between parts may hold on to, and the result.

        Recorded memory is reused by later parts and later recordings in their order. A replay keeps the order of parts,
        so that an alias is valid exactly where it was made, and the last one of a recording until another is replayed.
        Holding the tensors themselves would keep every layer's, and every recording's, apart.
        """


class CudaRecorder(Recorder):
    """CUDA graphs that share one memory pool, recorded on one side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def forget(self) -> None:
        # torch drops a pool with its last graph, and fails on an assertion of its own when it is asked for it again.
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Recording:
        return self.record_parts(lambda pause: work())

    def record_parts(self, work: Callable[[Callable[[Callable[[], None]], None]], None]) -> Recording:
        parts: list[torch.cuda.CUDAGraph | Callable[[], None]] = []
        graph = torch.cuda.CUDAGraph()

        def begin() -> None:
            nonlocal graph
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def end() -> None:
            graph.capture_end()
            parts.append(graph)

        def pause(eager: Callable[[], None]) -> None:
            end()
            eager()
            parts.append(eager)
            begin()

        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # Graphs that are garbage would be destroyed within the capture, which CUDA forbids: it breaks the capture off.
        with torch.cuda.stream(self._stream), collector_paused():
            try:
                begin()
                work(pause)
                end()
            except BaseException:
                self._break_off(graph)
                raise
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return _CudaRecording(parts)

    def _break_off(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends the capture that an error has left, on the current stream, and leaves the process as it was before.

        CUDA refuses to end a capture that the error made invalid, though it takes the stream out of it. torch then
        stops halfway: its allocator goes on as within a capture and keeps the pool, and its random numbers fail with
        "Offset increment outside graph capture". A capture that does end puts the generator right.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            with suppress(RuntimeError):  # unless torch had come that far
                torch._C._cuda_endAllocateToPool(index, self._pool)
                torch._C._cuda_releasePool(index, self._pool)
            with suppress(RuntimeError):  # the error that led here says more
                nothing, other = torch.empty(1, device=self._device), torch.cuda.CUDAGraph()
                other.capture_begin(capture_error_mode="thread_local")  # in a pool of its own
                nothing.zero_()
                other.capture_end()
            self.forget()  # should the allocator none the less hold the pool for its own, the next capture has another

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        # What lies on the host, or has no elements, is no memory of a graph.
        return _alias(tensor) if tensor.is_cuda and tensor.numel() else tensor


class _CudaRecording(Recording):
    def __init__(self, parts: list[torch.cuda.CUDAGraph | Callable[[], None]]) -> None:
        self._parts = parts

    def replay(self) -> None:
        for part in self._parts:
            if isinstance(part, torch.cuda.CUDAGraph):
                part.replay()
            else:
                part()


class _ArrayInterface:
    """Memory described by NumPy's CUDA array interface, version 2; 16-bit floats travel as 16-bit integers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        kind = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}[tensor.element_size()]
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": kind,
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(_ArrayInterface(tensor), device=tensor.device).view(tensor.dtype)
