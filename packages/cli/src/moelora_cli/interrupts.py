"""Ctrl-C: the first ends the work when its batch is finished, the second at once."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STOP_WORKER = signal.SIGUSR1
"""What a worker takes as the first Ctrl-C. The terminal's own reaches it too and is ignored: its parent decides."""

_LOOK_SECONDS = 0.5


@contextmanager
def interrupts(stop: Callable[[], bool], say: Callable[[str], None], *, worker: bool = False) -> Iterator[None]:
    """Calls `stop` at the first Ctrl-C within the context; the second raises `KeyboardInterrupt` wherever it comes.

    stop: ends the work in its own time and returns True, or returns False if there is nothing to wait for; then the
    first one raises as well. Leaves things as they are where SIGINT is ignored, as it is for jobs in the background.
    """
    number = STOP_WORKER if worker else signal.SIGINT
    try:
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN and not worker:
            yield
            return
        replaced = {number: signal.signal(number, _Handler(stop, say))}
        if worker:
            replaced[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not in the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        for one, handler in replaced.items():
            signal.signal(one, handler)


class _Handler:
    def __init__(self, stop: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._stop, self._say = stop, say
        self._asked = False

    def __call__(self, number: int, frame: Any) -> None:
        if self._asked or not self._stop():
            raise KeyboardInterrupt
        self._asked = True
        self._say("finishing the batch; Ctrl-C once more ends at once")


def end_with(parent: int, folder: Path) -> None:
    """Ends this process, as SIGTERM does, soon after its parent, whose number is given, has died.

    folder: of the parent, which removes it unless it is killed; then it goes with the last of its children.
    """

    def clear() -> None:
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    atexit.register(clear)
    threading.Thread(target=watch, name="moelora-parent", daemon=True).start()
