"""The largest magnitude of every tensor of an adapter, read through one small buffer. Keeps no values."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from moelora.errors import AdapterError
from moelora.safetensors_file import Stamp, TensorInfo, stored_dtype

_BUFFER = 1 << 20
"""Bytes that stay in a core's cache: memory that is fresh for every tensor costs more than the reading.

Not fewer, since threads that check adapters side by side wait for the interpreter's lock after each."""

_BITS: dict[int, tuple[Any, Any]] = {2: (np.uint16, np.int16), 4: (np.uint32, np.int32), 8: (np.uint64, np.int64)}
"""Integers as wide as a float of so many bytes, without sign and with it."""


class Run(NamedTuple):
    """Tensors of one dtype that lie one behind the other in a file.

    begin: the first one's byte in the file. starts: the first element of each, counted from there. numel: of all
    together. places: which of the adapter's tensors they are.
    """

    shard: str
    dtype: torch.dtype
    begin: int
    starts: np.ndarray
    numel: int
    places: np.ndarray


def value_runs(infos: Iterable[TensorInfo]) -> tuple[Run, ...]:
    """How all values of an adapter are read in the order of its files.

    infos: all tensors of their files, empty ones among them or not, as their headers list them.
    """
    by_file: dict[str, list[tuple[int, int, TensorInfo]]] = defaultdict(list)
    for place, info in enumerate(infos):
        if info.nbytes:
            by_file[info.shard].append((info.begin, place, info))
    runs: list[Run] = []
    for of_file in by_file.values():
        of_file.sort()
        for _, alike in groupby(of_file, key=lambda one: one[2].dtype):
            runs.append(_run(list(alike)))
    return tuple(runs)


def _run(alike: Sequence[tuple[int, int, TensorInfo]]) -> Run:
    begins, places, infos = zip(*alike, strict=True)
    first, last = infos[0], infos[-1]
    dtype = stored_dtype(first)
    return Run(
        shard=first.shard,
        dtype=dtype,
        begin=first.begin,
        starts=(np.array(begins) - first.begin) // dtype.itemsize,
        numel=(last.begin + last.nbytes - first.begin) // dtype.itemsize,
        places=np.array(places),
    )


def read_peaks(folder: Path, stamps: Mapping[str, Stamp], runs: Iterable[Run], count: int) -> np.ndarray:
    """The largest magnitude in each of `count` tensors, in their order, as float64; infinity where one is not finite.

    stamps: of the files by name, when their headers were read. An empty tensor has 0. Takes one thread.
    Raises AdapterError if a file has changed or vanished since its header was read.
    """
    peaks = np.zeros(count)
    buffer = np.empty(_BUFFER, dtype=np.uint8)
    for shard, of_file in groupby(runs, key=lambda run: run.shard):
        path = folder / shard
        try:
            with FileIO(path) as file:
                if Stamp.of(os.fstat(file.fileno())) != stamps[shard]:
                    raise _changed(path)
                for run in of_file:
                    peaks[run.places] = _peaks_of_run(file, path, run, buffer)
        except OSError as error:
            raise AdapterError(f"{path}: cannot be read: {error.strerror or error}") from None
    return peaks


def _peaks_of_run(file: FileIO, path: Path, run: Run, buffer: np.ndarray) -> np.ndarray:
    unsigned, signed = _BITS[run.dtype.itemsize]
    magnitude = unsigned(np.iinfo(signed).max)
    room = buffer.view(unsigned)
    begins = np.arange(0, run.numel, len(room))
    firsts = np.searchsorted(run.starts, begins, "right") - 1
    lasts = np.searchsorted(run.starts, begins + len(room), "left")
    peaks = np.zeros(len(run.starts), dtype=unsigned)
    file.seek(run.begin)
    for begin, first, last in zip(begins.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
        bits = room[: run.numel - begin]
        _fill(file, path, bits)
        # Without their sign floats are ordered as their bits are, infinity and NaN last; integers compare far faster.
        np.bitwise_and(bits, magnitude, out=bits)
        within = np.maximum(run.starts[first:last] - begin, 0)
        some = peaks[first:last]
        np.maximum(some, np.maximum.reduceat(bits, within), out=some)
    values = torch.from_numpy(peaks.view(signed)).view(run.dtype).double()
    return values.nan_to_num(nan=float("inf"), posinf=float("inf")).numpy()


def _fill(file: FileIO, path: Path, room: np.ndarray) -> None:
    left = room.view(np.uint8).data
    while left:
        count = file.readinto(left)
        if not count:
            raise _changed(path)
        left = left[count:]


def _changed(path: Path) -> AdapterError:
    return AdapterError(f"{path}: changed while it was read")
