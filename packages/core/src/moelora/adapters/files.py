"""Reads adapter_model.safetensors: the header is checked by hand, values come through safetensors' memory map."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moelora.errors import AdapterError

WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
PICKLE_NAME = "adapter_model.bin"

# The limit of the safetensors format itself.
_MAX_HEADER = 100_000_000
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor as the header describes it. `dtype`: safetensors' name, "F32", "BF16", …"""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * _DTYPE_BYTES[self.dtype]


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
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            sound = len(start) == 8 and 2 <= length <= min(size - 8, _MAX_HEADER)
            header = file.read(length) if sound else file.read(120)
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not sound:
        raise AdapterError(f"{path}: {_why_no_header(start + header, size, length)}")
    entries = _parse_header(path, header)
    infos = {name: _check_entry(path, name, entry) for name, entry in entries.items()}
    _check_extent(path, entries, size - 8 - length)
    if not infos:
        raise AdapterError(f"{path}: holds no tensors")
    return infos


class TensorReader:
    """Reads values, on the CPU and in the stored dtype. A context manager; the tensors may outlive it."""

    def __init__(self) -> None:
        self._handles: dict[Path, Any] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handles.clear()

    def read(self, info: TensorInfo) -> torch.Tensor:
        """The tensor; do not write to it. Raises AdapterError if the file changed or vanished meanwhile."""
        try:
            handle = self._handles.get(info.file)
            if handle is None:
                handle = self._handles[info.file] = safe_open(info.file, framework="pt", device="cpu")
            tensor = handle.get_tensor(info.name)
        except (SafetensorError, OSError) as error:
            raise AdapterError(f"{info.file}: tensor {info.name!r} cannot be read: {error}") from None
        if tuple(tensor.shape) != info.shape:
            raise AdapterError(f"{info.file}: changed while it was read")
        return tensor


def _why_no_header(start: bytes, size: int, length: int) -> str:
    if start.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the file itself; run `git lfs pull`"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"{", b"pk\x03\x04")):
        return "is not a safetensors file; its beginning looks like a web page, JSON or an archive"
    if size < 10:
        return f"is too short to be a safetensors file ({size} bytes); the download or copy was probably cut off"
    return (
        f"its header claims {length} bytes, the file has {size}: "
        "it was cut off in the header, or is not a safetensors file"
    )


def _parse_header(path: Path, header: bytes) -> dict[str, dict[str, Any]]:
    try:
        raw = json.loads(header.decode("utf-8"), object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: its header is damaged: {error}") from None
    if not isinstance(raw, dict):
        raise AdapterError(f"{path}: its header is damaged: not a JSON object")
    raw.pop("__metadata__", None)
    return raw


def _check_entry(path: Path, name: str, entry: Any) -> TensorInfo:
    if not name or not name.isprintable() or ".." in name or "/" in name or "\\" in name:
        raise AdapterError(f"{path}: tensor name {name!r} is not a dotted name")
    shape: Any = entry.get("shape") if isinstance(entry, dict) else None
    offsets: Any = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise AdapterError(f"{path}: its header is damaged at tensor {name!r}")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise AdapterError(f"{path}: tensor {name!r} has dtype {dtype!r}; valid: {', '.join(_DTYPE_BYTES)}")
    info = TensorInfo(name=name, dtype=dtype, shape=tuple(shape), file=path)
    if offsets[1] - offsets[0] != info.nbytes:
        raise AdapterError(
            f"{path}: tensor {name!r} of shape {list(shape)} and dtype {dtype} takes {info.nbytes} bytes, "
            f"the header gives it {offsets[1] - offsets[0]}"
        )
    if info.numel == 0 and not is_placeholder(name):
        raise AdapterError(f"{path}: tensor {name!r} is empty (shape {list(shape)})")
    return info


def is_placeholder(name: str) -> bool:
    """Whether an empty tensor of that name is normal: some exports keep an empty `w3` beside a fused `w1`."""
    parts = name.split(".")
    return "w3" in parts and "experts" in parts


def _check_extent(path: Path, entries: Mapping[str, dict[str, Any]], data_size: int) -> None:
    """Tensors must lie one behind the other and fill the file: no gap, no overlap, no hidden or missing bytes."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != position:
            raise AdapterError(f"{path}: its header is damaged: tensor {name!r} begins at {begin}, not at {position}")
        position = end
    if position > data_size:
        raise AdapterError(
            f"{path}: is shorter than its header says: {position - data_size} bytes are missing; "
            "the download or copy was probably cut off"
        )
    if position < data_size:
        raise AdapterError(f"{path}: has {data_size - position} bytes behind its last tensor; it is damaged")


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


def _are_sizes(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for item in value:  # noqa: SIM110 - a generator here costs a tenth of a second per 10,000 tensors
        if type(item) is not int or not 0 <= item < 2**63:
            return False
    return True


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"name {name!r} is given twice")
            seen.add(name)
    return result
