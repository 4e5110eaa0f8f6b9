"""Where a forward reads values on the host: no graph can capture that. Judged from the operations it makes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_READS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim"})


class SyncFinder(TorchDispatchMode):
    """Collects the places, outside torch, of operations whose result the host must wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[str, None] = {}

    @property
    def places(self) -> tuple[str, ...]:
        """ "file:line (operation)", each once, in the order met."""
        return tuple(self._places)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if (name in _READS and not _skipped_in_capture()) or (name in ("index", "index_put_") and _by_mask(args[1])):
            self._places[f"{_where()} ({name.strip('_')})"] = None
        return func(*args, **(kwargs or {}))


def _by_mask(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _where() -> str:
    """The innermost frame outside torch and this module."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and file != __file__:
            return f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"


def _skipped_in_capture() -> bool:
    """Whether transformers looks for packed sequences, which it leaves out while a stream is being captured."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        if frame.f_code.co_name == "find_packed_sequence_indices":
            return True
        frame = frame.f_back
    return False


@contextmanager
def own_work() -> Iterator[None]:
    """Hides from a `SyncFinder` what moelora's own functions do."""
    with _disable_current_modes():
        yield
