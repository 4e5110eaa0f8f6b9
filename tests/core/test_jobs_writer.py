"""Outputs appear whole or not at all, and every line is JSON that any reader takes."""

import json
import math
import os
import resource
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelora.errors import ConfigError
from moelora.jobs.writer import (
    check_output,
    clear_drafts,
    encode_row,
    finite_row,
    missing_folder,
    open_output,
    write_whole,
)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_appears_when_it_is_finished(tmp_path: Path):
    path = tmp_path / "a" / "b" / "out.jsonl"
    with open_output(path, BytesIO()) as sink:
        sink.write(b"1\n")
        assert not path.exists()
    assert path.read_bytes() == b"1\n"
    assert names(path.parent) == ["out.jsonl"]


def test_a_failure_leaves_neither_a_new_file_nor_a_changed_one(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"old\n")

    def write_and_stop(stop: type[BaseException]) -> None:
        with open_output(path, BytesIO()) as sink:
            sink.write(b"new\n")
            raise stop

    for stop in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(stop):
            write_and_stop(stop)
    assert path.read_bytes() == b"old\n"
    assert names(tmp_path) == ["out.jsonl"]


@pytest.mark.parametrize("lines", [1, 100], ids=["at the end", "on the way"])
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_disk_that_takes_no_more_is_told_with_the_file(tmp_path: Path, name: str, lines: int, monkeypatch):
    """A limit on the size of files, in place of a full disk: it fails in the same calls."""
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
        monkeypatch.setattr("moelora.jobs.parquet._GROUP_ROWS", 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    row = {"id": "x" * 5000, "metadata": None, "error": os.urandom(2000).hex()}

    def write_too_much() -> None:
        with open_output(tmp_path / name, BytesIO()) as sink:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
            for _ in range(lines):
                sink.write(encode_row(row))

    try:
        with pytest.raises(OSError, match=rf"File too large: '{tmp_path}/{name}'"):
            write_too_much()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "maker"), [("a.jsonl", "pathlib.Path.open"), ("a.parquet", "pyarrow.parquet.ParquetWriter")]
)
def test_an_interrupt_while_a_file_is_made_leaves_none(tmp_path: Path, name: str, maker: str, monkeypatch):
    def interrupted(path: Path, *_: Any, **__: Any) -> None:
        path.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(maker, interrupted)
    with pytest.raises(KeyboardInterrupt), open_output(tmp_path / name, BytesIO()):
        pass
    assert names(tmp_path) == []


def test_what_killed_processes_left_of_a_file_is_found_by_its_name(tmp_path: Path):
    others = [
        ".out.jsonl.0123abcd.tmp.bak",
        ".out.jsonl.0123.tmp",
        ".x-out.jsonl.0123abcd.tmp",
        ".outsjsonl.0123abcd.tmp",
    ]
    for name in (".out.jsonl.0123abcd.tmp", ".out.jsonl.ffffffff.tmp", "out.jsonl", *others):
        (tmp_path / name).write_bytes(b"")
    clear_drafts(tmp_path / "out.jsonl")
    assert names(tmp_path) == sorted(["out.jsonl", *others])


def test_the_file_has_the_permissions_of_any_new_file(tmp_path: Path):
    (tmp_path / "reference").write_bytes(b"")
    write_whole(tmp_path / "out", b"x")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "reference").stat().st_mode


def test_a_symbolic_link_stays_one(tmp_path: Path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_symbolic_link_may_lead_into_a_folder_that_is_not_there(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "new" / "deep" / "real")
    check_output(tmp_path / "link", overwrite=False)
    assert missing_folder(tmp_path / "link") == tmp_path / "new" / "deep"
    clear_drafts(tmp_path / "link")
    write_whole(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "new" / "deep" / "real").read_bytes() == b"x"
    assert missing_folder(tmp_path / "link") is None


def test_devices_and_standard_output_are_streams(tmp_path: Path):
    write_whole("/dev/null", b"x")
    assert not Path("/dev/null").is_file()
    stream = BytesIO()
    with open_output("-", stream) as sink:
        sink.write(b"1\n")
        assert stream.getvalue() == b"1\n"
    assert not stream.closed


def test_outputs_that_cannot_be_are_refused_without_a_trace(tmp_path: Path):
    (tmp_path / "out.jsonl").write_bytes(b"old")
    for path, message in [
        (tmp_path / "out.jsonl", "exists; give another name, or --overwrite"),
        (tmp_path, "is a directory"),
        (f"{tmp_path}/new/", "is a directory"),
        (tmp_path / "out.jsonl" / "x.jsonl", "is not a directory"),
        (tmp_path / "x.arrow", "JSON Lines"),
        (tmp_path / "x.jsonl.gz", "JSON Lines"),
        (tmp_path / ("ü" * 120 + ".jsonl"), r"'üü[^']*…' has 246 bytes; it can have 241 there"),
        (tmp_path / "new" / ("x" * 300) / "x.jsonl", r"'xx[^']*…' has 300 bytes; it can have 255 there"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_output(path, overwrite=False)
    check_output(tmp_path / "out.jsonl", overwrite=True)
    check_output(tmp_path / "new" / "x.jsonl", overwrite=False)
    check_output("-", overwrite=False)
    check_output("/dev/null", overwrite=False)
    assert names(tmp_path) == ["out.jsonl"]


def test_the_longest_name_that_is_not_refused_can_be_written(tmp_path: Path):
    path = tmp_path / ("x" * 235 + ".jsonl")
    check_output(path, overwrite=False)
    write_whole(path, b"x")
    with pytest.raises(ConfigError, match="has 242 bytes; it can have 241"):
        check_output(tmp_path / f"x{path.name}", overwrite=False)
    with pytest.raises(OSError, match="File name too long"):
        write_whole(tmp_path / f"x{path.name}", b"x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_access_is_refused(tmp_path: Path):
    tmp_path.chmod(0o555)
    with pytest.raises(ConfigError, match="not writable"):
        check_output(tmp_path / "x.jsonl", overwrite=False)


def test_numbers_that_are_not_finite_become_null_and_are_named():
    row = {"a": math.nan, "b": [1.0, -math.inf], "c": {"d": math.inf}, "e": 1, "metadata": None, "error": None}
    clean = finite_row(row, where="line 3: ")
    assert clean == {
        "a": None,
        "b": [1.0, None],
        "c": {"d": None},
        "e": 1,
        "metadata": None,
        "error": "line 3: not finite: a, b[1], c.d",
    }
    assert finite_row({"a": math.nan, "error": "bad"})["error"] == "bad; not finite: a"
    many = finite_row({"x": [math.nan] * 9, "error": None})["error"]
    assert many == "not finite: x[0], x[1], x[2], x[3], x[4] and 4 more"


def test_no_line_end_hides_in_a_line():
    text = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1ee\r\nf"
    line = encode_row({"metadata": {text: text}})
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {"metadata": {text: text}}


texts = st.text('aü\u2028\x85\n"\\', max_size=3)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from("abc"), json_values))
def test_every_row_is_one_line_of_strict_json(row: dict[str, Any]):
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    line = encode_row(finite_row({**row, "error": None})).decode("utf-8")
    assert len(line.splitlines()) == 1
    json.loads(line, parse_constant=refuse)
