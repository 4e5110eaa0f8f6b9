"""Parquet in and out says what JSON Lines says."""

import datetime
import decimal
import json
import random
from itertools import pairwise

import pytest

pytest.importorskip("pyarrow", reason="Parquet is an extra")
import pyarrow as pa
import pyarrow.compute
from pyarrow import parquet

from fake_engine import FakeEngine
from moelora.errors import InputError
from moelora.jobs.parquet import ParquetReader, _table, _table_by_rows, output_schema
from moelora.jobs.reader import LineReader, open_rows
from moelora.jobs.rows import ROW_KEYS, parse_rows, read_rows
from moelora.jobs.run import JobOptions, PrefillJob
from moelora.jobs.text import TextEncoder
from moelora.jobs.writer import encode_row, open_output

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


METADATA = [
    {"kind": "x", "n": [1, 2.5, None, True], "text": 'a "quoted" é\u2028'},
    [{"a": {}}],
    "plain text",
    "",
    '{"looks": "like JSON"}',
    '"quoted"',
    "123",
    "null",
    123,
    0.1,
    True,
    None,
    10**30,
]


@pytest.mark.parametrize("encoded", [False, True], ids=["text", "dictionary"])
def test_metadata_of_an_output_are_the_same_as_an_input_however_often(tmp_path, encoded):
    """No layer of quotes per run: text in the column is JSON, as the output has it."""
    rows = [{"id": f"r{i}", "prompt_token_ids": [20 + i], "metadata": value} for i, value in enumerate(METADATA)]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = tmp_path / "0.jsonl"
    for turn in range(3):
        score(source, tmp_path / "out.parquet")
        written = parquet.read_table(tmp_path / "out.parquet").filter(pa.compute.field("adapter") == "A")
        told = written.column("metadata").to_pylist()
        assert [None if text is None else json.loads(text) for text in told] == METADATA
        metadata = written.column("metadata").combine_chunks()
        prompts = [[20 + i] for i in range(len(METADATA))]
        source = tmp_path / f"{turn}.parquet"
        columns = {"id": written.column("id"), "prompt_token_ids": prompts}
        columns["metadata"] = metadata.dictionary_encode() if encoded else metadata
        parquet.write_table(pa.table(columns), source)
    score(source, tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["metadata"] for line in lines if line["adapter"] == "A"] == METADATA


def test_metadata_that_are_no_json_are_their_own_text(tmp_path):
    texts = ["plain", "NaN", "1e999", '{"a": 1, "a": 2}', "{", "[" * 100_000, None, " "]
    parquet.write_table(pa.table({"prompt": ["a"] * len(texts), "metadata": texts}), tmp_path / "in.parquet")
    with ParquetReader(tmp_path / "in.parquet") as reader:
        rows = list(parse_rows(reader))
    assert [(row.error, row.metadata) for row in rows] == [(None, text) for text in texts]


def test_of_a_file_the_rows_are_what_is_to_be_done(tmp_path):
    parquet.write_table(pa.table({"prompt": ["a"] * 1500, "metadata": [0.5] * 1500}), tmp_path / "in.parquet")
    with ParquetReader(tmp_path / "in.parquet") as reader:
        sizes = [row.size for row in read_rows(reader)]
        assert len(sizes) == 1500
        assert len(set(sizes)) == 1
        assert reader.position == reader.total == sum(sizes)


def test_every_line_of_a_row_counts_as_done(tmp_path):
    """Rows are finished adapter by adapter: if only the last line of each counted, most of a run would show 0 %."""
    parquet.write_table(pa.table({"prompt_token_ids": [[20]] * 10}), tmp_path / "in.parquet")
    told = []
    names = dict.fromkeys(map(str, range(40)), "/a")
    job = PrefillJob(
        FakeEngine(adapters=names), TextEncoder(None), JobOptions(), lambda now, _: told.append(now.input_done)
    )
    with ParquetReader(tmp_path / "in.parquet") as reader, open_output(tmp_path / "out.jsonl", None) as sink:
        job.run(read_rows(reader), sink)
        assert told[-1] == reader.total
        assert max(later - sooner for sooner, later in pairwise([0, *told])) < reader.total / 100


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


def test_columns_that_no_row_may_have_are_refused_by_name_before_any_work(tmp_path):
    parquet.write_table(pa.table({"prompt": ["a"], "text": ["b"], "num_tokens": [1]}), tmp_path / "in.parquet")
    with pytest.raises(
        InputError, match=r": 'text' \(did you mean 'prompt'\?\), 'num_tokens' are no columns of rows\. Valid: "
    ):
        ParquetReader(tmp_path / "in.parquet")
    parquet.write_table(pa.table({"prompt": ["a"], "label": [1]}), tmp_path / "in.parquet")
    with pytest.raises(InputError, match=r": 'label' is no column of rows\. Valid: id, "):
        ParquetReader(tmp_path / "in.parquet")
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [20, 21]}\n')
    score(tmp_path / "in.jsonl", tmp_path / "out.parquet")
    with pytest.raises(InputError) as refused:
        open_rows(tmp_path / "out.parquet")
    unknown = str(refused.value).split(".parquet: ")[1].split(" are no columns of rows. Valid: ")[0]
    assert [part.split()[0].strip("',") for part in unknown.split(", ")] == [
        name for name in output_schema().names if name not in ROW_KEYS
    ]
    assert "'token_ids' (did you mean 'prompt_token_ids'?)" in unknown


def test_two_columns_of_one_name_are_refused(tmp_path):
    parquet.write_table(pa.table([["a"], ["b"]], names=["prompt", "prompt"]), tmp_path / "in.parquet")
    with pytest.raises(InputError, match="column 'prompt' stands there 2 times"):
        ParquetReader(tmp_path / "in.parquet")


ODD = ("plain", 'quote " and \\ and /', "tab\tline\nend\r", "\u2028\u2029\x85\x00\x7f", "Ünïcode 😀", "")


def random_line(draw):
    """An output row with every kind of value."""
    token = {"token_id": draw.randrange(10**6), "logprob": -draw.expovariate(1)}
    scores = [None, -draw.expovariate(1), -1e-300 * draw.random(), -5e-324, -0.0, 0.0, -1.7976931348623157e308]
    row = {
        "id": f"{draw.choice(ODD)}{draw.random()}",
        "adapter": draw.choice([None, "A", *ODD]),
        "num_tokens": draw.choice([None, 7]),
        "truncated_tokens": 0,
        "logprob_sum": draw.choice(scores),
        "is_greedy": draw.choice([None, True, False]),
        "next_token": draw.choice([None, token]),
        "mode": "eager",
        "metadata": None,
        "error": draw.choice([None, *ODD]),
    }
    if draw.random() < 0.5:
        row |= {"token_ids": [1, 2, 2**40], "token_logprobs": scores, "top_logprobs": [token, token]}
    if draw.random() < 0.5:
        choice = {"logprob": -1.5, "logprob_per_token": -0.5, "logprob_per_byte": None, "num_tokens": 3}
        kinds = [{"text": draw.choice(ODD)}, {"token_ids": [1, 2, 3]}]
        row["choices"] = [{**draw.choice(kinds), **choice, "num_bytes": None, "is_greedy": False} for _ in range(3)]
    return row


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_the_same_read_by_arrow_or_one_by_one(seed):
    draw = random.Random(seed)
    lines = [encode_row(random_line(draw)) for _ in range(200)]
    by_arrow, by_rows = (make(lines, output_schema()) for make in (_table, _table_by_rows))
    assert by_arrow.schema == by_rows.schema
    assert [repr(row) for row in by_arrow.to_pylist()] == [repr(row) for row in by_rows.to_pylist()]


@pytest.mark.parametrize("odd", [{"id": 7}, {"id": 2**70}, {"metadata": "text"}, {"metadata": {"a": [1, None]}}])
def test_ids_and_metadata_become_text_whatever_they_are(tmp_path, odd):
    rows = [{**random_line(random.Random(i)), **(odd if i == 1 else {})} for i in range(3)]
    with open_output(tmp_path / "out.parquet", None) as sink:
        for row in rows:
            sink.write(encode_row(row))
    written = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["id"] for row in written] == [str(row["id"]) for row in rows]
    assert [row["metadata"] and json.loads(row["metadata"]) for row in written] == [row["metadata"] for row in rows]


def test_long_rows_are_written_before_many_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr("moelora.jobs.parquet._GROUP_BYTES", 1000)
    with open_output(tmp_path / "out.parquet", None) as sink:
        for i in range(100):
            sink.write(encode_row(random_line(random.Random(i))))
    file = parquet.ParquetFile(tmp_path / "out.parquet")
    assert file.num_row_groups > 10
    assert file.metadata.num_rows == 100


INTEGERS = pa.list_(pa.int32())


@pytest.mark.parametrize(
    "prompts",
    [
        pa.array([[1, 2], [3], [4, 5, 6], []], INTEGERS),
        pa.array([[1, 2], None, [4, 5, 6], []], INTEGERS),
        pa.array([[1, 2], [None, 3], [4], [5]], INTEGERS),
        pa.array([[9, 9], [1, 2], [3], [4, 5, 6], [], [8]], INTEGERS).slice(1, 4),
        pa.array([[1, 2], [3], [4, 5, 6], []], pa.large_list(pa.uint8())),
        pa.array([[1, 2], [3], [4, 5, 6], []], pa.list_(pa.int64(), -1)),
        pa.array([[1.0, 2.0], [float("nan")], [3.0], []], pa.list_(pa.float64())),
        pa.array(["text", "", "\x00", None]),
        pa.array(["same", "same", None, "other"]).dictionary_encode(),
        pa.array([True, False, None, True]),
    ],
    ids=lambda a: str(a.type),
)
def test_rows_are_the_same_with_and_without_the_way_through_text(tmp_path, monkeypatch, prompts):
    """A column of floats makes every row go through text; here it is one that holds nothing."""
    columns = {"prompt_token_ids": prompts, "adapter": pa.array(["A", None, "B", "A"])}
    parquet.write_table(pa.table(columns), tmp_path / "plain.parquet")
    parquet.write_table(pa.table({**columns, "metadata": pa.nulls(4, pa.float64())}), tmp_path / "text.parquet")
    plain, text = (list(ParquetReader(tmp_path / f"{name}.parquet")) for name in ("plain", "text"))
    assert [json.loads(line) for _, line in text] == [
        row if isinstance(row, dict) else json.loads(row) for _, row in plain
    ]
    assert list(parse_rows(plain)) == list(parse_rows(text))


def invalid_text(*values):
    raw = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(values), raw.buffers())


@pytest.mark.parametrize("more", [{}, {"metadata": pa.nulls(4, pa.float64())}], ids=["plain", "text"])
def test_text_that_is_not_utf8_costs_its_row(tmp_path, more):
    prompts = invalid_text(b"good", b"\xff\xfe", "né".encode(), b"")
    parquet.write_table(pa.table({"prompt": prompts, **more}), tmp_path / "in.parquet")
    rows = list(parse_rows(ParquetReader(tmp_path / "in.parquet")))
    assert [row.prompt for row in rows] == ["good", None, "né", None]
    assert "not UTF-8: byte 0xff" in rows[1].error
    assert rows[3].error == "line 4: prompt is empty"


def test_nested_text_that_is_not_utf8_is_refused_by_its_column(tmp_path):
    choices = pa.ListArray.from_arrays([0, 2], invalid_text(b"good", b"\xff"))
    parquet.write_table(pa.table({"prompt": ["a"], "choices": choices}), tmp_path / "in.parquet")
    with pytest.raises(InputError, match=r"column 'choices' holds text that is not UTF-8"):
        list(ParquetReader(tmp_path / "in.parquet"))
