"""Input files as numbered lines of bytes. What a line means is the business of `rows`."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from moelora.errors import InputError, RequestError
from moelora.jobs.parquet import ENDING, ParquetReader
from moelora.jobs.rows import load_object

ACCEPTED = "JSON Lines: UTF-8 text with one JSON object per line (.jsonl), Parquet (.parquet), or - for standard input"
_LINES_ENDINGS = (".jsonl", ".ndjson")
_REFUSED_ENDINGS = {
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".csv": "comma-separated text",
    ".tsv": "tab-separated text",
    ".gz": "compressed (gzip)",
    ".bz2": "compressed (bzip2)",
    ".xz": "compressed (xz)",
    ".zst": "compressed (Zstandard)",
    ".zip": "an archive",
    ".tar": "an archive",
}
_MAGIC = {
    b"\x1f\x8b": "compressed (gzip)",
    b"BZh": "compressed (bzip2)",
    b"\xfd7zXZ\x00": "compressed (xz)",
    b"\x28\xb5\x2f\xfd": "compressed (Zstandard)",
    b"PK\x03\x04": "an archive",
    b"PAR1": "Parquet",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}


def open_rows(source: str | Path) -> LineReader | ParquetReader:
    """The reader for `source`, by its ending; "-" is standard input as JSON Lines."""
    return ParquetReader(source) if str(source).lower().endswith(ENDING) else LineReader(source)


class LineReader:
    """Reads one input, once, from front to back.

    Opening it reads up to the first line that is not blank, so that an input that cannot be used is refused before
    anything expensive starts. Iterating gives `(line number from 1, bytes without the line end)`, blank lines left out.
    Lines end at LF alone: U+2028 and a lone CR inside a string stay where they are. A CR before the LF is dropped.

    A file of any other ending than those of JSON Lines must have a JSON object as its first line: else each line of a
    text would be a row with an error. In a file of such an ending, and in a stream, a bad first line costs its row.

    total: bytes of the file, None for what can be read only once; position: how many of them lie up to the end of the
    line that was given last.

    `source` is a path, or "-" for standard input. Raises `InputError` if it is missing, no file, of another format, not
    readable or without a single row.
    """

    def __init__(self, source: str | Path) -> None:
        self.name = "standard input" if str(source) == "-" else str(source)
        self._owned = str(source) != "-"
        self._file = _open(source)
        self.total = _size(self._file) if self._owned else None
        self.position = 0
        try:
            head, self._first = self._skip_blank()
            for magic, kind in _MAGIC.items():
                if head.startswith(magic):
                    raise InputError(f"input {self.name} is {kind}; accepted is {ACCEPTED}")
            if self._first is None:
                raise InputError(f"input {self.name} is empty; accepted is {ACCEPTED}")
            if self._first[1].strip() == b"[" or self._first[1].lstrip().startswith(b"[{"):
                raise InputError(f"input {self.name} is one JSON array; accepted is {ACCEPTED}")
            if self.total is not None and not _is_named_lines(source):
                self._check_first(self._first[1])
        except BaseException:
            self.close()
            raise

    def _check_first(self, line: bytes) -> None:
        try:
            load_object(line)
        except RequestError as error:
            raise InputError(
                f"input {self.name} is not named .jsonl or .ndjson, and its first line is no row ({error}); "
                f"accepted is {ACCEPTED}"
            ) from None

    def _skip_blank(self) -> tuple[bytes, tuple[int, bytes] | None]:
        """The first bytes of the file, and the first line that is not blank."""
        head = b""
        self._lines = self._numbered()
        for number, raw in self._lines:
            head = head or raw[:8]
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if line.strip():
                return head, (number, line)
        return head, None

    def _numbered(self) -> Iterator[tuple[int, bytes]]:
        try:
            for number, raw in enumerate(self._file, 1):
                self.position += len(raw)
                yield number, raw.removesuffix(b"\n").removesuffix(b"\r")
        except OSError as error:
            raise InputError(f"input {self.name} cannot be read: {error.strerror or error}") from error

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        assert self._first is not None
        for number, line in chain([self._first], self._lines):
            if line.strip():
                yield number, line

    def close(self) -> None:
        """Closes the file; standard input is left open."""
        if self._owned:
            self._file.close()

    def __enter__(self) -> LineReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _is_named_lines(source: str | Path) -> bool:
    """Whether the name says JSON Lines, or that of the file that a link like /dev/stdin leads to."""
    return any(str(path).lower().endswith(_LINES_ENDINGS) for path in (source, os.path.realpath(source)))


def _size(file: BinaryIO) -> int | None:
    facts = os.fstat(file.fileno())
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


def _open(source: str | Path) -> BinaryIO:
    if str(source) == "-":
        if sys.stdin is None:
            raise InputError("standard input is closed")
        return sys.stdin.buffer
    path = Path(source)
    kind = _REFUSED_ENDINGS.get(path.suffix.lower())
    if kind is not None:
        raise InputError(f"input {path} is {kind}; accepted is {ACCEPTED}")
    if path.is_dir():
        raise InputError(f"input {path} is a directory; accepted is {ACCEPTED}")
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise InputError(f"input {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise InputError(f"input {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
