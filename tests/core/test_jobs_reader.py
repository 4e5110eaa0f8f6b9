"""Input files: line ends, marks, blank lines, and files that are refused before any work."""

import gzip
import io
import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelora.errors import InputError
from moelora.jobs.reader import LineReader
from moelora.jobs.rows import read_rows


def read(path: Path) -> list[tuple[int, bytes]]:
    with LineReader(path) as lines:
        return list(lines)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def test_line_ends_blank_lines_and_a_missing_last_end(file: Path):
    file.write_bytes(b'\n  \r\n{"a":1}\r\n\n{"b":2}\n\t\n{"c":3}')
    assert read(file) == [(3, b'{"a":1}'), (5, b'{"b":2}'), (7, b'{"c":3}')]


def test_a_byte_order_mark_is_skipped(file: Path):
    file.write_bytes(b"\xef\xbb\xbfx\ny\n")
    assert read(file) == [(1, b"x"), (2, b"y")]
    file.write_bytes(b"\xef\xbb\xbf\nx\n")
    assert read(file) == [(2, b"x")]


def test_only_line_feeds_end_lines(file: Path):
    line = '{"prompt": "a\u2028b\u2029c\x85d\x0be\rf"}'.encode()
    file.write_bytes(line + b"\n" + line + b"\r\n")
    assert read(file) == [(1, line), (2, line)]


def test_what_was_read_of_the_file_is_known_to_the_byte(file: Path):
    file.write_bytes(b'\xef\xbb\xbf\n{"prompt": "a"}\r\n\n  \n{"prompt": "caf\xc3\xa9"}\n{\n{"prompt": "b"}')
    with LineReader(file) as lines:
        assert lines.total == file.stat().st_size
        assert [row.size for row in read_rows(lines)] == [4 + 17, 1 + 3 + 20, 2, 15]
        assert lines.position == lines.total


def test_of_a_stream_nobody_knows_how_much_there_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}\n")))
    with LineReader("-") as lines:
        assert lines.total is None


def test_a_bad_byte_is_left_to_its_row(file: Path):
    file.write_bytes(b"a\nb\ncaf\xe9\nd\n")
    assert read(file)[2] == (3, b"caf\xe9")


def test_the_environment_says_nothing_about_the_encoding(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    file.write_bytes("ü\n".encode())
    assert read(file) == [(1, "ü".encode())]


@pytest.mark.parametrize("content", [b"", b"\n\n  \n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_an_input_without_rows_is_refused(file: Path, content: bytes):
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"in\.jsonl is empty"):
        LineReader(file)


def test_what_is_no_readable_file_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="does not exist"):
        LineReader(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="is a directory"):
        LineReader(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        LineReader("a\0b")


@pytest.mark.parametrize("name", ["x.arrow", "x.jsonl.gz", "x.CSV", "x.jsonl.zst", "x.zip"])
def test_other_formats_are_refused_by_name(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(InputError, match="accepted is JSON Lines"):
        LineReader(tmp_path / name)


TEXT = b"# notes\n" + b"a line of prose\n" * 500
ROWS = b'{"prompt": "a"}\n{"prompt": "b"}\n'


@pytest.mark.parametrize("name", ["README.md", "notes.txt", "rows.json", "rows", "rows.jsonl.bak"])
def test_other_names_need_a_row_in_the_first_line(tmp_path: Path, name: str):
    path = tmp_path / name
    for content in (TEXT, b'{\n  "prompt": "one object over lines"\n}\n', b"\n\nx\n", b"3\n"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"not named \.jsonl or \.ndjson.*accepted is JSON Lines"):
            LineReader(path)
    path.write_bytes(b"\xef\xbb\xbf\n" + ROWS + b"only this row is bad\n")
    assert [row.error is None for row in read_rows(LineReader(path))] == [True, True, False]


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson", "x.JSONL"])
def test_a_bad_first_line_of_a_file_named_so_costs_its_row(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"{\n" + ROWS)
    with LineReader(tmp_path / name) as lines:
        assert [row.error is None for row in read_rows(lines)] == [False, True, True]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_of_a_pipe_a_bad_first_line_costs_its_row(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.txt")
    writer = threading.Thread(target=(tmp_path / "pipe.txt").write_bytes, args=(b"x\n" + ROWS,))
    writer.start()
    with LineReader(tmp_path / "pipe.txt") as lines:
        assert [row.error is None for row in read_rows(lines)] == [False, True, True]
    writer.join()


def test_a_link_is_named_as_what_it_leads_to(tmp_path: Path):
    """As /dev/stdin is, where a shell has put a file there."""
    (tmp_path / "rows.jsonl").write_bytes(b"{\n" + ROWS)
    (tmp_path / "stdin").symlink_to(tmp_path / "rows.jsonl")
    assert len(read(tmp_path / "stdin")) == 3


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (gzip.compress(b"{}\n", mtime=0), "gzip"),
        (b'[\n  {"prompt": "a"}\n]\n', "one JSON array"),
        (b'\n [{"prompt": "a"}]\n', "one JSON array"),
        (b"PAR1....", "Parquet"),
        ('{"prompt": "x"}\n'.encode("utf-16"), "UTF-16"),
        (b"PK\x03\x04..", "archive"),
    ],
)
def test_other_formats_are_refused_by_content(file: Path, content: bytes, kind: str):
    file.write_bytes(content)
    with pytest.raises(InputError, match=kind):
        LineReader(file)


def test_standard_input_is_read_as_bytes_and_left_open(monkeypatch: pytest.MonkeyPatch):
    stream = io.TextIOWrapper(io.BytesIO(b'\xef\xbb\xbf{"a":1}\r\n'), encoding="cp1252")
    monkeypatch.setattr(sys, "stdin", stream)
    with LineReader("-") as lines:
        assert list(lines) == [(1, b'{"a":1}')]
    assert not stream.buffer.closed


def test_lines_are_read_as_they_are_wanted(file: Path):
    file.write_bytes(b"a\nb\n" + b"c\n" * 100_000)
    with LineReader(file) as lines:
        assert next(iter(lines)) == (1, b"a")
        assert lines._file.tell() < 200_000


@given(st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=8))
def test_every_line_keeps_its_number_and_bytes(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(b"x\n" + b"\n".join(lines) + b"\n")
    wanted = [(n, line.removesuffix(b"\r")) for n, line in enumerate(lines, 2) if line.strip()]
    assert read(path)[1:] == wanted
