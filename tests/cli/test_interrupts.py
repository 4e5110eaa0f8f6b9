"""Ctrl-C, killed parents, and readers that leave: what is finished, what is left behind, and how it goes on."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cli.prefill_command import ENVIRONMENT, SCRIPT, Command, run

pytestmark = pytest.mark.usefixtures("no_real_engine")


def start(
    command: Command, *arguments: Any, seconds: float, environment: Mapping[str, str] = {}, **options: Any
) -> subprocess.Popen[str]:
    """`moelora prefill` as a process whose batches take `seconds` each."""
    words = ["prefill", command.model, "--input", command.input, *arguments]
    return subprocess.Popen(
        [*SCRIPT, *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=command.folder,
        env={**ENVIRONMENT, "FAKE_ENGINE_SECONDS": str(seconds), **environment},
        # A suite that runs in the background ignores SIGINT, and would hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def many_rows(command: Command, count: int) -> None:
    command.input.write_text("".join(f'{{"prompt_token_ids": [{20 + i % 900}, 21, 22]}}\n' for i in range(count)))


def wait_for_a_batch(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if "a batch runs" in line:
            time.sleep(0.2)
            return
    raise AssertionError("no batch ran")


def wait_for_parts(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob("part-*.jsonl"))) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def children_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(n) for n in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_the_first_ctrl_c_finishes_the_batch(command: Command):
    many_rows(command, 9)
    with start(command, "--output", "-", seconds=2, stdout=subprocess.PIPE) as process:
        wait_for_a_batch(process)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert len(stdout.splitlines()) == 3, "the three rows of the first batch, and no others"
    assert "finishing the batch; Ctrl-C once more ends at once" in stderr
    assert stderr.splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in stderr


def test_the_second_ctrl_c_ends_at_once(command: Command):
    many_rows(command, 9)
    with start(command, "--output", command.output, seconds=30) as process:
        wait_for_a_batch(process)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)
        assert time.monotonic() - began < 5
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 130
    assert command.files() == {"in.jsonl"}


@pytest.mark.parametrize("devices", [(), ("--devices", "cpu:2")])
def test_a_run_that_has_finished_no_part_says_that_nothing_is_kept(command: Command, devices: tuple[str, ...]):
    many_rows(command, 900)
    with start(command, "--output", command.output, *devices, seconds=0.1) as process:
        deadline = time.monotonic() + 60
        agreed = command.folder / "out.jsonl.parts" / "agreed-score-chunk-rows.json"
        while not agreed.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    said = ["no part was finished yet: nothing is kept, and the same command begins anew", "error: interrupted"]
    assert stderr.splitlines()[-2:] == said
    assert command.files() == {"in.jsonl"}


def test_an_interrupted_run_goes_on_to_the_same_file(command: Command):
    many_rows(command, 10_000)
    whole = command.folder / "whole.jsonl"
    assert command("--quiet", output=whole).code == 0
    with start(command, "--output", command.output, seconds=0.0005) as process:
        wait_for_parts(command.folder / "out.jsonl.parts", 1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "; the same command goes on from there" in stderr
    assert not command.output.exists()
    done = command()
    assert done.code == 0
    assert "going on with" in done.stderr
    assert command.output.read_bytes() == whole.read_bytes()
    assert command.files() == {"in.jsonl", "out.jsonl", "whole.jsonl"}


@pytest.mark.parametrize("whom", ["parent", "terminal"])
def test_workers_finish_their_batches_too(command: Command, whom: str):
    """A terminal sends Ctrl-C to parent and workers alike; `kill -INT` to the parent alone."""
    many_rows(command, 13_000)
    whole = command.folder / "whole.jsonl"
    assert command("--quiet", output=whole).code == 0
    arguments = ["--output", command.output, "--devices", "cpu:2"]
    with start(command, *arguments, seconds=0.0005, process_group=0) as process:
        wait_for_parts(command.folder / "out.jsonl.parts", 1)
        os.kill(process.pid if whom == "parent" else -process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "finishing the batch" in stderr
    assert "; the same command goes on from there" in stderr
    assert "died" not in stderr
    assert not command.output.exists()
    done = run("prefill", command.model, "--input", command.input, *arguments, cwd=command.folder, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert command.output.read_bytes() == whole.read_bytes()
    assert command.files() == {"in.jsonl", "out.jsonl", "whole.jsonl"}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds worker processes through /proc")
def test_workers_end_when_their_parent_is_killed(command: Command):
    many_rows(command, 200_000)
    temporary = command.folder / "temporary"
    temporary.mkdir()
    arguments = ["--output", command.output, "--devices", "cpu:2"]
    with start(command, *arguments, seconds=0.01, environment={"TMPDIR": str(temporary)}) as process:
        deadline = time.monotonic() + 30
        while not (command.folder / "out.jsonl.parts" / "manifest.json").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1)
        workers = children_of(process)
        assert len(workers) == 2
        assert len(list(temporary.iterdir())) == 1
        process.kill()
    deadline = time.monotonic() + 60
    while any(alive(number) for number in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(number) for number in workers)
    assert list(temporary.iterdir()) == [], "what they shared with their parent"


def alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
