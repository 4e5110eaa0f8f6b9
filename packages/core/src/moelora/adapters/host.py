"""The adapters of a run in host memory: all checked at the start, as many kept as fit, the rest read again in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from moelora.adapters.arena import Allocate, Arena, ordinary, page_locked
from moelora.adapters.base import Adapter, Factors
from moelora.errors import AdapterError

_READERS = 4
"""Adapters that are read at once at the start: each takes one core, and as much memory again while it is read."""

READ_AHEAD = 2
"""Adapters that are read, or wait to be copied, beside those that are kept."""


Load = Callable[[str, Path, Allocate], Adapter]
"""Reads and checks the adapter of a name in a folder, into the memory that the third makes."""


class HostAdapters(Mapping[str, Adapter]):
    """Adapters by name, in the order given. As a mapping it gives outlines, whose tensors have shapes and no values.

    sources: where each is, or the adapter itself, which then stays where it is. `load` reads and checks one adapter and
    is called for all of them here, so that a bad one is refused before any work. Those beyond `budget` bytes are let
    go, read again in a thread of their own when `get_ready` names them, and let go after `take`. The same ones are kept
    throughout: turns are taken in a fixed order, so that whichever one were dropped for another would be the one that
    is missed next.

    After `pin`, `take` gives page-locked memory: what is read again is read into it, and what is kept is copied into it
    in the same thread and the same way, as many adapters at a time as one batch may need. To lock all of it would take
    seconds at the start, and memory that others miss.
    """

    def __init__(
        self,
        sources: Mapping[str, Path | Adapter],
        load: Load,
        *,
        budget: int | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._load = load
        self._pin = False
        self._ahead = READ_AHEAD
        self._outlines: dict[str, Adapter] = {}
        self._kept: dict[str, Adapter] = {}
        self._stamps: dict[str, object] = {}
        self._coming: dict[str, Future[Adapter]] = {}
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moelora-adapters")
        held = 0
        for name, adapter in self._read_all(sources, say):
            self._outlines[name] = outline(adapter)
            if adapter is sources[name] or budget is None or held + adapter.nbytes <= budget:
                self._kept[name] = adapter
                held += adapter.nbytes
        missing = len(self._outlines) - len(self._kept)
        if missing:
            total = sum(a.nbytes for a in self._outlines.values())
            say(
                f"{len(self._kept)} of {len(self._outlines)} adapters stay in host memory ({held / 2**30:.1f} of "
                f"{total / 2**30:.1f} GiB); the other {missing} are read from disk again each time they are loaded"
            )

    def _read_all(
        self, sources: Mapping[str, Path | Adapter], say: Callable[[str], None]
    ) -> Iterator[tuple[str, Adapter]]:
        """All adapters in their order, a few of them read at the same time."""
        with ThreadPoolExecutor(max_workers=_READERS, thread_name_prefix="moelora-adapters") as readers:
            pending: deque[tuple[str, Future[Adapter]]] = deque()
            for name, source in sources.items():
                if isinstance(source, Adapter):
                    pending.append((name, _done(source)))
                else:
                    say(f"reading adapter {name} from {source}")
                    self._stamps[name] = _stamp(source)
                    pending.append((name, readers.submit(self._load, name, source, ordinary)))
                while len(pending) >= _READERS:
                    name, reading = pending.popleft()
                    yield name, reading.result()
            for name, reading in pending:
                yield name, reading.result()

    def pin(self, slots: int) -> None:
        """Has `take` give values in page-locked memory, from which a device copies while the host goes on.

        slots: of the device, and so the most adapters that are copied ahead of their turn.
        """
        self._pin = True
        self._ahead = max(slots, READ_AHEAD)

    @property
    def kept(self) -> int:
        """Adapters that stay in host memory."""
        return len(self._kept)

    def __getitem__(self, name: str) -> Adapter:
        return self._outlines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outlines)

    def __len__(self) -> int:
        return len(self._outlines)

    def get_ready(self, names: Iterable[str]) -> None:
        """Has the first of `names` made ready that are not; lets go of what was and is not among them.

        Returns at once.
        """
        names = list(names)
        for name in set(self._coming) - set(names):
            self._coming.pop(name).cancel()
        for name in names:
            from_disk = sum(one not in self._kept for one in self._coming)
            if len(self._coming) >= self._ahead or (name not in self._kept and from_disk >= READ_AHEAD):
                return
            if not self._lies_ready(name) and name not in self._coming:
                self._coming[name] = self._reader.submit(self._make_ready, name)

    def is_ready(self, name: str) -> bool:
        """Whether `take` would return at once. A failed read is ready too: `take` raises what went wrong."""
        return self._lies_ready(name) or (name in self._coming and self._coming[name].done())

    def take(self, name: str) -> Adapter:
        """The adapter with its values; waits for the disk where it must. Raises `AdapterError` if its file changed."""
        if self._lies_ready(name):
            return self._kept[name]
        coming = self._coming.pop(name, None)
        return coming.result() if coming is not None else self._reader.submit(self._make_ready, name).result()

    def _lies_ready(self, name: str) -> bool:
        return name in self._kept and not self._pin

    def _make_ready(self, name: str) -> Adapter:
        memory = Arena(page_locked)
        if name not in self._kept:
            return self._read_again(name, memory.empty if self._pin else ordinary)
        return pinned(self._kept[name], memory) if self._pin else self._kept[name]

    def _read_again(self, name: str, allocate: Allocate) -> Adapter:
        path = self._outlines[name].path
        adapter = self._load(name, path, allocate)
        if _stamp(path) != self._stamps[name]:
            raise AdapterError(f"{path}: changed while the run was under way")
        return adapter


def _done(adapter: Adapter) -> Future[Adapter]:
    future: Future[Adapter] = Future()
    future.set_result(adapter)
    return future


def outline(adapter: Adapter) -> Adapter:
    """The adapter without values: its tensors keep shape and dtype and take no memory."""

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta")

    return _map_tensors(adapter, shape_of)


def pinned(adapter: Adapter, memory: Arena) -> Adapter:
    """The adapter copied into page-locked memory; what lies on a device already stays there."""
    return _map_tensors(adapter, lambda tensor: memory.copy(tensor) if tensor.device.type == "cpu" else tensor)


def _map_tensors(adapter: Adapter, change: Callable[[torch.Tensor], torch.Tensor]) -> Adapter:
    return replace(
        adapter,
        factors={name: Factors(a=change(f.a), b=change(f.b)) for name, f in adapter.factors.items()},
        replacements={name: change(tensor) for name, tensor in adapter.replacements.items()},
    )


def _stamp(folder: Path) -> object:
    """Changes whenever a file of the adapter is written anew; None where the folder cannot be read."""
    try:
        return sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file())
    except OSError:
        return None
