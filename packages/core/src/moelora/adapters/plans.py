"""What an adapter's headers and configuration come to for one base model; found once for adapters that are alike.

The adapters of a sweep have the same tensors, and differ in their values: tens of thousands of names need not be looked
at again for each of them. Reads no values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from moelora.adapters.base import Catalogue
from moelora.adapters.config import LORA_B_LAYOUTS, AdapterConfig, read_config
from moelora.adapters.files import check_folder, parse_headers, read_headers
from moelora.adapters.layouts.base import Context
from moelora.adapters.names import Resolver
from moelora.adapters.peaks import Run, value_runs
from moelora.adapters.planner import Planned, plan_adapter
from moelora.errors import AdapterError, choose_from
from moelora.safetensors_file import Stamp, TensorInfo

KINDS = 8
"""Kinds of adapters that are kept: some 20 MB each where they have tens of thousands of tensors."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True, eq=False)
class Kind:
    """What the headers of an adapter say: the tensors by name, in the order of the files. Never to be changed.

    The same object for adapters whose headers are equal to the last byte: as a key it stands for all of it.
    """

    tensors: Mapping[str, TensorInfo]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """How all values are read in the order of the files."""
        return value_runs(self.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """An adapter folder as read without a model. stamps: of its files, by name, when their headers were read."""

    path: Path
    config: AdapterConfig
    kind: Kind
    stamps: Mapping[str, Stamp]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(info.nbytes for info in self.kind.tensors.values())


class Plans:
    """Reads and plans adapters for one base model. Any number of threads may use it at once.

    A plan depends on the headers, on what the configuration says, and on the arguments given here; all of it is
    compared before one that was made for another adapter is used again.
    """

    def __init__(
        self, catalogue: Catalogue, *, lora_b_layout: str | None = None, peft_version: str | None = None
    ) -> None:
        """See `AdapterLoader` for the two overrides."""
        self.resolver = Resolver(catalogue)
        self._b_layout = lora_b_layout
        self._peft_version = peft_version
        self._kinds: _Recent[object, Kind] = _Recent(KINDS)
        self._planned: _Recent[tuple[Kind, AdapterConfig], Planned] = _Recent(KINDS)

    def read(self, path: str | Path) -> AdapterFile:
        """Reads config and headers of an adapter folder.

        Raises AdapterError if a file is missing or damaged. What the configuration asks for in vain is listed in
        `config.refusals` and not raised.
        """
        folder = Path(path)
        check_folder(folder)
        config = read_config(folder)
        headers = read_headers(folder)
        kind = self._kinds.get(headers.meaning, lambda: Kind(parse_headers(headers)))
        return AdapterFile(path=folder, config=config, kind=kind, stamps=headers.stamps)

    def plan(self, file: AdapterFile) -> Planned:
        """What becomes of every tensor; problems are collected, not raised. What it gives is never to be changed.

        Raises AdapterError if the override of the layout is not one.
        """
        context = make_context(
            file.path,
            file.config,
            self.resolver,
            lora_b_layout=self._b_layout,
            peft_version=self._peft_version,
        )
        return self._planned.get((file.kind, file.config), lambda: plan_adapter(file.kind.tensors, context))


def make_context(
    path: Path,
    config: AdapterConfig,
    resolver: Resolver,
    *,
    lora_b_layout: str | None = None,
    peft_version: str | None = None,
) -> Context:
    """The context of planning; see `AdapterLoader` for the two overrides."""
    if lora_b_layout is not None and lora_b_layout not in LORA_B_LAYOUTS:
        raise AdapterError(f"{path}: {choose_from('lora_b_layout', lora_b_layout, LORA_B_LAYOUTS)}")
    return Context(
        config=config,
        resolver=resolver,
        b_layout=lora_b_layout or config.lora_b_layout or "rank_major",
        peft_version=peft_version or config.peft_version,
    )


class _Recent(Generic[_Key, _Value]):
    """The values of the last few keys. Keys are compared, not hashed: a header has megabytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: tuple[tuple[_Key, _Value], ...] = ()
        self._making = Lock()

    def get(self, key: _Key, make: Callable[[], _Value]) -> _Value:
        """The value of a key, made if it is not there. Threads that want one that is being made wait for it."""
        found = self._find(key)
        if found is not None:
            return found
        # One thread at a time, whatever the keys: what is made holds the interpreter's lock from end to end.
        with self._making:
            found = self._find(key)
            if found is None:
                found = make()
                self._entries = ((key, found), *self._entries)[: self._most]
            return found

    def _find(self, key: _Key) -> _Value | None:
        return next((value for known, value in self._entries if known == key), None)
