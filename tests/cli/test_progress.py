"""What a run says on stderr while it works."""

import errno
import io
import sys
from pathlib import Path

import pytest

from moelora.jobs.stats import JobStats
from moelora.wording import duration
from moelora_cli import progress as module
from moelora_cli.progress import Progress, WorkerProgress, WorkersTold, read_workers
from moelora_cli.workers import _Shown


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_lines_come_five_seconds_apart(clock: list[float], capsys: pytest.CaptureFixture[str]):
    with Progress(quiet=False) as progress:
        progress.begin()
        for step in range(60):
            clock[0] = 100 + step / 4
            progress.counts(JobStats(output_rows=step, tokens=100 * step, error_rows=step // 30), JobStats())
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["20 lines, 2,000 tokens, 400 tokens/s", "40 lines, 4,000 tokens, 400 tokens/s, 1 error"]


def test_the_rate_counts_what_this_run_scored(clock: list[float], capsys: pytest.CaptureFixture[str]):
    with Progress(quiet=False) as progress:
        progress.begin()
        clock[0] += 10
        progress.counts(JobStats(output_rows=1, tokens=134_385), JobStats(output_rows=1, tokens=134_000))
    assert capsys.readouterr().err == "1 line, 134,385 tokens, 38 tokens/s\n"


def test_what_scores_nothing_has_no_rate(clock: list[float], capsys: pytest.CaptureFixture[str]):
    """The tokens that `plan` reads in a second say nothing of those that a run scores."""
    with Progress(quiet=False) as progress:
        clock[0] += 10
        progress.counts(JobStats(output_rows=20, tokens=2_000, error_rows=1), JobStats())
    assert capsys.readouterr().err == "20 lines, 2,000 tokens, 1 error\n"


def test_the_share_done_and_the_time_left_count_what_is_to_be_done(clock: list[float], capsys):
    """The time left follows from the speed of this run: what was there before took no time."""
    with Progress(quiet=False) as progress:
        progress.expect(1000)
        progress.begin()
        for after, done in ((10, 400), (20, 500), (30, 600), (40, 999), (50, 1000), (60, 1010)):
            clock[0] = 100 + after
            progress.counts(JobStats(output_rows=done, tokens=0, input_done=done), JobStats(input_done=400))
        progress.expect(4000)
        clock[0] = 200
        progress.counts(JobStats(input_done=600), JobStats(input_done=400))
    shares = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert shares == [
        "40%",
        "50%",  # the first batch, which takes longer than others
        "60%, about 1 min left",
        "99%",
        "100%",
        "100%",
        "15%, about 28 min left",
    ]


def test_the_time_left_rests_on_a_hundredth_of_the_work(clock: list[float], capsys):
    with Progress(quiet=False) as progress:
        progress.expect(10_400)
        progress.begin()
        for after, done in ((10, 450), (20, 499), (30, 500)):
            clock[0] = 100 + after
            progress.counts(JobStats(input_done=done), JobStats(input_done=400))
    shares = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert shares == ["4%", "4%", "4%, about 50 min left"]


def test_the_last_counts_are_shown_behind_others(clock: list[float], capsys: pytest.CaptureFixture[str]):
    for after, shown in ((1, []), (6, ["50%: 1 line, 5 tokens, 1 tokens/s", "100%: 2 lines, 9 tokens, 2 tokens/s"])):
        clock[0] = 100
        with Progress(quiet=False) as progress:
            progress.expect(2)
            progress.begin()
            clock[0] += after
            progress.counts(JobStats(output_rows=1, tokens=5, input_done=1), JobStats())
            progress.scored(JobStats(output_rows=2, tokens=9, input_done=2), JobStats())
        assert capsys.readouterr().err.splitlines() == [*shown[:1], *(line + "; finishing" for line in shown[1:])]


def test_where_nobody_knows_how_much_there_is_no_share_is_shown(clock: list[float], capsys):
    with Progress(quiet=False) as progress:
        progress.expect(None)
        progress.begin()
        clock[0] = 110
        progress.counts(JobStats(output_rows=1, tokens=100, input_done=9), JobStats())
    assert capsys.readouterr().err == "1 line, 100 tokens, 10 tokens/s\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (3_569, "59 min"), (3_571, "1 h 0 min"), (97_260, "27 h 1 min")],
)
def test_durations_are_read_at_a_glance(seconds: float, text: str):
    assert duration(seconds) == text


def test_workers_tell_what_they_have_scored_since_when(clock: list[float], tmp_path: Path, monkeypatch):
    assert read_workers(tmp_path) == WorkersTold(began=None, part_at=0.0, stats=JobStats(), is_done=False)
    for process, began in ((11, 107.0), (12, 103.0)):
        monkeypatch.setattr(module.os, "getpid", lambda process=process: process)
        clock[0] = began
        worker = WorkerProgress(tmp_path)
        worker.begin()
        assert read_workers(tmp_path).began == began
        clock[0] += 60
        done = JobStats(output_rows=30, error_rows=4, tokens=900 + process, input_done=70)
        worker.counts(done, JobStats(output_rows=10, error_rows=1, tokens=500, input_done=20))
    told = read_workers(tmp_path)
    assert (told.began, told.is_done) == (103.0, False)
    assert told.stats == JobStats(output_rows=40, error_rows=6, tokens=823, input_done=100)
    clock[0] = 180.0
    worker.part_written(done, JobStats())
    clock[0] = 190.0
    worker.scored(done, JobStats())
    told = read_workers(tmp_path)
    assert (told.part_at, told.is_done) == (180.0, True)


def test_of_a_dead_worker_only_its_parts_count(clock: list[float], tmp_path: Path, monkeypatch):
    for process in (11, 12):
        monkeypatch.setattr(module.os, "getpid", lambda process=process: process)
        worker = WorkerProgress(tmp_path)
        worker.begin()
        worker.part_written(JobStats(output_rows=20, tokens=200), JobStats(output_rows=5, tokens=50))
        assert read_workers(tmp_path).stats.output_rows >= 15, "at once"
        clock[0] += 60
        worker.counts(JobStats(output_rows=29, tokens=290), JobStats(output_rows=5, tokens=50))
    assert read_workers(tmp_path).stats == JobStats(output_rows=48, tokens=480)
    assert read_workers(tmp_path, dead={11}).stats == JobStats(output_rows=39, tokens=390)
    assert read_workers(tmp_path, dead={11, 12}).stats == JobStats(output_rows=30, tokens=300)


def test_progress_of_workers_never_runs_backwards(clock: list[float], tmp_path: Path, monkeypatch):
    """Though what a worker had in hand when it died, or ended at Ctrl-C, is taken off."""
    shown: list[int] = []
    progress = Progress(quiet=True)
    monkeypatch.setattr(progress, "counts", lambda stats, earlier: shown.append(stats.output_rows))
    workers = []
    for process in (11, 12):
        monkeypatch.setattr(module.os, "getpid", lambda process=process: process)
        workers.append(WorkerProgress(tmp_path))
        workers[-1].begin()
    all_shown = _Shown(tmp_path, tmp_path, JobStats(output_rows=3), progress)
    for counts, dead in ([(9, 20), set()], [(9, 20), {11}], [(9, 25), {11}], [(9, 40), {11}]):
        clock[0] += 60
        for worker, lines in zip(workers, counts, strict=True):
            worker.counts(JobStats(output_rows=lines, tokens=lines), JobStats())
        all_shown.update(dead)
    assert shown == [3 + 29, 3 + 40]


def test_quiet_is_quiet(clock: list[float], capsys: pytest.CaptureFixture[str]):
    with Progress(quiet=True) as progress:
        progress.begin()
        progress.event("loading")
        progress.note("going on")
        clock[0] += 60
        progress.counts(JobStats(), JobStats())
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def test_nothing_in_a_message_is_markup(capsys: pytest.CaptureFixture[str]):
    with Progress(quiet=False) as progress:
        progress.event("reading adapter [red]a[/red] from /x/[b]")
        progress.say("a" * 300)
    assert capsys.readouterr().err == "reading adapter [red]a[/red] from /x/[b]\n" + "a" * 300 + "\n"


def test_a_pipe_gets_plain_lines_even_if_colour_is_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(quiet=False) as progress:
        progress.event("loading")
    assert capsys.readouterr().err == "loading\n"


def test_a_terminal_gets_one_live_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(quiet=False) as progress:
        progress.event("loading [b]")
        progress.begin()
        progress.counts(JobStats(output_rows=1), JobStats())
        progress.say("done [b]")
    assert "done [b]" in capsys.readouterr().err


def test_a_log_on_a_full_disk_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    with Progress(quiet=False) as progress:
        progress.event("a model is loaded")
        progress.note("a graph is captured")
