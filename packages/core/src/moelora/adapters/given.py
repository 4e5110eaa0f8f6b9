"""The adapters that an engine is given by name: folders and adapters in memory, checked and brought to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from moelora.adapters.arena import Allocate
from moelora.adapters.base import Adapter, Catalogue, check_fits
from moelora.adapters.host import HostAdapters
from moelora.adapters.loader import AdapterLoader, BaseWeight
from moelora.environment import free_host_memory
from moelora.errors import AdapterError
from moelora.types import BASE_ADAPTER


def host_adapters(
    given: Mapping[str, str | Path | Adapter],
    *,
    catalogue: Catalogue,
    dtype: torch.dtype,
    base_weight: BaseWeight,
    lora_b_layout: str | None,
    budget: int | None,
    say: Callable[[str], None],
) -> HostAdapters:
    """Checks all adapters, in the order given, and reads the first; what holds them keeps the arguments but `say`.

    Args:
        given: By name: an adapter's folder, or an adapter in canonical form, whose dtype stays what it is.
        catalogue: The modules of the base that adapters may target.
        dtype: Of the factors that are read.
        base_weight: As for `AdapterLoader`.
        lora_b_layout: As for `AdapterLoader`.
        budget: Bytes of host memory for adapters that were read; None is half of what is free.
        say: Called with a sentence for each adapter that is read or checked.

    Raises:
        AdapterError: If a name is not one, or an adapter would lose a tensor or does not fit.
    """
    if not isinstance(given, Mapping):
        raise AdapterError(f"adapters must map names to folders, got {type(given).__name__}")
    sources = {name: _source(name, one, catalogue) for name, one in given.items()}
    if budget is None and (free := free_host_memory()) is not None:
        budget = free // 2

    loader = AdapterLoader(catalogue, dtype=dtype, base_weight=base_weight, lora_b_layout=lora_b_layout)

    def load(name: str, path: Path, allocate: Allocate) -> Adapter:
        return loader.load(path, name=name, allocate=allocate)

    def check(name: str, path: Path) -> Adapter:
        return loader.check(path, name=name)

    return HostAdapters(sources, load, check, budget=budget, say=say)


def _source(name: str, one: str | Path | Adapter, catalogue: Catalogue) -> Path | Adapter:
    if name == BASE_ADAPTER or not name:
        raise AdapterError(f"an adapter cannot be called {name!r}")
    if not isinstance(one, Adapter):
        return Path(one)
    check_fits(one, catalogue)
    return replace(one, name=name)  # residents of the bank are known by it
