"""Parquet in and out says what JSON Lines says."""

import datetime
import decimal
import json

import pytest

pytest.importorskip("pyarrow", reason="Parquet is an extra")
import pyarrow as pa
from pyarrow import parquet

from fake_engine import FakeEngine
from moelora.errors import InputError
from moelora.jobs.parquet import ParquetReader
from moelora.jobs.reader import LineReader, open_rows
from moelora.jobs.rows import parse_rows
from moelora.jobs.run import JobOptions, PrefillJob
from moelora.jobs.text import TextEncoder
from moelora.jobs.writer import open_output

ROWS = [
    {"id": "a", "prompt_token_ids": [20, 21, 22], "metadata": {"kind": "x", "n": [1, 2]}},
    {"id": "b", "prompt_token_ids": [20], "adapter": "A"},
    {"id": "c", "prompt_token_ids": [20, 13]},
    {"id": "d", "prompt_token_ids": []},
    {"id": "e", "prompt_token_ids": [30, 31], "choices_token_ids": [[1, 2], [3]]},
]


def score(source, path):
    job = PrefillJob(
        FakeEngine(adapters={"A": "/a"}), TextEncoder(None), JobOptions(with_base=True, logprobs="tokens", top_k=2)
    )
    with open_rows(source) as lines, open_output(path, None) as sink:
        job.run(parse_rows(lines), sink)
    return job.stats


def test_both_formats_hold_the_same_rows(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    columns = {key: [row.get(key) for row in ROWS] for key in dict.fromkeys(k for row in ROWS for k in row)}
    parquet.write_table(pa.table(columns), tmp_path / "in.parquet")
    one = score(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    two = score(tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert one == two
    written = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(written) == len(lines)
    for row, line in zip(written, lines, strict=True):
        row["metadata"] = None if row["metadata"] is None else json.loads(row["metadata"])
        present = {key: row[key] for key in line}
        if present.get("choices"):
            present["choices"] = [{k: c[k] for k in d} for c, d in zip(row["choices"], line["choices"], strict=True)]
        assert present == line
        assert all(row[key] is None for key in row.keys() - line.keys())


def test_many_rows_pass_in_groups(tmp_path):
    count = 20_000
    table = pa.table(
        {"id": [str(i) for i in range(count)], "prompt_token_ids": [[20 + i % 900, 21] for i in range(count)]}
    )
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=3000)
    assert score(tmp_path / "in.parquet", tmp_path / "out.parquet").rows == count
    written = parquet.ParquetFile(tmp_path / "out.parquet")
    assert written.metadata.num_rows == 2 * count
    assert written.metadata.num_row_groups == 5


def test_nothing_is_left_of_a_failed_output(tmp_path):
    with pytest.raises(RuntimeError), open_output(tmp_path / "out.parquet", None):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"PAR1 but no more", b'{"prompt": "x"}\n'])
def test_what_is_no_parquet_is_refused(tmp_path, content):
    (tmp_path / "in.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"in\.parquet is no readable Parquet file"):
        ParquetReader(tmp_path / "in.parquet")


def test_empty_missing_and_unspeakable(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        ParquetReader(tmp_path / "none.parquet")
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(InputError, match="has no rows"):
        ParquetReader(tmp_path / "empty.parquet")
    nested = pa.table({"prompt": ["a"], "metadata": [{"raw": b"\x00"}]})
    parquet.write_table(nested, tmp_path / "bytes.parquet")
    with pytest.raises(InputError, match="column 'metadata' of row 1"):
        list(ParquetReader(tmp_path / "bytes.parquet"))
    (tmp_path / "in.jsonl").write_bytes(b"PAR1 in disguise")
    with pytest.raises(InputError, match="Parquet"):
        LineReader(tmp_path / "in.jsonl")


@pytest.mark.parametrize("value", [b"\x00", datetime.date(2020, 1, 1), decimal.Decimal("1.5")])
def test_columns_that_json_does_not_have_are_refused_before_any_work(tmp_path, value):
    parquet.write_table(pa.table({"prompt": ["a", "b"], "metadata": [None, value]}), tmp_path / "in.parquet")
    with pytest.raises(InputError, match=r"column 'metadata' is of type .*, which JSON does not have"):
        ParquetReader(tmp_path / "in.parquet")


def test_two_columns_of_one_name_are_refused(tmp_path):
    parquet.write_table(pa.table([["a"], ["b"]], names=["prompt", "prompt"]), tmp_path / "in.parquet")
    with pytest.raises(InputError, match="column 'prompt' stands there 2 times"):
        ParquetReader(tmp_path / "in.parquet")
