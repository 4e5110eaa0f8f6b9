"""The machine and the process a run finds itself in: device, host memory and processors, the garbage collector."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Barrier, Lock, RLock

import torch

from moelora.errors import ConfigError, choose_from

_DEVICES = ["auto", "cpu", "cuda", "cuda:0"]


def resolve_device(device: str) -> torch.device:
    """The torch device for "auto", "cpu", "cuda" or "cuda:N". Raises `ConfigError` for one that is not here."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ConfigError(choose_from("device", device, _DEVICES)) from None
    if resolved.type not in {"cpu", "cuda"}:
        raise ConfigError(choose_from("device", device, _DEVICES))
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ConfigError(f"device {device!r}: this machine has no usable CUDA device; valid: cpu")
        if (resolved.index or 0) >= count:
            raise ConfigError(f"device {device!r}: this machine has {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    return resolved


def device_of_place(number: int) -> str:
    """The device for the process of that number on a machine: a GPU of its own where it sees enough of them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"cuda:{number}" if number < count else "auto"


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that processes may still take: what the system has, or less where a container (cgroup) is limited.

    None where the system does not say. root: where /proc and /sys are found.
    """
    found = []
    with suppress(OSError):
        meminfo = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
        found += [int(meminfo[1]) * 1024] if meminfo else []
    for limit, usage, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        folder = root / "sys/fs/cgroup"
        with suppress(OSError, ValueError):  # a limit of "max" is none
            left = int((folder / limit).read_text()) - int((folder / usage).read_text())
            stat = (folder / usage).with_name("memory.stat").read_text()
            cached = re.search(rf"^{reclaimable} (\d+)$", stat, re.MULTILINE)  # files read, given up when asked for
            found.append(max(left, 0) + (int(cached[1]) if cached else 0))
    return min(found, default=None)


def cpu_count() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_THREADS_BEGIN = Lock()


@contextmanager
def one_core_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads in each of which torch uses one core: operators that were split further would wait for one another.

    All other threads keep what they have. torch holds the number once for each thread and once for those that are still
    to come, and sets both together: so all of these begin before the latter is put back, one pool at a time.
    """
    begun = Barrier(count + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread that has not asked before takes the number for those to come, now still 1
        begun.wait()

    with ThreadPoolExecutor(count) as pool:
        with _THREADS_BEGIN:
            before = torch.get_num_threads()
            try:
                for _ in range(count):  # each waits, so that each is taken by a thread of its own
                    pool.submit(begin)
                begun.wait()
            except RuntimeError:  # no more threads are to be had
                begun.abort()
                raise
            finally:
                torch.set_num_threads(before)
        yield pool


class _Pauses:
    """How many threads want the garbage collector paused. It is one for the process, as this is."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._count = 0
        self._enabled = False
        """Whether it was on before the first of them."""

    def begin(self) -> None:
        """One more."""
        with self._lock:
            if not self._count:
                self._enabled = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        """One fewer."""
        with self._lock:
            self._count -= 1
            if not self._count and self._enabled:
                gc.enable()


_PAUSES = _Pauses()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector, until the pauses of all threads have ended.

    While very many objects are made that stay: it would walk all of them, in vain. And where it must not run.
    """
    _PAUSES.begin()
    try:
        yield
    finally:
        _PAUSES.end()


def release_importers(modules: int) -> None:
    """Collects garbage if modules were imported since `sys.modules` had that length.

    torch's compiler, which transformers imports when it loads a model, keeps the frames that imported it in a cycle,
    and with them all that the callers held: an engine, and so its weights.
    """
    if len(sys.modules) > modules:
        gc.collect()


def freeze_objects() -> None:
    """Has the garbage collector leave alone what lives now: libraries and a model that a command keeps to its end.

    Walking them takes a third of a second each time, which is longer than a GPU works on what is queued; without a GPU
    in use nothing happens. `gc.unfreeze` undoes it.
    """
    if torch.cuda.is_initialized():
        gc.collect()
        gc.freeze()
