"""Captures that break off, against a stand-in for what torch and CUDA keep of a capture in the process."""

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from moelora.graphs.recorder import CudaRecorder

POOL = (0, 7)


class Process:
    """The stream, the allocator and the random numbers. An invalid capture ends for the stream alone, as in CUDA."""

    def __init__(self):
        self.capturing = self.invalid = self.generator_captures = False
        self.underway, self.uses = set(), {}
        self.replays = 0

    def begin_allocate(self, pool):
        assert pool not in self.underway, "already recording to this pool"
        self.underway.add(pool)
        self.uses[pool] = self.uses.get(pool, 0) + 1

    def end_allocate(self, device, pool):
        if pool not in self.underway:
            raise RuntimeError("not currently recording to this pool")
        self.underway.remove(pool)

    def release(self, device, pool):
        self.uses[pool] -= 1

    def fail(self, error):
        """What a synchronisation does within a capture."""
        self.invalid = True
        raise error

    @property
    def is_as_before(self):
        return not (self.capturing or self.generator_captures or self.underway or any(self.uses.values()))


class Graph:
    process: Process
    _ended = False

    def capture_begin(self, pool=(1, 0), capture_error_mode="global"):
        process = self.process
        assert not process.capturing
        process.generator_captures = True
        process.begin_allocate(pool)
        process.capturing, process.invalid, self._pool = True, False, pool

    def capture_end(self):
        process = self.process
        if not process.capturing:
            raise RuntimeError("the stream is not capturing")
        process.capturing = False
        if process.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        process.end_allocate(0, self._pool)
        process.generator_captures = False
        self._ended = True

    def replay(self):
        self.process.replays += 1

    def __del__(self):
        if self._ended:
            self.process.release(0, self._pool)


@pytest.fixture
def process(monkeypatch):
    process = Process()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("Graph", (Graph,), {"process": process}))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", process.end_allocate)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", process.release)
    return process


@pytest.fixture
def recorder(process):
    return CudaRecorder(torch.device("cpu"))


def refused():
    raise ValueError("refused")


@pytest.mark.parametrize(
    "broken",
    [
        lambda process, pause: refused(),
        lambda process, pause: process.fail(RuntimeError("not permitted")),
        lambda process, pause: (pause(lambda: None), process.fail(RuntimeError("not permitted"))),
        lambda process, pause: pause(refused),
        lambda process, pause: setattr(process, "invalid", True),  # shows only when the capture is ended
        lambda process, pause: (setattr(process, "invalid", True), pause(refused)),
    ],
)
def test_a_capture_that_breaks_off_leaves_nothing_behind(process, recorder, broken):
    with pytest.raises((RuntimeError, ValueError), match=r"refused|not permitted|previous error"):
        recorder.record_parts(lambda pause: broken(process, pause))
    gc.collect()  # parts that did end
    assert process.is_as_before
    ran = []
    recording = recorder.record_parts(lambda pause: pause(lambda: ran.append("between")))
    recording.replay()
    assert (process.replays, ran) == (2, ["between", "between"])
    del recording
    assert process.is_as_before


def test_the_stand_in_notices_a_capture_that_is_not_ended_in_order(process, recorder, monkeypatch):
    monkeypatch.setattr(CudaRecorder, "_break_off", lambda self, graph: setattr(process, "capturing", False))
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(lambda: process.fail(RuntimeError("not permitted")))
    assert not process.is_as_before
