"""A folder of finished parts, so that a killed run goes on where it stopped and shards can be merged.

Each part holds the output lines of one window of input rows, behind a header line with what was counted for it. Parts
appear whole or not at all; nothing else in the folder matters to a resumed run but the manifest.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from moelora.errors import ConfigError
from moelora.jobs.fingerprint import changed
from moelora.jobs.writer import AtomicFile

RUN_LOCK = "lock-run"
"""Held by whoever runs the whole of an output, alone or with workers; shards hold one lock each."""

_MANIFEST = "manifest.json"
_PART = re.compile(r"part-(\d{8})\.jsonl")
_END = re.compile(r"end-(\d+)-of-(\d+)\.json")


class PartStore:
    """The parts of one run in `folder`, held by one process per shard at a time.

    `worker`: one of several processes of one run, which share the folder and claim window by window.

    Raises `ConfigError` if another process holds this shard, or if the folder belongs to a run with another
    fingerprint and `overwrite` is not set; the message names what changed.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Mapping[str, str],
        *,
        shard: int = 0,
        shards: int = 1,
        overwrite: bool = False,
        worker: bool = False,
    ) -> None:
        self.folder = folder
        self._shard = shard
        self._shards = shards
        folder.mkdir(parents=True, exist_ok=True)
        self._worker = worker
        self._locks: list[BinaryIO] = []
        try:
            if shards == 1 and not worker:
                self._locks.append(hold_folder(folder, RUN_LOCK))
            self._locks.append(hold_folder(folder, f"lock-{shard}-of-{shards}", wait=worker))
            self._check_manifest(dict(fingerprint), overwrite)
        except BaseException:
            self.close()
            raise
        if worker:  # held only while the first of them writes the manifest
            self.close()

    def _check_manifest(self, fingerprint: dict[str, str], overwrite: bool) -> None:
        path = self.folder / _MANIFEST
        known = {"fingerprint": fingerprint, "shards": self._shards}
        before = _read_json(path)
        if before is not None and before != known and not overwrite:
            differences = changed(before.get("fingerprint", {}), fingerprint)
            if before.get("shards") != self._shards:
                differences.append(f"shards ({before.get('shards')} before, {self._shards} now)")
            raise ConfigError(
                f"{self.folder} holds parts of another run; changed since: {', '.join(differences)}. "
                "Give --overwrite to begin anew"
            )
        if before != known or overwrite:
            # Without a manifest nothing vouches for the parts that lie here.
            for stale in self.folder.iterdir():
                if not stale.name.startswith(("lock-", "claim-")):
                    stale.unlink()
            _write_json(path, known)

    def agree(self, name: str, value: Any) -> Any:
        """What the first process of this run gave under `name`: all others, and later ones, get the same back."""
        path = self.folder / f"agreed-{name}.json"
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        draft.write_text(json.dumps(value))
        with suppress(FileExistsError):
            os.link(draft, path)  # unlike a rename, it never replaces
        draft.unlink()
        return json.loads(path.read_text())

    def mine(self, window: int) -> bool:
        """Whether this shard scores that window."""
        return window % self._shards == self._shard

    @contextmanager
    def claim(self, window: int) -> Iterator[bool]:
        """Whether this process may score `window` now. Workers lock a file each, which dies with its process."""
        if not self._worker:
            yield True
            return
        with (self.folder / f"claim-{window:08}").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True

    def has(self, window: int) -> bool:
        """Whether the part of a window is finished."""
        return self._path(window).exists()

    def open_part(self, window: int) -> AtomicFile:
        """A file for the part of `window`. Its first line must be the header, see `header`."""
        return AtomicFile(self._path(window))

    def header(self, window: int) -> dict[str, Any]:
        """What was counted for a finished part."""
        with self._path(window).open("rb") as file:
            return json.loads(file.readline())

    def end(self, windows: int) -> None:
        """Notes that the input has `windows` windows and that this shard has finished its own."""
        _write_json(self.folder / f"end-{self._shard}-of-{self._shards}.json", {"windows": windows})

    def finished(self) -> int:
        """Parts that are there, of any shard."""
        return sum(_PART.fullmatch(p.name) is not None for p in self.folder.iterdir())

    def discard(self) -> None:
        """Removes the folder, once its lines stand elsewhere."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Lets go of the locks."""
        for lock in self._locks:
            lock.close()

    def __enter__(self) -> PartStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _path(self, window: int) -> Path:
        return self.folder / f"part-{window:08}.jsonl"


def hold_folder(folder: Path, name: str, *, wait: bool = False) -> BinaryIO:
    """Locks `folder` under `name` for as long as the returned file stays open or its process lives.

    Raises `ConfigError` if another process holds it, unless `wait`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / name).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        file.close()
        raise ConfigError(f"{folder} is in use by another run of the same output ({name})") from None
    return file


def part_headers(folder: Path) -> Iterator[dict[str, Any]]:
    """What was counted for each finished part, in order."""
    for path in sorted(p for p in folder.iterdir() if _PART.fullmatch(p.name)):
        with path.open("rb") as file:
            yield json.loads(file.readline())


def merge_lines(folder: Path) -> Iterator[bytes]:
    """The lines of all shards in the order of the input. Raises `ConfigError` naming what is missing."""
    if not (folder / _MANIFEST).is_file():
        raise ConfigError(f"{folder} has no {_MANIFEST}; is it the --output folder of a sharded run?")
    manifest = _read_json(folder / _MANIFEST) or {}
    shards = int(manifest.get("shards", 1))
    ends = {int(m[1]): _read_json(folder / m[0]) for p in folder.iterdir() if (m := _END.fullmatch(p.name))}
    missing = [str(i) for i in range(shards) if i not in ends]
    if missing:
        raise ConfigError(f"{folder}: shards {', '.join(missing)} of {shards} have not finished")
    windows = {end["windows"] for end in ends.values() if end}
    if len(windows) != 1:
        raise ConfigError(f"{folder}: the shards disagree about the length of the input ({sorted(windows)} windows)")
    count = windows.pop()
    held = {int(m[1]) for p in folder.iterdir() if (m := _PART.fullmatch(p.name))}
    absent = sorted(set(range(count)) - held)
    if absent:
        raise ConfigError(f"{folder}: part {absent[0]} of {count} is missing")
    return _all_lines(folder, count)


def _all_lines(folder: Path, count: int) -> Iterator[bytes]:
    for window in range(count):
        with (folder / f"part-{window:08}.jsonl").open("rb") as file:
            file.readline()
            yield from file


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with AtomicFile(path) as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")


def parse_shard(text: str | None, environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The shard I of N, counted from 0, that "I/N" names; None for None.

    "auto" takes RANK and WORLD_SIZE (torchrun), or SLURM_PROCID and SLURM_NTASKS, from the environment. Raises
    `ConfigError` for what is neither.
    """
    if text is None:
        return None
    if text == "auto":
        for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
            if rank in environment and size in environment:
                text = f"{environment[rank]}/{environment[size]}"
                break
        else:
            raise ConfigError("--shard auto: neither RANK and WORLD_SIZE nor SLURM_PROCID and SLURM_NTASKS are set")
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--shard {text!r} is not I/N with 0 ≤ I < N, for example 0/4")
    return int(match[1]), int(match[2])
