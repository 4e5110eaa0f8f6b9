"""Memory does not grow with the rows: reading, checking ids, scoring in windows, writing."""

import random
import tracemalloc
from itertools import count

import pytest

from fake_engine import FakeEngine
from moelora.jobs.claims import IdClaims
from moelora.jobs.parquet import ParquetReader, ParquetSink
from moelora.jobs.parts import PartStore, merge_lines
from moelora.jobs.rows import parse_rows
from moelora.jobs.run import JobOptions, PrefillJob
from moelora.jobs.text import TextEncoder
from moelora.jobs.windows import run_into_parts
from moelora.jobs.writer import Discard, open_output
from moelora.types import Result, TokenScore


class QuickEngine(FakeEngine):
    """Answers in windows of 256 requests, without computing anything."""

    def __init__(self):
        super().__init__(adapters={"A": "/a"}, window=256)

    def score_one(self, request):
        return Result(num_tokens=len(request.token_ids), logprob_sum=-1.0, next_token=TokenScore(1, -1.0))


def lines(rows):
    for number in range(1, rows + 1):
        yield number, b'{"id": "row %d", "prompt_token_ids": [1, 2, 3], "metadata": "%d"}' % (number, number)


def job():
    return PrefillJob(QuickEngine(), TextEncoder(None), JobOptions(with_base=True))


def stream(rows, folder):
    job().run(parse_rows(lines(rows)), Discard())


def parts(rows, folder):
    with PartStore(folder / f"{rows}.parts") as store:
        store.begin({})
        run_into_parts(job(), lambda: parse_rows(lines(rows)), 512, store)
        with open_output(folder / f"{rows}.jsonl", None) as out:
            for line in merge_lines(store.folder):
                out.write(line)


def bad_rows(rows, folder):
    job().run(parse_rows((number, b"{") for number, _ in lines(rows)), Discard())


def peak(work, rows, folder):
    tracemalloc.start()
    try:
        work(rows, folder)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("work", [stream, parts, bad_rows])
def test_memory_stays_flat(work, tmp_path):
    peak(work, 500, tmp_path / "warm")  # what is made once
    few, many = (peak(work, rows, tmp_path) for rows in (4_000, 16_000))
    # Ids: twelve bytes each, and 2**14 buckets that are made as they are needed. A dict of them would take 190 each.
    assert many - few < 12_000 * 20 + (1 << 14) * 90


def test_parquet_is_read_and_written_a_piece_at_a_time(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    held = []
    for rows in (10_000, 30_000):
        path = tmp_path / f"{rows}.parquet"
        with ParquetSink(path) as sink:
            job().run(parse_rows(lines(rows)), sink)
        groups = parquet.ParquetFile(path).metadata.row_group(0).num_rows
        columns = parquet.read_table(path, columns=["id", "adapter", "next_token"])
        parquet.write_table(columns.rename_columns(["id", "adapter", "metadata"]), path, row_group_size=groups)
        del columns
        before = pyarrow.total_allocated_bytes()
        most = 0
        with ParquetReader(path) as reader:
            for number, _ in reader:
                if number % 1000 == 0:
                    most = max(most, pyarrow.total_allocated_bytes() - before)
        assert number == 2 * rows
        held.append(most)
    assert held[1] < 1.5 * held[0] + (1 << 19)


def test_claims_know_every_id_and_its_first_line():
    rng = random.Random(0)
    claims, first = IdClaims(), {}
    for line in range(1, 50_000):
        identity = str(rng.randrange(20_000))
        assert claims.claim(identity, line) == first.setdefault(identity, line)


def test_claims_do_not_take_pieces_of_records_for_records(monkeypatch):
    """Hashes and lines whose bytes repeat, all in one bucket."""
    hashes = {str(i): (i % 3) << 16 | (i // 3 % 3) << 32 | (i // 9) << 48 for i in range(27)}

    class Hashed(str):
        def __hash__(self):
            return hashes[str(self)]

    claims = IdClaims()
    lines_of = count(0, 0x010000)
    first = {}
    for identity in [*hashes, *reversed(hashes)]:
        line = next(lines_of) % (1 << 32)
        assert claims.claim(Hashed(identity), line) == first.setdefault(identity, line)
