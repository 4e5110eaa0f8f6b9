"""Runs in parts from the outside: killed and gone on with, in shards."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cli.prefill_command import ENVIRONMENT, SCRIPT, Command, Outcome, interrupted, many_rows, run, workers_of
from moelora.jobs.parts import RUN_LOCK, hold_folder
from moelora_cli.main import main

pytestmark = pytest.mark.usefixtures("no_real_engine")


def merge(command: Command, *arguments: Any) -> Outcome:
    command._capfd.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([*map(str, ["merge", *arguments])])
    return Outcome(int(caught.value.code or 0), *command._capfd.readouterr())


def test_a_killed_run_goes_on_to_the_same_file(command: Command):
    many_rows(command, 20_000)
    whole = command.folder / "whole.jsonl"
    assert command("--quiet", output=whole).code == 0
    arguments = ["prefill", command.model, "--input", command.input, "--output", command.output, "--quiet"]
    parts = command.folder / "out.jsonl.parts"
    for wanted in (1, 3):
        with subprocess.Popen([*SCRIPT, *map(str, arguments)], stderr=subprocess.DEVNULL, env=ENVIRONMENT) as process:
            deadline = time.monotonic() + 60
            while len(list(parts.glob("part-*.jsonl"))) < wanted and time.monotonic() < deadline:
                time.sleep(0.01)
            process.kill()
        assert not command.output.exists()
    (command.folder / ".out.jsonl.0123abcd.tmp").write_text("killed while the output was written")
    done = command()
    assert done.code == 0
    assert re.search(r"going on with \d finished parts in .*/out.jsonl.parts\n", done.stderr)
    assert command.output.read_bytes() == whole.read_bytes()
    assert command.files() == {"in.jsonl", "out.jsonl", "whole.jsonl"}


KILLED = """
import os, pathlib, sys
import fake_engine
from moelora.jobs.parts import PartStore
from moelora_cli.main import main
fake_engine.install()
real_discard, real_unlink, calls = PartStore.discard, pathlib.Path.unlink, []
def unlink(path, **options):
    calls.append(path)
    if len(calls) > {calls}:
        os._exit(9)
    real_unlink(path, **options)
def discard(store):
    if "{moment}" == "discard":
        os._exit(9)
    pathlib.Path.unlink = unlink
    real_discard(store)
PartStore.discard = discard
main(sys.argv[1:])
"""
"""A run that is killed when its output stands there, before it has removed more than so many files of its parts."""


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(("moment", "calls"), [("discard", 0), ("unlink", 1), ("unlink", 3)])
def test_a_run_killed_while_its_parts_go_is_finished_without_the_model(
    command: Command, monkeypatch: pytest.MonkeyPatch, moment: str, calls: int, ending: str
):
    many_rows(command, 10_000)
    command.input.write_text(command.input.read_text() + '{"prompt_token_ids": [5000]}\n')  # a bad row
    output, report = command.folder / f"out.{ending}", command.folder / "report.json"
    script = KILLED.format(moment=moment, calls=calls)
    arguments = ["prefill", command.model, "--input", command.input, "--output", output, "--report", report]
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], env=ENVIRONMENT, check=False)
    assert done.returncode == 9
    made, left = output.read_bytes(), set((command.folder / f"{output.name}.parts").iterdir())
    assert left
    other = command("--top-k", 2, output=output)
    assert (other.code, "changed since" in other.stderr) == (2, True)
    monkeypatch.setattr("moelora_cli.run.Run.score", None)
    done = command("--report", report, output=output)
    assert done.code == 3, done.stderr
    assert f"the output was whole already; what its run had left in {output}.parts is removed" in done.stderr
    assert "rows    10,001 in, 10,001 lines out, 1 of them an error" in done.stderr
    assert (json.loads(report.read_bytes())["rows"], output.read_bytes()) == (10_001, made)
    assert command.files() == {"in.jsonl", output.name, "report.json"}


def test_an_output_may_be_a_link_into_a_folder_that_is_not_there(command: Command):
    there = command.folder / "there"
    command.output.symlink_to(there / "real.jsonl")
    done = command()
    assert done.code == 0
    assert f"making the folder {there}, which --output names" in done.stderr
    assert (there / "real.jsonl").read_bytes() == command.output.read_bytes()
    assert command.files() == {"in.jsonl", "out.jsonl", "there"}
    shards = command.folder / "shards"
    shards.symlink_to(command.folder / "elsewhere")
    assert command("--shard", "0/1", output=shards).code == 0
    assert command("--quiet", output="x" * 300).code == 2


def test_an_output_that_is_not_that_of_the_killed_run_is_kept(command: Command):
    many_rows(command, 5_000)
    arguments = ["prefill", command.model, "--input", command.input, "--output", command.output]
    script = KILLED.format(moment="discard", calls=0)
    subprocess.run([sys.executable, "-c", script, *map(str, arguments)], env=ENVIRONMENT, check=False)
    made = command.output.read_bytes()
    command.output.write_bytes(made[:-1] + b" ")  # of the same size
    done = command()
    assert (done.code, "exists; give another name, or --overwrite" in done.stderr) == (2, True)
    assert command.output.read_bytes() == made[:-1] + b" "
    command.output.unlink()
    assert command().code == 0  # from its parts
    assert command.output.read_bytes() == made
    assert command.files() == {"in.jsonl", "out.jsonl"}


@pytest.mark.parametrize("more", [(), ("--devices", "cpu:2")], ids=["alone", "workers"])
def test_a_run_killed_before_its_first_part_keeps_nothing_from_another(command: Command, more: tuple[str, ...]):
    many_rows(command, 100)
    arguments = ["prefill", command.model, "--input", command.input, "--output", command.output, "--quiet", *more]
    manifest = command.folder / "out.jsonl.parts" / "manifest.json"
    slow = {**ENVIRONMENT, "FAKE_ENGINE_SECONDS": "0.5"}
    with subprocess.Popen([*SCRIPT, *map(str, arguments)], stderr=subprocess.DEVNULL, env=slow) as process:
        deadline = time.monotonic() + 60
        while not manifest.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        left = workers_of(process)
        process.kill()
    while any(Path(f"/proc/{worker}").exists() for worker in left) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert manifest.exists()
    done = run(*arguments, "--adapters", "A=../adapter", cwd=command.folder, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert {row["adapter"] for row in command.rows} == {"A"}
    assert command.files() == {"in.jsonl", "out.jsonl"}


def test_reports_of_a_run_that_went_on_say_what_is_of_it_alone(command: Command):
    interrupted(command)
    done = command("--report", "r.html", "--metrics-file", "m.prom")
    assert done.code == 0
    page, metrics = ((command.folder / name).read_text() for name in ("r.html", "m.prom"))
    tokens = sum(row["num_tokens"] for row in command.rows)
    alone = sum(row["num_tokens"] for row in command.rows[4_096:])
    assert "This run went on from an earlier one." in page
    assert f"of this one alone, which scored {alone:,} of the tokens" in page
    assert f"moelora_tokens_total {tokens}.0" in metrics
    told = dict(re.findall(r"# HELP (\S+) (.*)", metrics))
    for name in ("moelora_tokens_total", "moelora_output_rows_total"):
        assert told[name].endswith("what earlier processes scored, which this run goes on from, counts too.")
    for name in ("moelora_run_seconds", "moelora_eager_passes_total", "moelora_cuda_graph_passes_total"):
        assert told[name].endswith("Of this run's own processes, without those that it goes on from.")
    command.output.unlink()
    assert command("--report", "r.html").code == 0
    assert "went on from" not in (command.folder / "r.html").read_text()


def test_going_on_is_said_unless_quiet(command: Command):
    for arguments, said in (((), True), (("--quiet",), False)):
        interrupted(command, "--overwrite")
        done = command(*arguments, "--overwrite")
        assert done.code == 0
        assert "going on" not in done.stderr, "nothing is kept"
        command.output.unlink()
        interrupted(command)
        done = command(*arguments)
        assert done.code == 0
        assert (f"going on with 1 finished part in {command.output}.parts" in done.stderr.splitlines()) is said
        command.output.unlink()


@pytest.mark.parametrize("more", [(), ("--overwrite",)], ids=["same", "overwrite"])
def test_an_interrupt_while_the_model_loads_says_what_is_kept(
    command: Command, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    def loading(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    interrupted(command)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["moelora.engine"].PrefillEngine, "__init__", loading)
        done = command(*more)
    goes_on = f"the same command{' without --overwrite' if more else ''} goes on from there"
    assert done.code == 130
    assert done.stderr.splitlines()[-2:] == [
        f"kept 1 finished part in {command.output}.parts; {goes_on}",
        "error: interrupted",
    ]
    assert "going on with 1 finished part" in command().stderr


def test_parts_of_another_run_are_refused_by_what_changed(command: Command, monkeypatch: pytest.MonkeyPatch):
    many_rows(command, 5_000)
    command.input.write_text(command.input.read_text() + '{"prompt_token_ids": [15]}\n')  # the engine dies of 15
    assert command("--quiet").code == 1
    assert command.files() == {"in.jsonl", "out.jsonl.parts"}
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["moelora.engine"], "PrefillEngine", None)  # refused before minutes of loading
        refused = command("--quiet", "--top-k", 1)
        assert refused.code == 2
        assert "option top_k (0 before, 1 now)" in refused.stderr
        assert "adapter A (new)" in command("--quiet", "--adapters", "A=../adapter").stderr
        many_rows(command, 5_000)
        assert "changed since: input" in command("--quiet").stderr
        refused = run("prefill", command.model, "--input", command.input, "--output", command.output, "--devices",
                      "cpu:2", "--quiet", cwd=command.folder, env=ENVIRONMENT)  # fmt: skip
        assert (refused.returncode, "changed since: input" in refused.stderr) == (2, True)
        with hold_folder(command.folder / "out.jsonl.parts", RUN_LOCK):
            assert "in use by another run" in command("--quiet", "--overwrite").stderr
    refused = command("--quiet", "--slots", 3)
    assert "option slots (None before, 3 now)" in refused.stderr
    assert command("--quiet", "--overwrite").code == 0
    assert len(command.rows) == 5_000


@pytest.mark.parametrize("changing", ["adapter A", "input"])
def test_what_changes_while_the_engine_loads_is_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch, changing: str
):
    """Its parts would be taken up by a run with the file that the fingerprint is of."""
    many_rows(command, 100)
    adapter = command.folder / "A" / "adapter_config.json"
    adapter.parent.mkdir()
    adapter.write_text("{}")
    engine = sys.modules["moelora.engine"].PrefillEngine
    load, path = engine.__init__, command.input if changing == "input" else adapter

    def slow(self: Any, *given: Any, **options: Any) -> None:
        load(self, *given, **options)
        path.write_text(path.read_text() + "\n")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "__init__", slow)
        refused = command("--quiet", "--adapters", f"A={adapter.parent}")
    assert (refused.code, f"changed while the run began: {changing}; give" in refused.stderr) == (2, True)
    assert command.files() == {"A", "in.jsonl"}
    assert command("--quiet", "--adapters", f"A={adapter.parent}").code == 0


def test_shards_merge_to_the_single_run(command: Command):
    many_rows(command, 10_000)
    assert command("--quiet").code == 0
    for shard in range(3):
        assert merge(command, "shards", "--output", "merged.jsonl").code == 2
        assert command("--quiet", "--shard", f"{shard}/3", output="shards").code == 0
    merged = merge(command, "shards", "--output", "merged.jsonl")
    assert (merged.code, merged.stdout) == (0, "")
    assert merged.stderr == "3 shards merged; rows: 10,000 in, 10,000 lines out, no errors\n"
    assert (command.folder / "merged.jsonl").read_bytes() == command.output.read_bytes()
    assert "exists" in merge(command, "shards", "--output", "merged.jsonl").stderr


@pytest.mark.parametrize(
    "more", [("--shard", "1/3"), ("--shard", "1/2", "--top-k", 1), ("--shard", "1/2", "--slots", 3)]
)
def test_a_refused_shard_leaves_the_folder_as_it_was(command: Command, more: tuple[Any, ...]):
    many_rows(command, 5_000)
    assert command("--quiet", "--shard", "0/2", output="shards").code == 0
    before = sorted(path.name for path in (command.folder / "shards").iterdir())
    refused = command("--quiet", *more, output="shards")
    assert (refused.code, "holds parts of another run" in refused.stderr) == (2, True)
    assert sorted(path.name for path in (command.folder / "shards").iterdir()) == before
    assert command("--quiet", "--shard", "1/2", output="shards").code == 0


def test_a_shard_counts_its_own_parts(command: Command):
    many_rows(command, 10_000)
    assert "going on" not in command("--shard", "0/2", output="shards").stderr
    assert "going on" not in command("--shard", "1/2", output="shards").stderr
    again = command("--shard", "0/2", output="shards").stderr
    assert "going on with 2 finished parts in shards" in again.splitlines()
