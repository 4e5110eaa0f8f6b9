"""Runs in parts: killed anywhere they go on to the same bytes, sharded they merge to the same bytes."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

import moelora.jobs.writer as writer
from fake_engine import FakeEngine
from moelora.errors import ConfigError
from moelora.jobs.parts import PartStore, merge_lines
from moelora.jobs.reader import LineReader
from moelora.jobs.rows import Row, parse_rows, read_rows
from moelora.jobs.run import JobOptions, PrefillJob
from moelora.jobs.stats import JobStats
from moelora.jobs.text import TextEncoder
from moelora.jobs.windows import ShardSize, run_into_parts, window_requests, windows

PRINT = {"input": "a", "option top_k": "0"}
ROWS = 23
REQUESTS = 12


class Killed(BaseException):
    """Stands for SIGKILL: nothing that catches `Exception` sees it."""


class CountingEngine(FakeEngine):
    """Counts what it scores, by row."""

    def __init__(self):
        super().__init__(adapters={"A": "/a", "B": "/b"})
        self.scored = []

    def score_stream(self, requests, on_batch=lambda: None):
        def watched():
            for request in requests:
                self.scored.append((tuple(request.token_ids), request.adapter))
                yield request

        return super().score_stream(watched(), on_batch)


def lines():
    for number in range(1, ROWS + 1):
        row = {"id": f"r{number}", "prompt_token_ids": [20 + number, 21, 22 + number % 3]}
        yield number, b"not json" if number == 9 else json.dumps(row).encode()


def run(folder: Path, engine: FakeEngine, **shard: int) -> int:
    job = PrefillJob(engine, TextEncoder(None), JobOptions(with_base=True))
    with PartStore(folder, **shard) as store:
        store.begin(PRINT)
        count = run_into_parts(job, lambda: parse_rows(lines()), REQUESTS, store)
    run.stats = job.stats
    return count


def counts(stats):
    return {name: value for name, value in stats.to_json().items() if name not in ("twins", "first_errors")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(folder, CountingEngine())
    return b"".join(merge_lines(folder)), counts(run.stats)


def make_fragile(patch: pytest.MonkeyPatch, calls: int) -> None:
    """Lets the process die at the call after `calls` of those that touch the disk or the engine."""
    left = [calls]

    def fragile(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*args, **kwargs)

        return call

    patch.setattr(writer.os, "fsync", fragile(os.fsync))
    patch.setattr(writer.os, "replace", fragile(os.replace))
    patch.setattr(writer.AtomicFile, "write", fragile(writer.AtomicFile.write))
    patch.setattr(FakeEngine, "check", fragile(FakeEngine.check))
    # A killed process removes nothing on its way out.
    patch.setattr(writer.Path, "unlink", lambda self, missing_ok=False: None)


def test_killed_at_200_random_moments_a_run_goes_on_to_the_same_bytes(whole, tmp_path):
    rng = random.Random(0)
    deaths = 0
    job = PrefillJob(CountingEngine(), TextEncoder(None), JobOptions(with_base=True))
    cut = windows(parse_rows(lines()), REQUESTS, job.requests_of)
    window_of = {row.line: number for number, window in cut for row in window}
    for attempt in range(200):
        folder = tmp_path / str(attempt)
        with pytest.MonkeyPatch.context() as patch:
            make_fragile(patch, rng.randrange(200))
            try:
                run(folder, CountingEngine())
            except Killed:
                deaths += 1
        safe = {int(p.stem[5:]) for p in folder.glob("part-*.jsonl")}
        engine = CountingEngine()
        run(folder, engine)
        assert b"".join(merge_lines(folder)) == whole[0]
        assert counts(run.stats) == whole[1]
        scored_again = {window_of[ids[0] - 20] for ids, _ in engine.scored}
        assert not scored_again & safe, "a row of a finished part was scored again"
    assert deaths > 150


@pytest.mark.parametrize("shards", [1, 2, 4, 7])
def test_shards_merge_to_the_single_run(whole, tmp_path, shards):
    for shard in reversed(range(shards)):
        with pytest.raises(ConfigError, match=r"not finished: \d/\d|manifest"):
            list(merge_lines(tmp_path))
        run(tmp_path, CountingEngine(), shard=shard, shards=shards)
    assert b"".join(merge_lines(tmp_path)) == whole[0]


def test_a_missing_part_is_named(tmp_path):
    run(tmp_path, CountingEngine())
    (tmp_path / "part-00000002.jsonl").unlink()
    with pytest.raises(ConfigError, match="part 2 of 6 is missing"):
        list(merge_lines(tmp_path))


def test_a_part_that_was_cut_or_changed_is_scored_again(whole, tmp_path):
    """At every place of its last line, in the header, and in the middle."""
    run(tmp_path, CountingEngine())
    path = tmp_path / "part-00000002.jsonl"
    sound = path.read_bytes()
    last = sound.rindex(b"\n", 0, -1) + 1
    damaged = [sound[:end] for end in (*range(last, len(sound)), 0, 10, sound.index(b"\n") + 1)]
    damaged += [sound.replace(b'"error": null', b'"error": nill', 1), sound + b"{}\n", b"[]\n" + sound]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"part-00000002.jsonl is damaged"):
            list(merge_lines(tmp_path))
        engine = CountingEngine()
        run(tmp_path, engine)
        assert b"".join(merge_lines(tmp_path)) == whole[0]
        assert path.read_bytes() == sound
        assert 0 < len(engine.scored) <= REQUESTS


def test_a_part_under_the_name_of_another_is_no_part(whole, tmp_path):
    run(tmp_path, CountingEngine())
    shutil.copy(tmp_path / "part-00000003.jsonl", tmp_path / "part-00000001.jsonl")
    with pytest.raises(ConfigError, match=r"part-00000001.jsonl is damaged"):
        list(merge_lines(tmp_path))
    run(tmp_path, CountingEngine())
    assert b"".join(merge_lines(tmp_path)) == whole[0]


def begun(folder: Path, fingerprint=PRINT, **shard) -> PartStore:
    store = PartStore(folder, **shard)
    store.begin(fingerprint)
    return store


def test_a_second_process_is_refused_before_it_does_anything(tmp_path):
    with PartStore(tmp_path / "a"), pytest.raises(ConfigError, match="in use by another run"):
        PartStore(tmp_path / "a")
    with PartStore(tmp_path / "b", shard=1, shards=2):
        PartStore(tmp_path / "b", shard=0, shards=2).close()
        with pytest.raises(ConfigError, match="in use by another run"):
            PartStore(tmp_path / "b", shard=1, shards=2)


def test_what_one_process_measured_all_use(tmp_path):
    run(tmp_path, CountingEngine())
    with begun(tmp_path) as store:
        assert store.agree("eager-buckets", [16, 64]) == [16, 64]
        assert store.agree("eager-buckets", [32]) == [16, 64]
    with begun(tmp_path) as store:
        assert store.agree("eager-buckets", []) == [16, 64]
    assert not list(tmp_path.glob(".*"))


def test_what_was_agreed_and_is_damaged_is_named_and_goes_with_the_run(tmp_path):
    run(tmp_path, CountingEngine())
    with begun(tmp_path) as store:
        store.agree("eager-buckets", [16, 64])
    (tmp_path / "agreed-eager-buckets.json").write_bytes(b"")
    with begun(tmp_path) as store, pytest.raises(ConfigError, match=r"agreed-eager-buckets\.json is damaged"):
        store.agree("eager-buckets", [32])
    with begun(tmp_path, overwrite=True) as store:
        assert store.agree("eager-buckets", [32]) == [32]


def test_a_changed_run_is_refused_by_name_unless_overwritten(tmp_path):
    run(tmp_path, CountingEngine())
    later = {**PRINT, "option top_k": "3"}
    for ask in (PartStore.check, PartStore.begin):
        with PartStore(tmp_path) as store, pytest.raises(ConfigError, match=r"option top_k \(0 before, 3 now\)"):
            ask(store, later)
        with (
            PartStore(tmp_path, shards=2) as store,
            pytest.raises(ConfigError, match=r"shards \(1 before, 2 now\)"),
        ):
            ask(store, PRINT)
    with PartStore(tmp_path, overwrite=True) as store:
        store.check(later)
        assert store.finished() > 0, "nothing is lost before the run begins"
        store.begin(later)
        assert store.finished() == 0


def left_by_a_kill(folder, **options):
    """What lies there of a run that was killed before its first part."""
    with PartStore(folder / "x", **options) as store:
        store.begin(PRINT)
        store.agree("eager-buckets", [1])
        shutil.copytree(folder / "x", folder / "killed")
    return folder / "killed"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("later", [{**PRINT, "adapter A": "other"}, {"input": "b"}])
def test_a_run_that_finished_nothing_is_forgotten(tmp_path, shards, later):
    folder = left_by_a_kill(tmp_path, shards=shards)
    with PartStore(folder, shards=shards) as store:
        store.check(later)
        store.begin(later)
        assert store.agree("eager-buckets", [2]) == [2], "what that run measured is forgotten too"


def test_a_run_that_finished_nothing_is_not_forgotten_by_a_worker_or_beside_another_shard(tmp_path):
    folder = left_by_a_kill(tmp_path, shards=2)
    later = {**PRINT, "option top_k": "3"}
    with PartStore(folder, shard=0, shards=2), PartStore(folder, shard=1, shards=2) as second:
        for ask in (second.check, second.begin):
            with pytest.raises(ConfigError, match=r"option top_k \(0 before, 3 now\)"):
                ask(later)
    alone = left_by_a_kill(tmp_path / "alone")
    with PartStore(alone, worker=True) as worker, pytest.raises(ConfigError, match=r"option top_k \(0 before, 3 now\)"):
        worker.begin(later)
    (folder / "end-1-of-2.json").write_text('{"windows": 1}')
    with PartStore(folder, shards=2) as store, pytest.raises(ConfigError, match="option top_k"):
        store.check(later)


def test_a_part_that_a_worker_of_another_run_left_is_scored_again(whole, tmp_path):
    """It outlived its parent, which was killed, and wrote into the folder of the run that came next."""
    late = PartStore(tmp_path, worker=True)
    late.begin({**PRINT, "option top_k": "3"})
    with begun(tmp_path, overwrite=True):
        late.write_part(1, JobStats(rows=9), [b"{}\n"])
    run(tmp_path, CountingEngine())
    assert (b"".join(merge_lines(tmp_path)), counts(run.stats)) == whole
    with PartStore(tmp_path) as store:
        finished = store.finished()
        late.write_part(1, JobStats(rows=9), [b"{}\n"])
        with pytest.raises(ConfigError, match="damaged"):
            list(merge_lines(tmp_path))
        assert store.finished_stats().rows < whole[1]["rows"], "before the run has begun"
        assert store.finished() == finished - 1


def test_what_is_not_known_yet_is_not_missed(tmp_path):
    run(tmp_path, CountingEngine())
    with PartStore(tmp_path) as store:
        store.check({"input": "a"})
        with pytest.raises(ConfigError, match="changed since: input"):
            store.check({"input": "b"})
        with pytest.raises(ConfigError, match=r"adapter A \(new\)"):
            store.check({"input": "a", "adapter A": "x"})


def test_a_shard_that_is_overwritten_leaves_the_others_alone(tmp_path):
    for shard in range(2):
        run(tmp_path, CountingEngine(), shard=shard, shards=2)
    before = sorted(p.name for p in tmp_path.glob("part-*"))
    with begun(tmp_path, shard=1, shards=2, overwrite=True):
        left = sorted(p.name for p in tmp_path.glob("part-*"))
    assert left == before[::2]


def test_a_shard_cannot_take_the_folder_from_one_at_work(tmp_path):
    later = {**PRINT, "option top_k": "3"}
    with (
        begun(tmp_path, shard=0, shards=2),
        PartStore(tmp_path, shard=1, shards=2, overwrite=True) as other,
        pytest.raises(ConfigError, match="in use by another run"),
    ):
        other.begin(later)
    with PartStore(tmp_path, shard=1, shards=2, overwrite=True) as other:
        other.begin(later)


def test_a_folder_in_which_nothing_was_finished_goes(tmp_path):
    with begun(tmp_path / "x.parts"):
        pass
    with PartStore(tmp_path / "y", shard=0, shards=2):
        pass
    assert not list(tmp_path.iterdir())
    with begun(tmp_path / "z", shard=0, shards=2):
        pass
    assert (tmp_path / "z" / "manifest.json").exists(), "another shard may be at work on it"


@pytest.mark.parametrize("shards", [1, 2])
def test_what_is_not_ours_is_left_alone(tmp_path, shards):
    """A folder that somebody keeps other things in, given as the output of shards, or by an unlucky name."""
    others = ["thesis.tex", "part-1.jsonl", "end.json", "lock-picking.txt", ".hidden", "manifest.json.bak"]
    (tmp_path / "sub").mkdir()
    for name in (*others, "sub/part-00000000.jsonl"):
        (tmp_path / name).write_text("precious")
    (tmp_path / "part-00000001.jsonl").write_text("left by nobody")
    for fingerprint in (PRINT, {"input": "b"}):
        with begun(tmp_path, fingerprint, shards=shards, overwrite=True) as store:
            assert store.finished() == 0
            store.write_part(0, JobStats(), [b"{}\n"])
    with begun(tmp_path, {"input": "b"}, shards=shards) as store:
        store.discard()
    for name in (*others, "sub/part-00000000.jsonl"):
        assert (tmp_path / name).read_text() == "precious"
    assert {p.name for p in tmp_path.iterdir()} == {*others, "sub"}


def test_a_file_system_without_locks_is_said_to_be_one(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ConfigError, match="cannot lock files"):
        PartStore(tmp_path)


def test_window_requests():
    assert window_requests(0, 1) == 4096
    assert window_requests(8, 8) == 4096
    assert window_requests(50, 8) == 7 * 4096
    assert window_requests(50, 1) == 65_536


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_a_shard_knows_how_much_of_the_input_falls_to_it(shards):
    """To the byte where windows are of one size but for the last; never less than it has scored where they are not."""
    rng = random.Random(shards)
    for sizes in ([100, 100, 100, 100, 30], [100], [rng.randrange(50, 200) for _ in range(40)]):
        for shard in range(shards):
            size = ShardSize(sum(sizes), lambda number, shard=shard: number % shards == shard)
            own = 0
            for number, length in enumerate(sizes):
                size.add(number, [Row(line=1, id=1, size=length // 2), Row(line=2, id=2, size=length - length // 2)])
                own += length if number % shards == shard else 0
                assert own <= size.expected() <= sum(sizes)
                if len(sizes) < 10:
                    assert size.expected() == sum(sizes[shard::shards])
            assert size.expected() == own == sum(sizes[shard::shards])


@pytest.mark.parametrize("window", [1, 7, 100])
def test_what_is_done_of_the_input_grows_line_by_line_to_the_whole(tmp_path, window):
    """Rows of several lines, of errors and of blank lines count with every byte, in whole numbers."""
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\n".join(line + b"\n" * (number % 2) for number, line in lines()))
    told = []
    engine = FakeEngine(adapters={"A": "/a", "B": "/b"}, window=window)
    job = PrefillJob(
        engine, TextEncoder(None), JobOptions(with_base=True), lambda stats, _: told.append(stats.input_done)
    )
    with PartStore(tmp_path / "parts") as store, LineReader(file) as reader:
        store.begin(PRINT)
        run_into_parts(job, lambda: read_rows(reader), REQUESTS, store)
        assert told == sorted(told)
        assert told[-1] == reader.total
        assert len(set(told)) > ROWS if window == 1 else told[0] > 0
        assert store.finished_stats().input_done == reader.total


def test_windows_are_cut_by_requests_not_by_rows():
    rows = list(parse_rows((i, b'{"prompt_token_ids": [1]}' if n else b"{") for i, n in enumerate([3, 1, 0, 5, 9, 1])))
    cut = list(windows(rows, 4, lambda row: [3, 1, 1, 5, 9, 1][row.line]))
    assert [(number, [row.line for row in window]) for number, window in cut] == [
        (0, [0, 1]),
        (1, [2, 3]),
        (2, [4]),
        (3, [5]),
    ]
    job = PrefillJob(FakeEngine(adapters={"A": "/a", "B": "/b"}), TextEncoder(None), JobOptions(with_base=True))
    given = [b"{}", b'{"prompt": "a"}', b'{"prompt": "a", "adapter": "A"}', b'{"prompt": "a", "adapter": ["A", "*"]}']
    assert [job.requests_of(row) for row in parse_rows(enumerate(given))] == [1, 3, 1, 3]
