"""What a run says on stderr while it works."""

import sys

import pytest

from moelora.jobs.stats import JobStats
from moelora_cli import progress as module
from moelora_cli.progress import Progress


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
            progress.counts(JobStats(output_rows=step, tokens=100 * step, error_rows=step // 30))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["20 lines, 2,000 tokens, 400 tokens/s", "40 lines, 4,000 tokens, 400 tokens/s, 1 errors"]


def test_quiet_is_quiet(clock: list[float], capsys: pytest.CaptureFixture[str]):
    with Progress(quiet=True) as progress:
        progress.begin()
        progress.event("loading")
        clock[0] += 60
        progress.counts(JobStats())
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
        progress.counts(JobStats(output_rows=1))
        progress.say("done [b]")
    assert "done [b]" in capsys.readouterr().err
