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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from moelora.errors import ConfigError
from moelora.jobs.fingerprint import changed
from moelora.jobs.part_file import DamagedPartError, part_lines, part_name, read_stats, run_name, write_part
from moelora.jobs.stats import JobStats
from moelora.jobs.writer import AtomicFile
from moelora.wording import counted

RUN_LOCK = "lock-run"
"""Held by whoever runs the whole of an output, alone or with workers; shards hold one lock each."""

_MANIFEST = "manifest.json"
_MANIFEST_LOCK = "lock-manifest"
"""Held for a moment by whoever reads or writes the manifest."""
_WHOLE = "whole.json"
"""What tells the output that was made of the parts, and what was counted for it; written just before it appears."""
_PART = re.compile(r"part-(\d{8})\.jsonl")
_OWN = re.compile(
    r"\.?(part-\d{8}\.jsonl|manifest\.json|whole\.json|agreed-[a-z-]+\.json|end-\d+-of-\d+\.json)(\.[0-9a-f]{8}\.tmp)?"
)
_LOCKED = re.compile(r"lock-run|lock-manifest|lock-\d+-of-\d+|claim-\d{8}")
_END = re.compile(r"end-(\d+)-of-(\d+)\.json")


class PartStore:
    """The parts of one run in `folder`, held by one process per shard at a time.

    `worker`: one of several processes of one run, which share the folder and claim window by window.

    Made, and asked to `check`, before anything costly; `begin` then says what the run is, and the parts can be used.
    Leaving its context removes a folder in which nothing was finished. Raises `ConfigError` if another process holds
    this shard.
    """

    def __init__(
        self,
        folder: Path,
        *,
        shard: int = 0,
        shards: int = 1,
        overwrite: bool = False,
        worker: bool = False,
    ) -> None:
        self.folder = folder
        self._shard = shard
        self._shards = shards
        self._overwrite = overwrite
        self._worker = worker
        self._sound: set[int] = set()
        self._run = ""
        self._has_begun = False
        self._locks: list[BinaryIO] = []
        _make(folder)
        if not worker:  # whoever started the workers holds the folder
            self._locks.append(hold_folder(folder, RUN_LOCK if shards == 1 else f"lock-{shard}-of-{shards}"))

    def check(self, fingerprint: Mapping[str, str]) -> None:
        """Raises `ConfigError`, naming what changed, if the parts here are of a run that differs in any of these facts.

        Facts that are not known yet may be left out. With `overwrite` nothing is wrong. A run that was killed before
        it had finished anything is forgotten: there is nothing to keep.
        """
        with hold_folder(self.folder, _MANIFEST_LOCK, wait=True):
            before = _read_json(self.folder / _MANIFEST)
            if before is None or self._overwrite:
                return
            known = before.get("fingerprint", {})
            gone = {name: value for name, value in known.items() if name in fingerprint or name.startswith("adapter ")}
            self._refuse(before, changed(gone, fingerprint))

    def begin(self, fingerprint: Mapping[str, str]) -> None:
        """Makes the folder that of the run with this fingerprint.

        Parts of a run with another one are removed, if `overwrite` is set, and so are then this shard's own, and all
        that was agreed on if there are no other shards. Raises `ConfigError` without it, or while other shards of that
        run are at work.
        """
        known = {"fingerprint": dict(fingerprint), "shards": self._shards}
        self._run = run_name(known)
        with hold_folder(self.folder, _MANIFEST_LOCK, wait=True):
            before = _read_json(self.folder / _MANIFEST)
            if before is not None and not self._overwrite:
                self._refuse(before, changed(before.get("fingerprint", {}), fingerprint))
            anew = self._overwrite and not self._worker
            if before != known or (anew and self._shards == 1):
                self._refuse_other_shards()
                clear_parts(self.folder)  # without a manifest nothing vouches for the parts that lie here
                _write_json(self.folder / _MANIFEST, known)
            elif anew:
                for part in self.folder.iterdir():
                    match = _PART.fullmatch(part.name)
                    if match is not None and self.mine(int(match[1])):
                        part.unlink()
        self._has_begun = True

    def _refuse(self, before: dict[str, Any], differences: list[str]) -> None:
        if before.get("shards") != self._shards:
            differences = [*differences, f"shards ({before.get('shards')} before, {self._shards} now)"]
        if differences and not self._forget():
            raise ConfigError(
                f"{self.folder} holds parts of another run; changed since: {', '.join(differences)}. "
                "Give --overwrite to begin anew"
            )

    def _forget(self) -> bool:
        """Removes what is here of a run that has finished nothing and that nobody is at work on; False if it has."""
        if self._worker or any(_PART.fullmatch(p.name) or _END.fullmatch(p.name) for p in self.folder.iterdir()):
            return False
        try:
            self._refuse_other_shards()
        except ConfigError:
            return False
        clear_parts(self.folder)
        return True

    def _refuse_other_shards(self) -> None:
        """Raises `ConfigError` if a shard is at work here whose parts would be taken from it."""
        own = {lock.name for lock in self._locks}
        for path in self.folder.glob("lock-*-of-*"):
            if str(path) not in own:
                hold_folder(self.folder, path.name).close()

    def agree(self, name: str, value: Any) -> Any:
        """What the first process of this run gave under `name`: all others, and later ones, get the same back.

        Raises `ConfigError` if what lies there is no JSON, as after a power cut.
        """
        path = self.folder / f"agreed-{name}.json"
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        draft.write_text(json.dumps(value))
        with suppress(FileExistsError):
            os.link(draft, path)  # unlike a rename, it never replaces
        draft.unlink()
        try:
            return json.loads(path.read_bytes())
        except ValueError:
            raise ConfigError(f"{path} is damaged. Give --overwrite to begin anew") from None

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
        """Whether the part of a window is finished, whole, and of this run. One that is not is removed."""
        path = self._path(window)
        if window in self._sound:
            return True
        try:
            run = self._run or run_name(_read_json(self.folder / _MANIFEST) or {})
            for _ in part_lines(path, run):
                pass
        except FileNotFoundError:
            return False
        except DamagedPartError:
            path.unlink(missing_ok=True)
            return False
        self._sound.add(window)
        return True

    def write_part(self, window: int, stats: JobStats, lines: Sequence[bytes]) -> None:
        """Writes the part of `window`: what was counted for it, and its output lines."""
        write_part(self._path(window), window, self._run, stats, lines)

    def stats(self, window: int) -> JobStats:
        """What was counted for a finished part."""
        return read_stats(self._path(window))

    def end(self, windows: int) -> None:
        """Notes that the input has `windows` windows and that this shard has finished its own."""
        _write_json(self.folder / f"end-{self._shard}-of-{self._shards}.json", {"windows": windows})

    def finished(self) -> int:
        """Parts of this shard that a run can go on with."""
        return len(self._windows())

    def finished_stats(self) -> JobStats:
        """What was counted for the parts of `finished` together. Those that are not whole are removed."""
        total = JobStats()
        for window in filter(self.has, self._windows()):
            total.add(self.stats(window))
        return total

    def discard(self) -> None:
        """Removes the folder, once its lines stand elsewhere: what `made_before` needs, last."""
        last = {self.folder / _MANIFEST, self.folder / _WHOLE}
        clear_parts(self.folder, keep=last)
        for path in self.folder.iterdir():
            if _LOCKED.fullmatch(path.name):
                path.unlink(missing_ok=True)
        for path in last:
            path.unlink(missing_ok=True)
        self.close()
        with suppress(OSError):  # something of somebody else's is in it
            self.folder.rmdir()

    def close(self) -> None:
        """Lets go of the locks."""
        for lock in self._locks:
            lock.close()

    def __enter__(self) -> PartStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._shards == 1 and not self._worker and self.folder.exists() and count_parts(self.folder) == 0:
            if not list(self.folder.glob("end-*")):  # a shard without a window of its own has finished none the less
                self.discard()
        elif self._shards > 1 and not self._has_begun:
            for lock in self._locks:
                Path(lock.name).unlink(missing_ok=True)
            with suppress(OSError):  # other shards may be about to begin here
                self.folder.rmdir()
        self.close()

    def _windows(self) -> list[int]:
        """The windows of this shard whose part is there, and vouched for by a manifest."""
        if not (self.folder / _MANIFEST).exists():
            return []
        found = (int(m[1]) for p in self.folder.iterdir() if (m := _PART.fullmatch(p.name)))
        return sorted(filter(self.mine, found))

    def _path(self, window: int) -> Path:
        return self.folder / part_name(window)


def hold_folder(folder: Path, name: str, *, wait: bool = False) -> BinaryIO:
    """Locks `folder` under `name` for as long as the returned file stays open or its process lives.

    Raises `ConfigError` if another process holds it, unless `wait`.
    """
    _make(folder)
    file = (folder / name).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        raise ConfigError(f"{folder} is in use by another run of the same output ({name})") from None
    except OSError as error:
        file.close()
        raise ConfigError(f"{folder}: this file system cannot lock files ({error.strerror}); use another") from None
    return file


def _make(folder: Path) -> None:
    """Makes a folder where there is none, also behind a symbolic link."""
    Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)


def clear_parts(folder: Path, keep: Collection[Path] = ()) -> None:
    """Removes what an earlier run left in `folder`. Files that processes lock stay, and all that is not ours."""
    for path in folder.iterdir():
        if _OWN.fullmatch(path.name) and path.is_file() and path not in keep:
            path.unlink(missing_ok=True)


def count_parts(folder: Path) -> int:
    """Finished parts, of any shard."""
    return sum(_PART.fullmatch(p.name) is not None for p in folder.iterdir())


def stats_of(folder: Path) -> JobStats:
    """What was counted for all finished parts together."""
    total = JobStats()
    for path in sorted(p for p in folder.iterdir() if _PART.fullmatch(p.name)):
        total.add(read_stats(path))
    return total


def note_whole(folder: Path, output: Path) -> None:
    """Notes that `output` was made of all parts in `folder`. It may be moved afterwards, but not changed."""
    _write_json(folder / _WHOLE, {"stamp": _stamp(output), "stats": stats_of(folder).to_json()})


def made_before(folder: Path, output: Path) -> JobStats | None:
    """What was counted for `output`, if it is the one that a run made of the parts in `folder` before it was killed."""
    noted = _read_json(folder / _WHOLE)
    if noted is None or not (folder / _MANIFEST).is_file() or not output.is_file():
        return None
    return JobStats.from_json(noted["stats"]) if noted["stamp"] == _stamp(output) else None


def _stamp(file: Path) -> list[int]:
    """What tells whether a file is as it was."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def shards_of(folder: Path) -> int:
    """How many shards the run in `folder` has; 1 for a run of one process, or of workers."""
    return int((_read_json(folder / _MANIFEST) or {}).get("shards", 1))


def merge_lines(folder: Path) -> Iterator[bytes]:
    """The lines of all shards in the order of the input. Raises `ConfigError` naming what is missing."""
    if not (folder / _MANIFEST).is_file():
        raise ConfigError(f"{folder} has no {_MANIFEST}; is it the --output folder of a sharded run?")
    manifest = _read_json(folder / _MANIFEST) or {}
    shards = shards_of(folder)
    ends = {int(m[1]): _read_json(folder / m[0]) for p in folder.iterdir() if (m := _END.fullmatch(p.name))}
    missing = [f"{i}/{shards}" for i in range(shards) if i not in ends]
    if missing and shards == 1:
        raise ConfigError(f"{folder}: the run is not finished; it has {counted(count_parts(folder), 'part')} so far")
    if missing:
        raise ConfigError(f"{folder}: {counted(len(missing), 'shard')} of {shards} not finished: {', '.join(missing)}")
    windows = {end["windows"] for end in ends.values() if end}
    if len(windows) != 1:
        raise ConfigError(f"{folder}: the shards disagree about the length of the input ({sorted(windows)} windows)")
    count = windows.pop()
    held = {int(m[1]) for p in folder.iterdir() if (m := _PART.fullmatch(p.name))}
    absent = sorted(set(range(count)) - held)
    if absent:
        raise ConfigError(f"{folder}: part {absent[0]} of {count} is missing")
    return _all_lines(folder, count, run_name(manifest))


def _all_lines(folder: Path, count: int, run: str) -> Iterator[bytes]:
    for window in range(count):
        yield from part_lines(folder / part_name(window), run)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with AtomicFile(path) as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")
