"""Runs in parts by several processes, from the outside."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli.prefill_command import ENVIRONMENT, SCRIPT, Command, interrupted, many_rows, run, workers_of
from moelora.errors import ConfigError
from moelora_cli import progress, workers

pytestmark = pytest.mark.usefixtures("no_real_engine")


def test_two_workers_write_what_one_writes(command: Command):
    many_rows(command, 20_000)
    command.input.write_text(command.input.read_text() + "no json\n")
    assert command("--quiet").code == 3
    report = command.folder / "report.json"
    arguments = ["prefill", command.model, "--input", command.input, "--output", "two.jsonl", "--devices", "cpu:2"]
    (command.folder / "two.jsonl").write_text("old")
    done = run(*arguments, cwd=command.folder, env=ENVIRONMENT)
    assert (done.returncode, "two.jsonl exists" in done.stderr) == (2, True)
    done = run(*arguments, "--report", report, "--overwrite", cwd=command.folder, env=ENVIRONMENT)
    assert done.returncode == 3, done.stderr
    assert (command.folder / "two.jsonl").read_bytes() == command.output.read_bytes()
    assert command.files() == {"in.jsonl", "out.jsonl", "report.json", "two.jsonl"}
    told = json.loads(report.read_text())
    assert told["rows"] == 20_001
    assert len(told["engine"]["workers"]) == 2
    assert command("--report", "alone.json", "--overwrite").code == 3
    alone = json.loads((command.folder / "alone.json").read_text())["run"]
    assert told["run"] == {**alone, "output": "two.jsonl", "devices": "cpu:2", "report": str(report)}
    assert alone["top_k"] == 0
    assert not {"worker", "quiet"} & set(alone)


def test_the_end_of_workers_is_no_part_of_scoring(command: Command):
    many_rows(command, 30)
    report = command.folder / "report.json"
    arguments = ["prefill", command.model, "--input", command.input, "--output", "two.jsonl", "--devices", "cpu:2"]
    slow = {**ENVIRONMENT, "FAKE_ENGINE_SECONDS": "0.01", "FAKE_ENGINE_EXIT_SECONDS": "3"}
    began = time.monotonic()
    done = run(*arguments, "--report", report, cwd=command.folder, env=slow)
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    told = json.loads(report.read_text())
    assert 0.1 <= told["seconds"] <= took - told["load_seconds"] - 3


@pytest.fixture
def workers_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers get the stand-in engine too."""
    monkeypatch.setattr(workers, "_program", lambda: SCRIPT[1:])
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)


@pytest.mark.usefixtures("workers_of_this_process")
def test_the_progress_of_workers_is_shown_as_one(command: Command, monkeypatch: pytest.MonkeyPatch):
    interrupted(command)
    monkeypatch.setenv("FAKE_ENGINE_SECONDS", "0.01")  # for 3 rows of 904
    report = command.folder / "report.json"
    began = time.monotonic()
    done = command("--devices", "cpu:2", "--report", report)
    took = time.monotonic() - began
    assert done.code == 0, done.stderr
    said = done.stderr.splitlines()
    assert said[:2] == [f"going on with 1 finished part in {command.output}.parts", "loading on 2 × cpu"]
    pattern = r"(\d+)%(?:, about (\d+) s left)?: ([\d,]+) lines, ([\d,]+) tokens, ([\d,]+) tokens/s"
    shown = [re.fullmatch(pattern, line) for line in said[2:]]
    counts = [[int((n or "-1").replace(",", "")) for n in match.groups()] for match in shown if match]
    assert [lines for _, _, lines, _, _ in counts] == sorted(lines for _, _, lines, _, _ in counts)
    assert counts[0][:4] == [81, -1, 4_096, 3 * 4_096]
    assert any(4_096 < lines < 5_000 for _, _, lines, _, _ in counts)
    assert all(tokens == 3 * lines and rate <= 9 / 0.01 for _, _, lines, tokens, rate in counts)
    assert all(lines // 50 - 1 <= share <= lines // 50 + 1 for share, _, lines, _, _ in counts)
    first = next(lines for _, _, lines, _, _ in counts if lines > 4_096)  # of which no time left is said yet
    assert {left for _, left, lines, _, _ in counts if lines <= first} == {-1}
    lefts = [(left, 3 * (5_000 - lines) / rate) for _, left, lines, _, rate in counts if first < lines < 5_000]
    assert lefts
    assert all(left == pytest.approx(expected, rel=0.1, abs=1) for left, expected in lefts if expected > 1)
    assert any(left > 0 for left, _ in lefts)
    told = json.loads(report.read_text())
    assert re.fullmatch(r"100%: 5,000 lines, 15,000 tokens, [\d,]+ tokens/s; finishing", said[2 + len(counts)])
    assert told["seconds"] >= 3.0
    assert told["load_seconds"] > 0.1, "an interpreter starts"
    assert told["seconds"] + told["load_seconds"] <= took
    assert told["tokens_per_second"] == pytest.approx(3 * 904 / told["seconds"])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds worker processes through /proc")
def test_a_killed_worker_loses_nothing(command: Command):
    many_rows(command, 40_000)
    assert command("--quiet").code == 0
    arguments = ["prefill", command.model, "--input", command.input, "--output", "two.jsonl", "--devices", "cpu:2"]
    with subprocess.Popen(
        [*SCRIPT, *map(str, arguments)], stderr=subprocess.PIPE, text=True, cwd=command.folder, env=ENVIRONMENT
    ) as process:
        deadline = time.monotonic() + 60
        parts = command.folder / "two.jsonl.parts"
        while not list(parts.glob("part-*.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(workers_of(process)[0], signal.SIGKILL)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert "worker 0 on cpu died (exit -9); 1 other goes on with its work" in said
    assert (command.folder / "two.jsonl").read_bytes() == command.output.read_bytes()


def test_workers_get_adapters_by_whatever_name_and_however_many(command: Command):
    (command.folder / "adapters").mkdir()
    names = ["lr=1e-4", "-dash", "a b", "😀", *(f"a{i:05}" + "x" * 100 for i in range(2_000))]
    for name in names:
        (command.folder / "adapters" / name).mkdir()
        (command.folder / "adapters" / name / "adapter_config.json").write_text("{}")
    command.input.write_text(json.dumps({"prompt_token_ids": [20, 21], "adapter": [*names[:5], "twin"]}))
    more = ["--adapters", "adapters", "--adapters", "twin=adapters/a b"]
    done = run("prefill", command.model, "--input", command.input, "--output", "two.jsonl", "--devices", "cpu:2", *more,
               cwd=command.folder, env=ENVIRONMENT)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (command.folder / "two.jsonl").read_text().splitlines()]
    assert [row["adapter"] for row in rows] == [*names[:5], "twin"]


def test_workers_that_are_refused_say_why(command: Command):
    done = run("prefill", command.model, "--input", command.input, "--output", "two.jsonl", "--devices", "cpu:2",
               "--adapters", "A=../broken", cwd=command.folder, env=ENVIRONMENT)  # fmt: skip
    assert done.returncode == 2
    said = f"error: adapter 'A' in {command.folder}/../broken is broken\n  - in every way\n"
    assert done.stderr.endswith(f"\n{said}")
    assert command.files() == {"in.jsonl"}


@pytest.mark.parametrize("count", [0, 2])
def test_devices_that_are_not_there_are_refused_with_the_valid_ones(count: int, monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    said = {
        0: "this machine has no usable CUDA device; valid: cpu:N",
        2: "this machine has 2 CUDA devices; valid: all, numbers from 0 to 1, or cpu:N",
    }[count]
    for devices in ("0,2", *(["all"] if count == 0 else [])):
        with pytest.raises(ConfigError, match=f"^--devices {devices}: {said}$"):
            workers.device_names(devices)


def test_workers_start_this_program_as_a_module_if_it_runs_as_one(monkeypatch: pytest.MonkeyPatch):
    """As a file, `__main__.py` would find its neighbour `inspect` before Python's own."""
    monkeypatch.setattr("sys.argv", ["/x/moelora_cli/__main__.py", "prefill"])
    assert workers._program() == ["-m", "moelora_cli"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/moelora", "prefill"])
    assert workers._program() == ["/usr/bin/moelora"]
