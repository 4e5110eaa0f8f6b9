"""Which files hold an adapter's tensors, and which tensors an adapter may have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from threading import Lock
from types import TracebackType

import torch

from moelora.errors import AdapterError
from moelora.safetensors_file import FileProblem, MappedFile, TensorInfo, stored_dtype
from moelora.safetensors_file import read_header as read_any_header

WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
PICKLE_NAME = "adapter_model.bin"

_FLOATS = ("F64", "F32", "F16", "BF16")
_UNDOTTED = ("..", "/", "\\")


def check_folder(path: Path) -> None:
    """Raises AdapterError unless `path` is a folder."""
    if path.is_dir():
        return
    if path.exists():
        raise AdapterError(f"{path}: is a file; give the adapter's folder, {path.parent}")
    raise AdapterError(f"{path}: no such folder")


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of an adapter folder by name, in the order of the file, without reading their values.

    Raises AdapterError, naming the file and the likely cause, for anything but a sound safetensors file of floats.
    """
    if (folder / WEIGHTS_NAME).exists():
        return read_header(folder / WEIGHTS_NAME)
    if (folder / INDEX_NAME).exists():
        return _read_shards(folder)
    if (folder / PICKLE_NAME).exists():
        raise AdapterError(
            f"{folder}: only {PICKLE_NAME} is there, a pickle, which can run code when it is read; "
            "save the adapter again as safetensors"
        )
    try:
        others = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise AdapterError(f"{folder}: cannot be read: {error.strerror or error}") from None
    raise AdapterError(f"{folder}: {WEIGHTS_NAME} not found; the folder holds {', '.join(others[:8]) or 'nothing'}")


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Reads and checks the header of one safetensors file; see `read_headers`."""
    try:
        infos = read_any_header(path)
        _check_tensors(infos)
    except FileProblem as problem:
        raise AdapterError(f"{path}: {problem}") from None
    if not infos:
        raise AdapterError(f"{path}: holds no tensors")
    return infos


def _check_tensors(infos: Mapping[str, TensorInfo]) -> None:
    """Raises `FileProblem` for the first tensor that an adapter may not have."""
    together = "".join(infos)  # one look at all names: there may be tens of thousands
    dotted = together.isprintable() and "" not in infos and not any(mark in together for mark in _UNDOTTED)
    if (
        not dotted
        or not {info.dtype for info in infos.values()} <= set(_FLOATS)
        or not all(info.nbytes for info in infos.values())
    ):
        for name, info in infos.items():
            _check_tensor(name, info)


def _check_tensor(name: str, info: TensorInfo) -> None:
    if not name or not name.isprintable() or any(mark in name for mark in _UNDOTTED):
        raise FileProblem(f"tensor name {name!r} is not a dotted name")
    if info.dtype not in _FLOATS:
        raise FileProblem(f"tensor {name!r} has dtype {info.dtype!r}; valid: {', '.join(_FLOATS)}")
    if info.nbytes == 0 and not is_placeholder(name):
        raise FileProblem(f"tensor {name!r} is empty (shape {list(info.shape)})")


def is_placeholder(name: str) -> bool:
    """Whether an empty tensor of that name is normal: some exports keep an empty `w3` beside a fused `w1`."""
    parts = name.split(".")
    return "w3" in parts and "experts" in parts


class TensorReader:
    """Reads values, on the CPU and in the stored dtype. A context manager; the tensors may outlive it.

    Any number of threads may read at once. Raises AdapterError if a file has changed or vanished since its header was
    read.
    """

    def __init__(self) -> None:
        self._files: dict[Path, MappedFile] = {}
        self._opening = Lock()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def read(self, info: TensorInfo) -> torch.Tensor:
        """The tensor; do not write to it."""
        return self._mapped(info).tensor(info)

    def stack(self, infos: Sequence[TensorInfo], out: torch.Tensor | None = None) -> torch.Tensor:
        """Tensors of one shape and dtype, one behind the other: `[n, …]`, in `out` and its dtype if that is given."""
        first = infos[0]
        dtype = stored_dtype(first)
        stacked = out if out is not None and out.dtype is dtype else torch.empty(len(infos), *first.shape, dtype=dtype)
        position = 0
        for _, some in groupby(infos, key=attrgetter("file")):  # one after the other in the same file: one call
            together = list(some)
            self._mapped(together[0]).stack(together, stacked[position : position + len(together)])
            position += len(together)
        return stacked if out is None or out is stacked else out.copy_(stacked)

    def _mapped(self, info: TensorInfo) -> MappedFile:
        mapped = self._files.get(info.file)
        if mapped is not None:
            return mapped
        with self._opening:
            try:
                return self._files.setdefault(info.file, MappedFile(info.file, info.stamp))
            except FileProblem as problem:
                raise AdapterError(f"{info.file}: {problem}") from None


def _read_shards(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX_NAME
    try:
        raw = json.loads(index.read_bytes().decode("utf-8-sig"))
        weight_map = raw["weight_map"]
        shards = sorted(set(weight_map.values()))
        sound = all(isinstance(shard, str) and Path(shard).name == shard for shard in shards)
    except OSError as error:
        raise AdapterError(f"{index}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise AdapterError(f"{index}: is not an index of safetensors files: {error!r}") from None
    if not sound:
        raise AdapterError(f"{index}: names a shard outside the adapter's folder")
    infos: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(folder / shard).items():
            if weight_map.get(name) != shard:
                raise AdapterError(f"{folder / shard}: tensor {name!r} is not listed for this file in {INDEX_NAME}")
            infos[name] = info
    missing = next((name for name in weight_map if name not in infos), None)
    if missing is not None:
        raise AdapterError(f"{index}: lists tensor {missing!r}, which {weight_map[missing]} does not hold")
    return infos
