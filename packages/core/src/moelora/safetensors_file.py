"""Safetensors files: a header checked to the last byte, and tensors as views of the mapped file.

For adapters with tens of thousands of small tensors, where a call into a library for each costs more than the copy.
Knows neither adapters nor checkpoints: what is wrong with a file is a `FileProblem`, whose text does not name the file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

# A file begins with the length of its header.
_LENGTH_BYTES = 8
# The limit of the safetensors format itself.
_MAX_HEADER = 100_000_000

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

_KEYS = (b'"dtype"', b'"shape"', b'"data_offsets"')

# A header as the safetensors library writes it: `{`, its metadata if any, entries of this one form with commas between,
# `}`. Every such entry is JSON; what is spelled in another way is left to the JSON parser, which takes twice as long.
_USUAL_ENTRY = re.compile(
    rb'"([^"\\\x00-\x1f]+)":\{("dtype":"[A-Z0-9_]+","shape":\[[0-9,]*\]),'
    rb'"data_offsets":\[(0|[1-9][0-9]*),(0|[1-9][0-9]*)\]\}'
)
_USUAL_START = re.compile(rb'\{(?:"__metadata__":(\{[^{}]*\}),)?')


class FileProblem(Exception):  # noqa: N818 - callers turn it into an error of their own, with the file's name
    """What is wrong with a file, and the likely cause, as a sentence to stand behind its name and a colon."""


class Stamp(NamedTuple):
    """Size in bytes and time of change in nanoseconds: a file that has both as before is taken for unchanged."""

    size: int
    changed: int

    @staticmethod
    def of(status: os.stat_result) -> Stamp:
        """The stamp of a file now."""
        return Stamp(status.st_size, status.st_mtime_ns)


class TensorInfo(NamedTuple):
    """One tensor as the header describes it. dtype: safetensors' name, "F32", "BF16", …; begin: its byte in the file.

    shard: the file's name, without its folder: files of the same header in other folders have the same infos.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    begin: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class RawHeader(NamedTuple):
    """A header before it is parsed. shard: the file's name; text: JSON; stamp: of the file when this was read."""

    shard: str
    text: bytes
    stamp: Stamp


def read_header(path: Path) -> RawHeader:
    """The header of a file. Raises `FileProblem` if there is none."""
    try:
        with path.open("rb") as file:
            stamp = Stamp.of(os.fstat(file.fileno()))
            size = stamp.size
            start = file.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            sound = len(start) == _LENGTH_BYTES and 2 <= length <= min(size - _LENGTH_BYTES, _MAX_HEADER)
            text = file.read(length) if sound else file.read(120)
    except OSError as error:
        raise FileProblem(f"cannot be read: {error.strerror or error}") from None
    if not sound:
        raise FileProblem(_why_no_header(start + text, size, length))
    return RawHeader(path.name, text, stamp)


def parse_header(header: RawHeader) -> dict[str, TensorInfo]:
    """The tensors of a file by name, in the order of its header. Raises `FileProblem`.

    Checked: names are unique; shapes, dtypes and places agree; tensors lie one behind the other and fill the file, so
    that no byte is missing, hidden or shared. What comes out depends on the name, text and size alone.
    """
    infos = _parse_usual(header)
    if infos is None:
        data = _LENGTH_BYTES + len(header.text)
        infos = {name: _info(header.shard, data, name, entry) for name, entry in _parse(header.text).items()}
        _check_extent(infos, data, header.stamp.size)
    return infos


class MappedFile:
    """A file whose tensors are read in place. The tensors may outlive it; they must not be written to.

    Whatever reads it raises `FileProblem` if it is no longer the one whose header was read (`RawHeader.stamp`). If it
    is cut off between that look and the use of a tensor, the system ends the process (SIGBUS) without a word of why.
    """

    def __init__(self, path: Path, stamp: Stamp) -> None:
        self._path, self._stamp = str(path), stamp
        self._refuse_changed()
        try:
            storage: Any = torch.UntypedStorage.from_file(self._path, shared=False, nbytes=stamp.size)
        except UnicodeEncodeError:
            raise FileProblem("cannot be read: its path is no UTF-8, which torch asks for; rename it") from None
        except RuntimeError as error:
            raise FileProblem(f"cannot be read: {error}") from None
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._typed: dict[str, torch.Tensor] = {}

    def _refuse_changed(self) -> None:
        try:
            stamp = Stamp.of(os.stat(self._path))  # about a microsecond
        except OSError as error:
            raise FileProblem(f"cannot be read: {error.strerror or error}") from None
        if stamp != self._stamp:
            raise FileProblem("changed while it was read")

    def tensor(self, info: TensorInfo) -> torch.Tensor:
        """A view of the file, or a copy where the tensor does not lie at a multiple of its element's size."""
        self._refuse_changed()
        dtype = _DTYPES[info.dtype]
        if info.begin % dtype.itemsize:
            return self._bytes[info.begin : info.begin + info.nbytes].clone().view(dtype).view(info.shape)
        typed = self._typed.get(info.dtype)
        if typed is None:
            whole = self._bytes.numel() // dtype.itemsize * dtype.itemsize
            typed = self._typed[info.dtype] = self._bytes[:whole].view(dtype)
        # One call for slice and shape: there may be tens of thousands.
        return typed.as_strided(info.shape, _contiguous(info.shape), info.begin // dtype.itemsize)

    def stack(self, infos: Sequence[TensorInfo], out: torch.Tensor) -> None:
        """Copies tensors of one shape and dtype into `out[0]`, `out[1]`, …, whose dtype is the stored one.

        One call for all of them, wherever they lie: they are picked from the windows of a tensor's size that begin at
        each byte of the file.
        """
        self._refuse_changed()
        out = out.view(torch.uint8) if out.dtype is not torch.uint8 else out
        shape = out.shape[1:]
        room = self._bytes.numel() - math.prod(shape) + 1
        windows = self._bytes.as_strided((room, *shape), (1, *_contiguous(shape)))
        torch.index_select(windows, 0, torch.tensor([info.begin for info in infos]), out=out)


def stored_dtype(info: TensorInfo) -> torch.dtype:
    """The dtype in which a tensor lies in its file."""
    return _DTYPES[info.dtype]


def _contiguous(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for i in range(len(strides) - 1, 0, -1):
        strides[i - 1] = strides[i] * shape[i]
    return strides


def _parse_usual(header: RawHeader) -> dict[str, TensorInfo] | None:
    """The tensors of a sound header in the usual spelling; None leaves any other header, and its faults, to the parser.

    Every step goes over all tensors within the interpreter: there may be tens of thousands.
    """
    parts = _USUAL_ENTRY.split(header.text)
    start = _USUAL_START.fullmatch(parts[0])
    if start is None or any(key in parts[0] for key in _KEYS):
        return None
    if len(parts) == 1 or parts[-1].rstrip(b" ") != b"}" or set(parts[5:-1:5]) - {b","}:
        return None
    try:
        json.loads((start[1] or b"{}").decode())
        names = b"\n".join(parts[1::5]).decode().split("\n")
        kinds = parts[2::5]
        known = {kind: _usual_kind(kind) for kind in set(kinds)}
        ends = list(map(int, parts[4::5]))
    except (ValueError, KeyError, RecursionError):
        return None
    dtypes, shapes, sizes = zip(*map(known.__getitem__, kinds), strict=True)
    data = _LENGTH_BYTES + len(header.text)
    places = list(accumulate(sizes, initial=data))
    begins = [b"0", *parts[4::5]]  # no number has two spellings
    in_place = begins.pop() == b"%d" % (header.stamp.size - data) and begins == parts[3::5]
    if not in_place or ends != [place - data for place in places[1:]]:
        return None
    # As `TensorInfo` makes itself, but without a call of a function for each.
    make = partial(tuple.__new__, TensorInfo)
    infos = dict(zip(names, map(make, zip(names, dtypes, shapes, repeat(header.shard), places, sizes)), strict=True))
    return infos if len(infos) == len(names) and "__metadata__" not in infos else None


def _usual_kind(spelling: bytes) -> tuple[str, tuple[int, ...], int]:
    """dtype, shape and bytes of a tensor from their spelling. Raises ValueError or KeyError where they are unsound."""
    entry = json.loads(b"{%b}" % spelling)
    name, extents = entry["dtype"], tuple(entry["shape"])
    if any(extent >= 2**63 for extent in extents):
        raise ValueError(spelling)
    return name, extents, math.prod(extents) * _DTYPES[name].itemsize


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


def _info(shard: str, data: int, name: str, entry: Any) -> TensorInfo:
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
    return TensorInfo(name, dtype, tuple(shape), shard, data + begin, nbytes)


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
            f"it is shorter than its header says: {position - size} bytes are missing; "
            "the download or copy was probably cut off"
        )
    if position < size:
        raise FileProblem(
            f"it has {size - position} bytes behind its last tensor that do not belong to it; it is damaged"
        )


def _why_no_header(start: bytes, size: int, length: int) -> str:
    if start.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer, not the file itself; run `git lfs pull`"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"{", b"pk\x03\x04")):
        return "it is not a safetensors file; its beginning looks like a web page, JSON or an archive"
    if size < 10:
        return f"it is too short to be a safetensors file ({size} bytes); the download or copy was probably cut off"
    return (
        f"its header claims {length} bytes, the file has {size}: "
        "it was cut off in the header, or is not a safetensors file"
    )
