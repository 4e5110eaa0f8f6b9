"""Ctrl-C outside of scoring: while modules are imported, in what libraries run, and when all is done."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.prefill_command import ENVIRONMENT, SOURCES

INTERRUPT = "import signal; signal.raise_signal(signal.SIGINT)"

PROBE = """
import atexit, signal, sys, time
from moelora_cli.__main__ import main
from moelora_cli.command import MoeloraCommand
from moelora_cli.main import cli

@cli.command(cls=MoeloraCommand)
def probe():
    {body}

main()
"""


def program(module: str, *arguments: str, path: Path, action: signal.Handlers = signal.SIG_DFL) -> tuple[int, str]:
    """The exit code of `python -m module`, and what it said. path: searched first. action: of SIGINT at its start."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(path), *SOURCES])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, action),
    )
    return done.returncode, done.stderr


def probe(folder: Path, body: str, action: signal.Handlers = signal.SIG_DFL) -> tuple[int, str]:
    """As `program`, for a command that does what `body` says."""
    (folder / "program.py").write_text(PROBE.format(body=body.replace("\n", "\n    ")))
    return program("program", "probe", path=folder, action=action)


def test_before_the_command_is_there(tmp_path: Path):
    (tmp_path / "click.py").write_text(INTERRUPT)
    assert program("moelora_cli", "--help", path=tmp_path) == (130, "error: interrupted\n")


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full"])
def test_where_nobody_can_be_told(tmp_path: Path, redirect: str):
    (tmp_path / "click.py").write_text(INTERRUPT)
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(tmp_path), *SOURCES])}
    line = f"{sys.executable} -m moelora_cli --help {redirect}"
    assert subprocess.run(["sh", "-c", line], env=environment, timeout=60, check=False).returncode == 130


@pytest.mark.parametrize("made", ["raise ImportError('what an extension makes of it')", "pass", "os.abort()"])
def test_in_an_import_of_a_command(tmp_path: Path, made: str):
    """Whatever the library would do with an exception."""
    body = f"import os\ntry:\n    {INTERRUPT}\nexcept BaseException:\n    {made}\nos.write(2, b'imported')"
    (tmp_path / "library.py").write_text(body)
    assert probe(tmp_path, "import library") == (130, "error: interrupted\n")


def test_in_an_import_while_there_is_something_to_put_in_order(tmp_path: Path):
    (tmp_path / "library.py").write_text(INTERRUPT)
    body = """from moelora_cli.interrupts import unwinding
with unwinding():
    try:
        import library
    finally:
        print("put in order", file=sys.stderr)"""
    assert probe(tmp_path, body) == (130, "put in order\nerror: interrupted\n")


def test_in_code_that_a_library_makes(tmp_path: Path):
    """CPython notes a plain `KeyboardInterrupt` there, and ends by the signal though it was caught."""
    assert probe(tmp_path, f"exec({INTERRUPT!r})") == (130, "error: interrupted\n")


def test_in_a_finaliser_from_which_nothing_can_be_raised(tmp_path: Path):
    body = """class Library:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
Library()
time.sleep(30)"""
    assert probe(tmp_path, body) == (130, "error: interrupted\n")


def test_when_all_is_done(tmp_path: Path):
    assert probe(tmp_path, "atexit.register(signal.raise_signal, signal.SIGINT)\nreturn 3") == (3, "")


def test_where_it_is_ignored(tmp_path: Path):
    """As a shell has it for jobs in the background."""
    assert probe(tmp_path, "signal.raise_signal(signal.SIGINT)\nreturn 3", action=signal.SIG_IGN) == (3, "")
