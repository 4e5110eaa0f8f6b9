"""Where a forward reads values on the host: no graph can capture that. Judged from the operations it makes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim"})


class _Hidden(local):
    """How many `own_work` blocks this thread is in."""

    depth = 0


_hidden = _Hidden()


class SyncFinder(TorchDispatchMode):
    """Collects the places, outside torch, of operations whose result the host must wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[str, None] = {}
        self._lists = _ListFinder(self.add)

    def __enter__(self) -> SyncFinder:
        super().__enter__()
        self._lists.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._lists.__exit__(*error)
        super().__exit__(*error)

    @property
    def places(self) -> tuple[str, ...]:
        """ "file:line (operation)", each once, in the order met."""
        return tuple(self._places)

    def add(self, operation: str) -> None:
        """Notes that `operation` is made now, unless it is moelora's own work."""
        if not _hidden.depth:
            place = _where()
            if place is not None:
                self._places[f"{place} ({operation})"] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _READS or (name in ("index", "index_put_") and _by_mask(args[1])):
            self.add("item" if name == "_local_scalar_dense" else name.strip("_"))
        return func(*args, **(kwargs or {}))


class _ListFinder(TorchFunctionMode):
    """`tolist` makes no operation that a dispatch mode sees."""

    def __init__(self, add: Any) -> None:
        self._add = add

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist:
            self._add("tolist")
        return func(*args, **(kwargs or {}))


def _by_mask(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _where() -> str | None:
    """The innermost frame outside torch and this module; None for what transformers leaves out during capture."""
    frame = sys._getframe(1)
    place = None
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "find_packed_sequence_indices":
            return None
        if place is None and "/torch/" not in file and file != __file__:
            place = f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return place


@contextmanager
def own_work() -> Iterator[None]:
    """Hides from a `SyncFinder` what moelora's own functions do."""
    _hidden.depth += 1
    try:
        yield
    finally:
        _hidden.depth -= 1
