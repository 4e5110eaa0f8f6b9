"""What `moelora prefill` refuses before any work: bad options, files, models."""

import os
import re

import pytest
import torch

from cli.prefill_command import GOOD, Command
from moelora_cli.main import main

pytestmark = pytest.mark.usefixtures("no_real_engine")

REFUSED = [
    (["--adapters", "A=../adapter", "--adapters", "A=../broken"], "'A' is given twice"),
    (["--adapters", "*=/x"], "stands for all adapters"),
    (["--adapters", "/none"], "no such file or folder"),
    (["--adapters", "A=../broken"], "adapter 'A' in ../broken is broken"),
    (["--adapters", "A=none"], "--adapters A=none: the folder of adapter 'A', none, does not exist"),
    (["--adapters", "A=in.jsonl"], "adapter 'A' must be a folder, and in.jsonl is a file"),
    (["--default-adapter", "A1", "--adapters", "A=../adapter"], "unknown default adapter 'A1'. Did you mean 'A'?"),
    (["--default-adapter", "*"], "no adapters are given"),
    (["--top-k", "-1"], "--top-k"),
    (["--top-k", "2001"], "the vocabulary has only 2000 tokens"),
    (["--max-tokens", "0"], "--max-tokens"),
    (["--max-tokens", "4k"], "'4k' is not a valid integer."),
    (["--max-length", "x"], "--max-length"),
    (["--buckets", "64,16"], "positive and ascend"),
    (["--buckets", "a"], "no list of token counts"),
    (["--device", "tpu"], "valid: auto, cpu, cuda, cuda:N"),
    (["--logprobs", "all"], "'sum', 'tokens'"),
    (["--graph", "on"], "'auto', 'full', 'breakable', 'off'"),
    (["--shard", "2/2"], "is not I/N with 0 ≤ I < N"),
    (["--shard", "0/2", "--output", "-"], "a folder as --output"),
    (["--shard", "auto"], "neither RANK and WORLD_SIZE"),
    (["--devices", "gpu"], "valid are all, GPU numbers like 0,1, or cpu:N"),
    (["--devices", "cpu:2", "--shard", "0/2", "--output", "d"], "cannot be combined"),
    (["--devices", "0,99"], "or cpu:N" if torch.cuda.is_available() else "no usable CUDA device; valid: cpu:N"),
    (["--report", "-"], "standard output is for results"),
    (["--report", "in.jsonl"], "--input and --report are the same file"),
    (["--metrics-file", "out.jsonl"], "--output and --metrics-file are the same file"),
    (["--report", "in.jsonl/x"], "is not a directory"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_bad_options_are_refused(command: Command, arguments: list[str], message: str):
    done = command(*arguments)
    assert done.code == 2
    assert message in done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("  - ")]  # reasons, below the message
    assert said[-1].startswith("error: ")
    assert command.files() == {"in.jsonl"}
    assert command.input.read_text() == GOOD


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="needs a file system in which root can make no folder")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--output", "/proc/x/q.jsonl"], "--output /proc/x/q.jsonl"),
        (["--output", "/proc/q.jsonl"], "--output /proc/q.jsonl"),
        (["--output", "/proc/x", "--shard", "0/2"], "--output /proc/x"),
        (["--report", "/proc/x/r.html"], "--report /proc/x/r.html"),
    ],
)
def test_outputs_in_a_folder_that_takes_nothing_are_refused(command: Command, arguments: list[str], named: str):
    done = command(*arguments)
    assert done.code == 2
    assert f"error: {named}: the folder /proc is not writable (" in done.stderr
    assert command.files() == {"in.jsonl"}


def test_bad_inputs_are_refused(command: Command):
    (command.folder / "empty.jsonl").write_text("\n")
    (command.folder / "x.parquet").write_text("PAR1")
    (command.folder / "notes.md").write_text("# notes\n\nMany lines.\n")
    for path, message in [
        ("none.jsonl", "does not exist"),
        (".", "is a directory"),
        ("empty.jsonl", "is empty"),
        ("x.parquet", "is no readable Parquet file"),
        ("notes.md", "is not named .jsonl or .ndjson, and its first line is no row (not valid JSON"),
    ]:
        done = command(input_=path)
        assert done.code == 2
        assert message in done.stderr
        assert not command.output.exists()


def test_bad_models_are_refused(command: Command):
    done = command(model="none/such")
    assert done.code == 2
    assert "'none/such' is neither a folder nor" in done.stderr


def test_names_that_are_too_long_are_refused(command: Command):
    name = "x" * 300
    for given in ({"model": name}, {"input_": name}, {"output": name}):
        outcome = command(**given)
        assert outcome.code == 2, given
        assert re.search(r"File name too long|has 300 bytes|does not exist|neither", outcome.stderr)
    assert command("--adapters", f"a={name}").code == 2
    assert command("--report", name).code == 2
    assert command.files() == {"in.jsonl"}


def test_an_existing_output_needs_overwrite(command: Command):
    command.output.write_text("precious")
    done = command()
    assert done.code == 2
    assert "out.jsonl exists; give another name, or --overwrite" in done.stderr
    assert command.output.read_text() == "precious"
    assert command("--overwrite").code == 0
    assert len(command.rows) == 2
    assert "same file" in command("--overwrite", output="in.jsonl").stderr
    assert command.input.read_text() == GOOD


def test_missing_arguments_are_usage_errors(command: Command, capfd: pytest.CaptureFixture[str]):
    for arguments, message in [
        (["prefill"], "Missing argument 'MODEL'"),
        (["prefill", "m", "--output", "x"], "Missing option '--input'"),
        (["prefill", str(command.model), "--input", str(command.input)], "--output is missing"),
        (["prefil"], "No such command"),
        (["serve", "m"], "No such command"),
    ]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert message in capfd.readouterr().err
