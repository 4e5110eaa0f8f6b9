"""The largest magnitude of every tensor of an adapter, read through one small buffer. Keeps no values."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from io import FileIO
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moelora.errors import AdapterError
from moelora.safetensors_file import TensorInfo, stored_dtype

_BUFFER = 1 << 18
"""Bytes that stay in a core's cache: memory that is fresh for every tensor costs more than the reading."""

_BITS: dict[int, tuple[Any, Any]] = {2: (np.uint16, np.int16), 4: (np.uint32, np.int32), 8: (np.uint64, np.int64)}
"""Integers as wide as a float of so many bytes, without sign and with it."""


def read_peaks(infos: Iterable[TensorInfo]) -> dict[str, float]:
    """The largest magnitude in every tensor, by name; infinity where a value is not finite.

    infos: all tensors of their files, empty ones among them or not, as their headers list them. Takes one thread.
    Raises AdapterError if a file has changed or vanished since its header was read.
    """
    by_file: dict[Path, list[TensorInfo]] = defaultdict(list)
    peaks: dict[str, float] = {}
    for info in infos:
        peaks[info.name] = 0.0
        if info.nbytes:
            by_file[info.file].append(info)
    buffer = np.empty(_BUFFER, dtype=np.uint8)
    for path, of_file in by_file.items():
        of_file.sort(key=attrgetter("begin"))
        try:
            with FileIO(path) as file:
                status = os.fstat(file.fileno())
                if (status.st_size, status.st_mtime_ns) != of_file[0].stamp:
                    raise _changed(path)
                for _, alike in groupby(of_file, key=attrgetter("dtype")):
                    run = list(alike)
                    peaks.update(zip([info.name for info in run], _peaks_of_run(file, path, run, buffer), strict=True))
        except OSError as error:
            raise AdapterError(f"{path}: cannot be read: {error.strerror or error}") from None
    return peaks


def _peaks_of_run(file: FileIO, path: Path, run: Sequence[TensorInfo], buffer: np.ndarray) -> list[float]:
    """The peaks of tensors of one dtype that lie one behind the other."""
    dtype = stored_dtype(run[0])
    unsigned, signed = _BITS[dtype.itemsize]
    begin = run[0].begin
    starts = np.array([info.begin for info in run])
    starts = (starts - begin) // dtype.itemsize
    total = (run[-1].begin + run[-1].nbytes - begin) // dtype.itemsize
    peaks = np.zeros(len(run), dtype=unsigned)
    room = buffer.view(unsigned)
    file.seek(begin)
    position = 0
    while position < total:
        bits = room[: total - position]
        _fill(file, path, bits)
        # Without their sign floats are ordered as their bits are, infinity and NaN last; integers compare far faster.
        np.bitwise_and(bits, unsigned(np.iinfo(signed).max), out=bits)
        first = int(np.searchsorted(starts, position, "right")) - 1
        last = int(np.searchsorted(starts, position + len(bits), "left"))
        within = np.maximum(starts[first:last] - position, 0)
        np.maximum(peaks[first:last], np.maximum.reduceat(bits, within), out=peaks[first:last])
        position += len(bits)
    values = torch.from_numpy(peaks.view(signed)).view(dtype).double()
    found: list[float] = values.nan_to_num(nan=float("inf"), posinf=float("inf")).tolist()
    return found


def _fill(file: FileIO, path: Path, room: np.ndarray) -> None:
    left = room.view(np.uint8).data
    while left:
        count = file.readinto(left)
        if not count:
            raise _changed(path)
        left = left[count:]


def _changed(path: Path) -> AdapterError:
    return AdapterError(f"{path}: changed while it was read")
