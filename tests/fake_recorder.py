"""Graphs on the CPU: a recorder that runs the work again, and a backend that lets it."""

from moelora import GraphMode
from moelora.backends.base import Capabilities
from moelora.backends.torch_reference import TorchBackend
from moelora.graphs.recorder import Recorder, Recording


class FakeRecording(Recording):
    def __init__(self, work):
        self._work = work

    def replay(self):
        self._work()


class FakeRecorder(Recorder):
    """Plays back by running the work again: a whole, or the eager parts with everything between them."""

    def __init__(self, device):
        pass

    def forget(self):
        """Nothing is kept."""

    def record(self, work):
        work()
        return FakeRecording(work)

    def record_parts(self, work):
        def again():
            work(lambda eager: eager())

        again()
        return FakeRecording(again)

    def alias(self, tensor):
        return tensor


class CapturableTorchBackend(TorchBackend):
    capabilities = Capabilities(
        name="torch",
        device_types=frozenset({"cpu"}),
        graph_modes=frozenset({GraphMode.FULL, GraphMode.BREAKABLE}),
    )
