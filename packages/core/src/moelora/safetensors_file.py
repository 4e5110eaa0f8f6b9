"""Safetensors files: a header checked to the last byte, and tensors as views of the mapped file.

For adapters with tens of thousands of small tensors, where a call into a library for each costs more than the copy.
Knows neither adapters nor checkpoints: what is wrong with a file is a `FileProblem`, whose text does not name the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

# The limit of the safetensors format itself.
_MAX_HEADER = 100_000_000

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

_KEYS = (b'"dtype"', b'"shape"', b'"data_offsets"')


class FileProblem(Exception):  # noqa: N818 - callers turn it into an error of their own, with the file's name
    """What is wrong with a file, and the likely cause, as the rest of a sentence that begins with its name."""


class TensorInfo(NamedTuple):
    """One tensor as the header describes it. dtype: safetensors' name, "F32", "BF16", …; begin: its byte in the file.

    stamp: size and time of change of the file when its header was read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    nbytes: int
    stamp: tuple[int, int]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file by name, in the order of its header. Raises `FileProblem`.

    Checked: names are unique; shapes, dtypes and places agree; tensors lie one behind the other and fill the file, so
    that no byte is missing, hidden or shared.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            sound = len(start) == 8 and 2 <= length <= min(size - 8, _MAX_HEADER)
            header = file.read(length) if sound else file.read(120)
    except OSError as error:
        raise FileProblem(f"cannot be read: {error.strerror or error}") from None
    if not sound:
        raise FileProblem(_why_no_header(start + header, size, length))
    stamp = (size, status.st_mtime_ns)
    data = 8 + length
    infos = {name: _info(path, data, stamp, name, entry) for name, entry in _parse(header).items()}
    _check_extent(infos, data, size)
    return infos


class MappedFile:
    """A file whose tensors are read in place. The tensors may outlive it; they must not be written to."""

    def __init__(self, path: Path, stamp: tuple[int, int]) -> None:
        """Raises `FileProblem` if the file is not the one whose header was read (`TensorInfo.stamp`)."""
        try:
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) != stamp:
                raise FileProblem("changed while it was read")
            storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=status.st_size)
        except (OSError, RuntimeError) as error:
            raise FileProblem(f"cannot be read: {error}") from None
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._typed: dict[str, torch.Tensor] = {}

    def tensor(self, info: TensorInfo) -> torch.Tensor:
        """A view of the file, or a copy where the tensor does not lie at a multiple of its element's size."""
        dtype = _DTYPES[info.dtype]
        if info.begin % dtype.itemsize:
            return self._bytes[info.begin : info.begin + info.nbytes].clone().view(dtype).view(info.shape)
        typed = self._typed.get(info.dtype)
        if typed is None:
            whole = self._bytes.numel() // dtype.itemsize * dtype.itemsize
            typed = self._typed[info.dtype] = self._bytes[:whole].view(dtype)
        # One call for slice and shape: there may be tens of thousands.
        strides = [1] * len(info.shape)
        for i in range(len(strides) - 1, 0, -1):
            strides[i - 1] = strides[i] * info.shape[i]
        return typed.as_strided(info.shape, strides, info.begin // dtype.itemsize)


def _parse(header: bytes) -> dict[str, Any]:
    try:
        text = header.decode("utf-8")
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise FileProblem("its header is damaged: not a JSON object")
        objects = len(raw) + 1
        raw.pop("__metadata__", None)
        # A name that stands twice leaves one entry of two: only where the counts differ is every object looked at.
        if header.count(b"{") != objects or any(header.count(key) != len(raw) for key in _KEYS):
            json.loads(text, object_pairs_hook=_refuse_repeats)
    except (ValueError, RecursionError) as error:
        raise FileProblem(f"its header is damaged: {error}") from None
    return raw


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"name {name!r} is given twice")
        seen.add(name)
    return dict(pairs)


def _info(path: Path, data: int, stamp: tuple[int, int], name: str, entry: Any) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sound = isinstance(shape, list) and type(begin) is type(end) is int and 0 <= begin <= end < 2**63
        for extent in shape:
            sound = sound and type(extent) is int and 0 <= extent < 2**63
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise FileProblem(f"its header is damaged at tensor {name!r}")
    known = _DTYPES.get(dtype) if isinstance(dtype, str) else None
    if known is None:
        raise FileProblem(f"tensor {name!r} has dtype {dtype!r}; valid: {', '.join(_DTYPES)}")
    nbytes = math.prod(shape) * known.itemsize
    if end - begin != nbytes:
        raise FileProblem(
            f"tensor {name!r} of shape {shape} and dtype {dtype} takes {nbytes} bytes, the header gives it "
            f"{end - begin}"
        )
    return TensorInfo(name, dtype, tuple(shape), path, data + begin, nbytes, stamp)


def _check_extent(infos: Mapping[str, TensorInfo], data: int, size: int) -> None:
    ordered: Iterable[TensorInfo] = infos.values()
    if any(later.begin < one.begin for one, later in pairwise(ordered)):
        ordered = sorted(ordered, key=attrgetter("begin", "nbytes"))
    position = data
    for info in ordered:
        if info.begin != position:
            raise FileProblem(
                f"its header is damaged: tensor {info.name!r} begins at {info.begin - data}, not at {position - data}"
            )
        position += info.nbytes
    if position > size:
        raise FileProblem(
            f"is shorter than its header says: {position - size} bytes are missing; the download or copy was probably "
            "cut off"
        )
    if position < size:
        raise FileProblem(f"has {size - position} bytes behind its last tensor that do not belong to it; it is damaged")


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
