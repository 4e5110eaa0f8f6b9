"""Which files hold an adapter's tensors, and which tensors an adapter may have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from threading import Lock
from types import TracebackType

import torch

from moelora.errors import AdapterError, similar_folder
from moelora.safetensors_file import (
    FileProblem,
    MappedFile,
    RawHeader,
    Stamp,
    TensorInfo,
    parse_header,
    read_header,
    stored_dtype,
)

WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
PICKLE_NAME = "adapter_model.bin"

_READ = (".json", ".safetensors")
"""Endings of what an adapter is read from. A training run may still write its log beside them."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_UNDOTTED = ("..", "/", "\\")


def check_folder(path: Path) -> None:
    """Raises AdapterError unless `path` is a folder."""
    if path.is_dir():
        return
    if path.exists():
        raise AdapterError(f"{path}: is a file; give the adapter's folder, {path.parent}")
    raise AdapterError(f"{path}: no such folder{similar_folder(path)}")


def adapter_files(folder: Path) -> list[Path]:
    """The files of a folder that an adapter may be read from, sorted.

    Links that lead nowhere, folders of such names, and pipes, which would be waited for, are none. A folder that is not
    there has none either: who loads the adapter says so.
    """
    return sorted(path for path in folder.glob("*") if path.suffix in _READ and path.is_file())


def folder_stamp(folder: Path) -> object:
    """Changes whenever a file that an adapter is read from is written anew; None where it cannot be told."""
    try:
        return [(path.name, Stamp.of(path.stat())) for path in adapter_files(folder)]
    except OSError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """The headers of an adapter's files before they are parsed.

    weight_map: the index of sharded adapters, tensor by file name; None where there is one file.
    """

    folder: Path
    weight_map: Mapping[str, str] | None
    shards: Sequence[RawHeader]

    @property
    def meaning(self) -> object:
        """All that `parse_headers` looks at: equal for adapters that differ in nothing but their values."""
        return self.weight_map, [(header.shard, header.stamp.size, header.text) for header in self.shards]

    @property
    def stamps(self) -> dict[str, Stamp]:
        """The stamp of every file by its name."""
        return {header.shard: header.stamp for header in self.shards}


def read_headers(folder: Path) -> Headers:
    """Reads the headers of an adapter folder; `parse_headers` says what is in them.

    Raises AdapterError, naming the file and the likely cause, where there is no safetensors file.
    """
    if (folder / WEIGHTS_NAME).exists():
        return Headers(folder=folder, weight_map=None, shards=[_read_header(folder / WEIGHTS_NAME)])
    if (folder / INDEX_NAME).exists():
        weight_map = _read_index(folder / INDEX_NAME)
        shards = [_read_header(folder / shard) for shard in sorted(set(weight_map.values()))]
        return Headers(folder=folder, weight_map=weight_map, shards=shards)
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


def _read_header(path: Path) -> RawHeader:
    try:
        return read_header(path)
    except FileProblem as problem:
        raise AdapterError(f"{path}: {problem}") from None


def _read_index(index: Path) -> dict[str, str]:
    try:
        raw = json.loads(index.read_bytes().decode("utf-8-sig"))
        weight_map: dict[str, str] = raw["weight_map"]
        shards = set(weight_map.values())
        sound = all(isinstance(shard, str) and Path(shard).name == shard for shard in shards)
    except OSError as error:
        raise AdapterError(f"{index}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise AdapterError(f"{index}: is not an index of safetensors files: {error!r}") from None
    if not sound:
        raise AdapterError(f"{index}: names a shard outside the adapter's folder")
    return weight_map


def parse_headers(headers: Headers) -> dict[str, TensorInfo]:
    """The tensors of an adapter by name, in the order of its files.

    Raises AdapterError, naming the file and the likely cause, for anything but sound safetensors files of floats.
    """
    if headers.weight_map is None:
        return _parse_header(headers.folder, headers.shards[0])
    infos: dict[str, TensorInfo] = {}
    for header in headers.shards:
        for name, info in _parse_header(headers.folder, header).items():
            if headers.weight_map.get(name) != header.shard:
                raise AdapterError(
                    f"{headers.folder / header.shard}: tensor {name!r} is not listed for this file in {INDEX_NAME}"
                )
            infos[name] = info
    for name, shard in headers.weight_map.items():
        if name not in infos:
            raise AdapterError(f"{headers.folder / INDEX_NAME}: lists tensor {name!r}, which {shard} does not hold")
    return infos


def _parse_header(folder: Path, header: RawHeader) -> dict[str, TensorInfo]:
    try:
        infos = parse_header(header)
        _check_tensors(infos)
    except FileProblem as problem:
        raise AdapterError(f"{folder / header.shard}: {problem}") from None
    if not infos:
        raise AdapterError(f"{folder / header.shard}: holds no tensors")
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

    folder, stamps: where the files are, and how they were when their headers were read, by name (`Headers.stamps`).
    Any number of threads may read at once. Raises AdapterError if a file has changed or vanished since.
    """

    def __init__(self, folder: Path, stamps: Mapping[str, Stamp]) -> None:
        self._folder = folder
        self._stamps = stamps
        self._files: dict[str, MappedFile] = {}
        self._opening = Lock()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def read(self, info: TensorInfo) -> torch.Tensor:
        """The tensor; do not write to it."""
        with self._named(info):
            return self._mapped(info).tensor(info)

    def stack(self, infos: Sequence[TensorInfo], out: torch.Tensor | None = None) -> torch.Tensor:
        """Tensors of one shape and dtype, one behind the other: `[n, …]`, in `out` and its dtype if that is given."""
        first = infos[0]
        dtype = stored_dtype(first)
        stacked = out if out is not None and out.dtype is dtype else torch.empty(len(infos), *first.shape, dtype=dtype)
        position = 0
        for _, some in groupby(infos, key=attrgetter("shard")):  # one after the other in the same file: one call
            together = list(some)
            with self._named(together[0]):
                self._mapped(together[0]).stack(together, stacked[position : position + len(together)])
            position += len(together)
        return stacked if out is None or out is stacked else out.copy_(stacked)

    def _mapped(self, info: TensorInfo) -> MappedFile:
        mapped = self._files.get(info.shard)
        if mapped is not None:
            return mapped
        with self._opening:
            return self._files.setdefault(info.shard, MappedFile(self._folder / info.shard, self._stamps[info.shard]))

    @contextmanager
    def _named(self, info: TensorInfo) -> Iterator[None]:
        try:
            yield
        except FileProblem as problem:
            raise AdapterError(f"{self._folder / info.shard}: {problem}") from None
