"""The file of one part: a header line with what was counted and what the rest must be, then output lines."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moelora.errors import ConfigError
from moelora.jobs.stats import JobStats
from moelora.jobs.writer import AtomicFile


class DamagedPartError(ConfigError):
    """A part that is not as it was written: cut off, or changed."""


def part_name(window: int) -> str:
    """The name of a window's part in the folder of its run."""
    return f"part-{window:08}.jsonl"


def run_name(manifest: Mapping[str, Any]) -> str:
    """What parts call their run: a worker whose parent was killed may outlive it, and leave its part to the next."""
    return f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"


def write_part(path: Path, window: int, run: str, stats: JobStats, lines: Sequence[bytes]) -> None:
    """Writes the part of `window`, whole or not at all. `run`: `run_name` of its run."""
    header = {"window": window, "run": run, "stats": stats.to_json(), **_body_facts(lines)}
    # The disk is not waited for: what a power cut leaves of a part is seen by its header, and scored again.
    with AtomicFile(path, lasting=False) as file:
        file.write(json.dumps(header).encode() + b"\n")
        for line in lines:
            file.write(line)


def read_stats(part: Path) -> JobStats:
    """What was counted for a part."""
    with part.open("rb") as file:
        return JobStats.from_json(json.loads(file.readline())["stats"])


def part_lines(path: Path, run: str) -> Iterator[bytes]:
    """The lines of a part behind its header.

    Raises `DamagedPartError`, at their end, if they are not as written, or not by the run of that name.
    """
    size = check = 0
    with path.open("rb") as file:
        try:
            header = json.loads(file.readline())
            own = (header["run"], path.name) == (run, part_name(header["window"]))
            expected = (header["bytes"], header["crc32"]) if own else (-1, -1)
        except (ValueError, TypeError, KeyError):
            expected = (-1, -1)
        for line in file:
            size += len(line)
            check = zlib.crc32(line, check)
            yield line
    if (size, check) != expected:
        raise DamagedPartError(f"{path} is damaged; remove it and run its shard again")


def _body_facts(lines: Iterable[bytes]) -> dict[str, int]:
    """What tells whether lines are all there as they were written."""
    size = check = 0
    for line in lines:
        size += len(line)
        check = zlib.crc32(line, check)
    return {"bytes": size, "crc32": check}
