"""Ctrl-C: it ends a command; while batches run, the first when its batch is finished, the second at once."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from moelora_cli.at_once import end_interrupted

STOP_WORKER = signal.SIGUSR1
"""What a worker takes as the first Ctrl-C. The terminal's own reaches it too and is ignored: its parent decides."""

_LOOK_SECONDS = 0.5
_AGAIN_SECONDS = 0.05


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C. Of its own class: where a plain one passes through `exec` of a string, CPython ends by the signal in
    the end, whatever the exit code was to be.
    """


@contextmanager
def ctrl_c() -> Iterator[None]:
    """Within the context, Ctrl-C raises `Interrupted` wherever it comes, and ends the process at once in an import.

    See `unwinding` for the exception. Leaves things as they are where SIGINT is ignored, and in other threads than the
    main one, which alone gets signals.
    """
    before, report = signal.getsignal(signal.SIGINT), sys.unraisablehook
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return

    def unraisable(what: Any) -> None:
        """One within a finaliser or a callback, as each import has them, would be lost: it comes again soon."""
        if isinstance(what.exc_value, Interrupted):
            threading.Timer(_AGAIN_SECONDS, interrupt_main).start()
        else:
            report(what)

    sys.unraisablehook = unraisable
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = report


@contextmanager
def unwinding() -> Iterator[None]:
    """Within the context, Ctrl-C raises in imports too: there is something to put in order. Large ones come before."""
    if signal.getsignal(signal.SIGINT) is not _interrupt:
        yield
        return
    signal.signal(signal.SIGINT, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _in_import(frame):
        end_interrupted()
    _raise(number, frame)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Interrupted


def _in_import(frame: FrameType | None) -> bool:
    """Whether a module is being loaded. Extensions of libraries abort, or make an `ImportError` of it, where an
    exception passes through them then.
    """
    while frame is not None:
        if frame.f_code.co_name == "_load_unlocked" and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextmanager
def interrupts(stop: Callable[[], bool], say: Callable[[str], None], *, worker: bool = False) -> Iterator[None]:
    """Calls `stop` at the first Ctrl-C within the context; the second raises wherever it comes, as without the context.

    stop: ends the work in its own time and returns True, or returns False if there is nothing to wait for; then the
    first one raises as well. Leaves things as they are where SIGINT is ignored, as it is for jobs in the background.
    """
    number = STOP_WORKER if worker else signal.SIGINT
    try:
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN and not worker:
            yield
            return
        ends = before if callable(before) else signal.default_int_handler
        replaced = {number: signal.signal(number, _Handler(stop, say, ends))}
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
    def __init__(
        self, stop: Callable[[], bool], say: Callable[[str], None], ends: Callable[[int, Any], object]
    ) -> None:
        self._stop, self._say, self._ends = stop, say, ends
        self._asked = False

    def __call__(self, number: int, frame: Any) -> None:
        if self._asked or not self._stop():
            self._ends(number, frame)  # which raises
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
