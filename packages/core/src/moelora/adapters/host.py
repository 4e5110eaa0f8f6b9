"""The adapters of a run in host memory: all checked at the start, read in time, as many kept as fit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from moelora.adapters.arena import Allocate, Arena, ordinary, page_locked
from moelora.adapters.base import Adapter, Factors
from moelora.adapters.files import folder_stamp
from moelora.adapters.loader import refuse_all
from moelora.errors import AdapterError

_CHECKERS = 8
"""Adapters that are checked at once at the start: each takes one core, and next to no memory."""

READ_AT_START = 4
"""Adapters that are read at the start: as many are needed soon, and so few are sooner read once than checked first."""

READ_AHEAD = 2
"""Adapters that are read, or wait to be copied, beside those that lie in host memory."""


Load = Callable[[str, Path, Allocate], Adapter]
"""Reads and checks the adapter of a name in a folder, into the memory that the third makes."""

Check = Callable[[str, Path], Adapter]
"""Checks as `Load` does the adapter of a name in a folder; what it gives has shapes and need not have values."""


class HostAdapters(Mapping[str, Adapter]):
    """Adapters by name, in the order given. As a mapping it gives outlines, whose tensors have shapes and no values.

    sources: where each is, or the adapter itself, which then stays where it is. The first are read here by `load`, the
    others checked by `check`, so that bad ones are refused before any work, all at once; to read many would take far
    longer than to check them, most of it for the memory. Values are read in a thread of their own when `get_ready`
    names the adapter. As many as fit into `budget` bytes are kept from then on; the others are let go after `take` and
    read again each time. The same ones are kept throughout: turns are taken in a fixed order, so that whichever one
    were dropped for another would be the one that is missed next.

    After `pin`, `take` gives page-locked memory: what is not kept is read into it, and what is kept is copied into it
    in the same thread and the same way, as many adapters at a time as one batch may need. To lock all of it would take
    seconds at the start, and memory that others miss.
    """

    def __init__(
        self,
        sources: Mapping[str, Path | Adapter],
        load: Load,
        check: Check,
        *,
        budget: int | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._load = load
        self._pin = False
        self._ahead = READ_AHEAD
        self._outlines: dict[str, Adapter] = {}
        self._to_keep: set[str] = set()
        self._kept: dict[str, Adapter] = {}
        self._stamps: dict[str, object] = {}
        self._coming: dict[str, Future[Adapter]] = {}
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moelora-adapters")
        held = 0
        try:
            for name, adapter, has_values in self._begin(sources, check, say):
                self._outlines[name] = outline(adapter)
                if adapter is not sources[name] and budget is not None and held + adapter.nbytes > budget:
                    continue
                held += adapter.nbytes
                self._to_keep.add(name)
                if has_values:
                    self._kept[name] = adapter
        except BaseException:
            self._reader.shutdown(cancel_futures=True)
            raise
        missing = len(self._outlines) - self.kept
        if missing:
            total = sum(a.nbytes for a in self._outlines.values())
            say(
                f"{self.kept} of {len(self._outlines)} adapters stay in host memory ({held / 2**30:.1f} of "
                f"{total / 2**30:.1f} GiB); the other {missing} are read from disk again each time they are loaded"
            )

    def _begin(
        self, sources: Mapping[str, Path | Adapter], check: Check, say: Callable[[str], None]
    ) -> Iterator[tuple[str, Adapter, bool]]:
        """All adapters in their order, and whether they have values; a few are looked at at the same time."""
        on_disk = [name for name, source in sources.items() if not isinstance(source, Adapter)]
        first = set(on_disk[:READ_AT_START])
        checkers = ThreadPoolExecutor(max_workers=_CHECKERS, thread_name_prefix="moelora-checks")
        pending: deque[tuple[str, Future[Adapter], bool]] = deque()
        refused: list[AdapterError] = []

        def looked_at(least: int) -> Iterator[tuple[str, Adapter, bool]]:
            """The good ones of the first, until `least` are left pending."""
            while len(pending) > least:
                name, looking, has_values = pending.popleft()
                try:
                    adapter = looking.result()
                except AdapterError as error:  # the others are looked at all the same, and all bad ones told at once
                    refused.append(error)
                else:
                    yield name, adapter, has_values

        try:
            for name, source in sources.items():
                if isinstance(source, Adapter):
                    pending.append((name, _done(source), True))
                    continue
                say(f"reading adapter {name} from {source}")
                self._stamps[name] = folder_stamp(source)
                if name in first:  # one after the other: each by as many threads as are worth it
                    pending.append((name, self._reader.submit(self._read, name, source, ordinary), True))
                else:
                    pending.append((name, checkers.submit(self._unchanged, name, source, check), False))
                yield from looked_at(2 * _CHECKERS - 1)
            yield from looked_at(0)
            refuse_all(refused, len(sources))
        finally:
            checkers.shutdown(cancel_futures=True)

    def pin(self, slots: int) -> None:
        """Has `take` give values in page-locked memory, from which a device copies while the host goes on.

        slots: of the device, and so the most adapters that are copied ahead of their turn.
        """
        self._pin = True
        self._ahead = max(slots, READ_AHEAD)

    @property
    def kept(self) -> int:
        """Adapters that stay in host memory once they were read."""
        return len(self._to_keep)

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
        coming = self._coming.pop(name, None)
        if self._lies_ready(name):
            return self._kept[name]
        return coming.result() if coming is not None else self._reader.submit(self._make_ready, name).result()

    def _lies_ready(self, name: str) -> bool:
        return name in self._kept and not self._pin

    def _make_ready(self, name: str) -> Adapter:
        memory, path = Arena(page_locked), self._outlines[name].path
        if name not in self._to_keep:
            return self._read(name, path, memory.empty if self._pin else ordinary)
        if name not in self._kept:
            self._kept[name] = self._read(name, path, ordinary)
        return pinned(self._kept[name], memory) if self._pin else self._kept[name]

    def _read(self, name: str, path: Path, allocate: Allocate) -> Adapter:
        return self._unchanged(name, path, lambda name, path: self._load(name, path, allocate))

    def _unchanged(self, name: str, path: Path, look: Check) -> Adapter:
        """What `look` finds of an adapter, whose files must be as they were when the run began with it."""
        adapter = look(name, path)
        if folder_stamp(path) != self._stamps[name]:
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
