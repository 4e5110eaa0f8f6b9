"""Output files that appear whole or not at all, and rows as JSON that every reader accepts."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, BinaryIO, Protocol

from moelora.errors import ConfigError, named
from moelora.jobs.parquet import ENDING, ParquetSink, require_pyarrow

_REFUSED_ENDINGS = (".arrow", ".csv", ".tsv", ".gz", ".bz2", ".xz", ".zst", ".zip")
# Characters that JSON allows inside strings but that naive readers take for the end of a line.
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False)


class RowSink(Protocol):
    """Where finished lines go. Leaving its context cleanly finishes the output; leaving it by an error discards it."""

    def write(self, line: bytes) -> None:
        """Takes one line, with its end."""
        ...

    def __enter__(self) -> RowSink: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None: ...


class AtomicFile:
    """A file that is written beside its final place and moved there when its context is left without an error.

    Missing folders are made. A symbolic link keeps pointing where it did; the file behind it is replaced.

    lasting: whether it outlives a power cut from then on, for which the disk is waited for. on_whole: is given the
    whole file before it is moved.
    """

    def __init__(
        self, path: str | Path, *, lasting: bool = True, on_whole: Callable[[Path], None] | None = None
    ) -> None:
        self._final = Path(os.path.realpath(path))
        self._lasting = lasting
        self._on_whole = on_whole

    def __enter__(self) -> AtomicFile:
        self._final.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = self._final.with_name(_draft_name(self._final.name, secrets.token_hex(4)))
        try:
            self._file = self._temporary.open("xb")
        except BaseException:  # Ctrl-C may come when the file is there and this context not yet entered
            self._temporary.unlink(missing_ok=True)
            raise
        return self

    def write(self, line: bytes) -> None:
        """Takes one line, with its end."""
        try:
            self._file.write(line)
        except OSError as error:
            raise named(error, self._final) from error

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                with _named(self._final):
                    self._file.flush()
                    if self._lasting:
                        os.fsync(self._file.fileno())
                    self._file.close()
                if self._on_whole is not None:
                    self._on_whole(self._temporary)
                os.replace(self._temporary, self._final)
                if self._lasting:
                    _sync_folder(self._final.parent)
        finally:
            with suppress(OSError):  # tries once more to write what is left
                self._file.close()
            self._temporary.unlink(missing_ok=True)


class StreamSink:
    """Standard output, a pipe or a device: each line goes out at once. name: what errors call it."""

    def __init__(self, stream: BinaryIO, *, name: str = "standard output", owned: bool = False) -> None:
        self._stream = stream
        self._name = name
        self._owned = owned

    def __enter__(self) -> StreamSink:
        return self

    def write(self, line: bytes) -> None:
        """Takes one line, with its end."""
        with _named(self._name):
            self._stream.write(line)
            self._stream.flush()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._owned:
            with _named(self._name):  # what could not be written is tried once more
                self._stream.close()


class Discard:
    """Takes lines and keeps none."""

    def write(self, line: bytes) -> None:
        """Takes one line."""

    def __enter__(self) -> Discard:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        pass


def check_output(path: str | Path, *, overwrite: bool, what: str = "--output") -> None:
    """Raises `ConfigError` if nothing could be written to `path`; leaves nothing there. "-" is standard output."""
    if str(path) == "-":
        return
    target = Path(os.path.realpath(path))
    _check_names(target, f"{what} {path}")
    if target.suffix.lower() in _REFUSED_ENDINGS:
        raise ConfigError(
            f"{what} {path}: JSON Lines (.jsonl) and Parquet (.parquet) can be written, or - for standard output"
        )
    if target.suffix.lower() == ENDING:
        if what != "--output":
            raise ConfigError(f"{what} {path}: only rows can be Parquet")
        require_pyarrow(f"{what} {path}")
    if target.is_dir() or str(path).endswith(os.sep):
        raise ConfigError(f"{what} {path} is a directory; give the name of a file in it")
    if target.is_file() and not overwrite:
        raise ConfigError(f"{what} {path} exists; give another name, or --overwrite to replace it")
    folder = next(parent for parent in target.parents if parent.exists())
    if not folder.is_dir():
        raise ConfigError(f"{what} {path}: {folder} is not a directory")
    if not target.exists() or target.is_file():
        _check_writable(folder, f"{what} {path}")


def missing_folder(path: str | Path) -> Path | None:
    """The folder of an output where it is not there and will be made; None where it is. "-" has none."""
    if str(path) == "-":
        return None
    folders = Path(path).parent, Path(os.path.realpath(path)).parent
    return next((folder for folder in folders if not folder.exists()), None)


def check_folder(path: str | Path) -> None:
    """Raises `ConfigError` if no folder can be made or written at `path`, the `--output` of a shard."""
    target = Path(os.path.realpath(path))
    _check_names(target, f"--output {path}")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"--output {path} is a file; the shards of a run need a folder")
    folder = target if target.exists() else next(parent for parent in target.parents if parent.exists())
    if not folder.is_dir():
        raise ConfigError(f"--output {path}: {folder} is not a directory")
    _check_writable(folder, f"--output {path}")


def _check_names(target: Path, what: str) -> None:
    """Raises `ConfigError` if a name in `target` is longer than the file system takes.

    The name of its draft is the longest that is made for a file.
    """
    there = next((parent for parent in target.parents if os.path.exists(parent)), target)
    names = [*target.relative_to(there).parts]
    if not names:
        return
    most = os.pathconf(there, "PC_NAME_MAX")
    for name, added in zip(names, [0] * (len(names) - 1) + [len(_draft_name("", "0" * 8))], strict=True):
        length = len(os.fsencode(name))
        if 0 < most < length + added:
            shown = name if len(name) <= 60 else name[:59] + "…"
            raise ConfigError(f"{what}: the name {shown!r} has {length} bytes; it can have {most - added} there")


def _draft_name(name: str, key: str) -> str:
    return f".{name}.{key}.tmp"


def _check_writable(folder: Path, what: str) -> None:
    """Raises `ConfigError` if nothing can be made in `folder`: found by making a folder in it, which goes again.

    Its permissions do not tell: root may write everywhere, but not into /proc or a disk that is mounted read-only.
    """
    try:
        with TemporaryDirectory(prefix=".moelora-", dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{what}: the folder {folder} is not writable ({error.strerror})") from None


def open_output(
    path: str | Path, stdout: BinaryIO | None, *, on_whole: Callable[[Path], None] | None = None
) -> RowSink:
    """The sink for rows: `stdout` for "-", a stream for a pipe or device, else an atomic file by its ending.

    stdout: may be None where `path` is not "-". on_whole: as of `AtomicFile`, for what is a file.
    """
    if str(path) == "-":
        assert stdout is not None
        return StreamSink(stdout)
    if Path(path).exists() and not Path(path).is_file():
        return StreamSink(Path(path).open("wb"), name=str(path), owned=True)
    if str(path).lower().endswith(ENDING):
        return ParquetSink(path, on_whole=on_whole)
    return AtomicFile(path, on_whole=on_whole)


def clear_drafts(path: str | Path) -> None:
    """Removes what killed processes left of `path` before it was whole; for one that alone writes it."""
    final = Path(os.path.realpath(path))
    draft = re.compile(rf"\.{re.escape(final.name)}\.[0-9a-f]{{8}}\.tmp")
    if not final.parent.is_dir():  # behind a link, and made when the file is
        return
    for other in final.parent.iterdir():
        if draft.fullmatch(other.name):
            other.unlink(missing_ok=True)


def write_whole(path: str | Path, data: bytes) -> None:
    """Writes `data` to `path` in one step."""
    stream = Path(path).exists() and not Path(path).is_file()
    with StreamSink(Path(path).open("wb"), name=str(path), owned=True) if stream else AtomicFile(path) as sink:
        sink.write(data)


def finite_row(row: dict[str, Any], *, where: str = "") -> dict[str, Any]:
    """`row` with null for each number that is not finite; these are named in its `error`. `metadata` is left alone.

    where: what the error begins with if the row has none yet.
    """
    bad: list[str] = []
    clean = {key: value if key == "metadata" else _finite(value, key, bad) for key, value in row.items()}
    if bad:
        shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        before = f"{clean['error']}; " if clean.get("error") else where
        clean["error"] = f"{before}not finite: {shown}"
    return clean


def encode_row(row: dict[str, Any]) -> bytes:
    """One line of JSON in UTF-8, with its end. Raises `ValueError` for a number that is not finite."""
    text = _ENCODER.encode(row)
    if not text.isascii():
        for character, escaped in _LINE_ENDS.items():
            text = text.replace(character, escaped)
    return text.encode("utf-8") + b"\n"


def _finite(value: Any, where: str, bad: list[str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(where)
        return None
    if isinstance(value, list | tuple):
        return [_finite(item, f"{where}[{index}]", bad) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: _finite(item, f"{where}.{key}", bad) for key, item in value.items()}
    return value


@contextmanager
def _named(name: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise named(error, name) from error


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
