"""`moelora prefill` from the outside, with an engine that needs no model: files, exit codes, what is said where."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from io import BytesIO, TextIOWrapper
from typing import Any

import pytest

import fake_engine
from cli.prefill_command import ENVIRONMENT, GOOD, SCRIPT, Command, run
from moelora_cli import progress
from moelora_cli.main import main

pytestmark = pytest.mark.usefixtures("no_real_engine")

# Done.


def test_scores_go_to_the_file_and_words_to_stderr(command: Command):
    done = command("--adapters", "A=../adapter", "--with-base")
    assert (done.code, done.stdout) == (0, "")
    assert [(r["id"], r["adapter"]) for r in command.rows] == [
        ("a", "__base__"),
        ("a", "A"),
        ("b", "__base__"),
        ("b", "A"),
    ]
    assert "rows    2 in, 4 lines out, no errors" in done.stderr
    assert "loaded [bold]nothing[/bold]" in done.stderr
    assert command.files() == {"in.jsonl", "out.jsonl"}


def test_standard_output_holds_results_alone(command: Command):
    done = command(output="-")
    assert done.code == 0
    assert [row["id"] for row in done.rows] == ["a", "b"]
    assert "a library prints to stdout" in done.stderr


def test_quiet_says_nothing_but_warnings(command: Command):
    done = command("--adapters", "twin=../adapter", "--with-base", "--quiet", output="-")
    lines = [line for line in done.stderr.splitlines() if line != "a library prints to stdout"]
    assert len(lines) == 1
    assert lines[0].startswith("warning: adapter 'twin' scores exactly as the base")


def test_standard_input(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b'\xef\xbb\xbf{"prompt": "x"}\r\n')))
    assert command(input_="-", output="-").rows[0]["error"] is None


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet", "-"])
def test_a_report_that_ends_in_html_is_a_page(command: Command, output: str):
    done = command("--report", "r.html", "--adapters", "A=../adapter", "--with-base", output=output)
    assert done.code == 0
    page = (command.folder / "r.html").read_text()
    assert page.startswith("<!doctype html>")
    assert len(re.findall(r"<tr><td>(?:base|A)</td><td class=n>2</td><td class=n>0</td>", page)) == 2


def test_the_json_report_tells_tokens_by_second(command: Command):
    command("--report", "r.json")
    report = json.loads((command.folder / "r.json").read_text())
    assert report["timeline"]["points"][-1][1] == report["tokens"]


def test_a_pipe_is_read_once(command: Command):
    """As a shell hands it over for `--input <(zcat rows.gz)`."""
    pipe = command.folder / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"cat in.jsonl > {pipe}"], cwd=command.folder):
        assert command(input_=pipe).code == 0
    assert [row["id"] for row in command.rows] == ["a", "b"]
    assert "--devices needs files" in command("--devices", "cpu:2", input_=pipe, output="new.jsonl").stderr
    assert "--shard needs a file" in command("--shard", "0/2", input_=pipe, output="new").stderr


@pytest.mark.parametrize("output", ["out.jsonl", "-", "shards"])
def test_the_share_done_of_a_file_ascends_to_the_whole(command: Command, monkeypatch: pytest.MonkeyPatch, output: str):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    command.input.write_text("{\n" + "".join(f'{{"prompt_token_ids": [{i}]}}\n' for i in range(20, 120)) + "{")
    shard = ["--shard", "0/1"] if output == "shards" else []
    done = command("--adapters", "A=../adapter", "--with-base", *shard, output=output)
    shares = [int(share) for share in re.findall(r"^(\d+) %", done.stderr, re.M)]
    assert shares == sorted(shares)
    assert len(set(shares)) > 30
    assert shares[-1] == 100


def on_a_terminal(arguments: list[Any], environment: dict[str, str], *streams: str) -> str:
    """What the command says on a terminal to which these of its streams go."""
    ours, theirs = pty.openpty()
    options = dict.fromkeys(streams, theirs)
    with subprocess.Popen([*SCRIPT, *map(str, arguments)], env=environment, **options) as process:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # as Linux says that the other end is closed
            while more := os.read(ours, 65_536):
                said += more
    os.close(ours)
    assert process.returncode == 0
    return said.decode()


def test_a_terminal_shows_the_share_done_and_the_time_left(command: Command):
    command.input.write_text("".join(f'{{"prompt_token_ids": [{i}]}}\n' for i in range(20, 620)))
    arguments = ["prefill", command.model, "--input", command.input, "--output", command.output]
    slow = {**ENVIRONMENT, "FAKE_ENGINE_SECONDS": "0.005", "TERM": "xterm", "COLUMNS": "120"}
    said = on_a_terminal(arguments, slow, "stderr")
    frames = re.findall(r"(\d+) %, about (\d+ s) left: \d+ lines, \d+ tokens, \d+ tokens/s", said)
    assert re.search(r"100 %: 600 lines, 600 tokens, \d+ tokens/s; finishing", said)
    shares = [int(share) for share, _ in frames]
    assert shares == sorted(shares)
    assert len(set(shares)) > 3
    assert shares[-1] <= 100


def test_results_on_a_terminal_stand_alone_on_their_lines(command: Command):
    command.input.write_text("".join(f'{{"prompt_token_ids": [{i}]}}\n' for i in range(20, 50)))
    arguments = ["prefill", command.model, "--input", command.input, "--output", "-"]
    slow = {**ENVIRONMENT, "FAKE_ENGINE_SECONDS": "0.05", "TERM": "xterm", "COLUMNS": "120"}
    said = on_a_terminal(arguments, slow, "stdout", "stderr")
    results = [json.loads(line) for line in said.splitlines() if "logprob_sum" in line]
    assert [row["id"] for row in results] == list(range(1, 31))
    assert "\x1b" not in said, "no live line"


@pytest.mark.parametrize(
    ("output", "more"), [("out.jsonl", ()), ("-", ()), ("out.parquet", ()), ("out.parquet", ("--devices", "cpu:2"))]
)
def test_for_an_input_without_a_good_row_nothing_is_loaded(
    command: Command, monkeypatch: pytest.MonkeyPatch, output: str, more: tuple[str, ...]
):
    command.input.write_text(
        '{"text": "a"}\n\n{"prompt_token_ids": [1], "adapter": "B"}\n{"prompt_token_ids": [9999]}\n'
    )
    arguments = ["--adapters", "A=../adapter", "--report", "r.html", "--metrics-file", "m.prom", *more]
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["moelora.engine"], "PrefillEngine", None)
        done = command(*arguments, output=output)
    assert done.code == 3, done.stderr
    assert "no row of the input can be scored; the model is not loaded" in done.stderr
    assert "rows    3 in, 3 lines out, 3 of them errors" in done.stderr
    written = {"-": set(), "out.jsonl": {"out.jsonl"}, "out.parquet": {"out.parquet"}}[output]
    assert command.files() == {"in.jsonl", "r.html", "m.prom", *written}
    if output == "out.jsonl":
        alone = command.output.read_bytes()
        command.input.write_text(command.input.read_text() + '{"prompt_token_ids": [1]}\n')
        assert command(*arguments, "--overwrite").code == 3
        assert command.output.read_bytes().startswith(alone)
        assert len(command.rows) == 4


def test_a_run_without_a_good_row_leaves_no_parts_of_another(command: Command):
    parts = command.folder / "out.jsonl.parts"
    command.input.write_text('{"prompt_token_ids": [20]}\n' * 5_000 + '{"prompt_token_ids": [15]}\n')
    assert command("--quiet").code == 1
    command.input.write_text("{}\n")
    assert "changed since: input" in command("--quiet").stderr
    assert parts.exists()
    assert command("--quiet", "--overwrite").code == 3
    assert command.files() == {"in.jsonl", "out.jsonl"}


def test_report_and_metrics(command: Command):
    done = command(
        "--report", "new/report.json", "--metrics-file", "m.prom", "--top-k", 2, "--adapters", "A=../adapter"
    )
    assert done.code == 0
    report = json.loads((command.folder / "new" / "report.json").read_text())
    assert report["tokens"] == sum(
        r["num_tokens"] + sum(c["num_tokens"] for c in r.get("choices", [])) for r in command.rows
    )
    assert report["run"]["adapters"] == {"A": "../adapter"}
    assert report["run"]["top_k"] == 2
    assert report["engine"]["padding_share"] == 0.1
    assert "moelora_requests_total 2.0" in (command.folder / "m.prom").read_text()
    assert command("--report", "new/report.json", "--overwrite").code == 0


def test_options_reach_the_engine(command: Command, monkeypatch: pytest.MonkeyPatch):
    seen = []

    class Spy(fake_engine.FakeEngine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            seen.append(kwargs["options"])

    monkeypatch.setattr(sys.modules["moelora.engine"], "PrefillEngine", Spy)
    options = "--backend torch --graph off --device cuda:1 --dtype float32 --max-tokens 9 --max-requests 8 --slots 7"
    more = (
        "--buckets 16,64 --load-format dummy --attention triton --batch-invariant --seed 5 --lora-b-layout rank_major"
    )
    assert command(*options.split(), *more.split()).code == 0
    assert seen == [
        fake_engine.EngineOptions(
            backend="torch",
            graph=fake_engine.GraphMode.OFF,
            device="cuda:1",
            dtype="float32",
            max_tokens=9,
            max_requests=8,
            slots=7,
            buckets=(16, 64),
            load_format="dummy",
            attention="triton",
            batch_invariant=True,
            lora_b_layout="rank_major",
            seed=5,
        )
    ]


def test_a_dry_run_prints_ids_and_writes_nothing(command: Command):
    sys.modules["moelora.engine"] = None  # type: ignore[assignment]
    command.input.write_text('{"prompt": "<s>hello", "choices": [" world"]}\n{"prompt_token_ids": [2000]}\n')
    done = command("--dry-run", "--adapters", "A=../adapter", "--default-adapter", "A")
    assert done.code == 3
    assert done.rows[0]["adapter"] == "A"
    assert done.rows[0]["token_ids"][0] != done.rows[0]["token_ids"][1]
    assert done.rows[0]["choices"][0]["text"] == " world"
    assert "outside the vocabulary" in done.rows[1]["error"]
    assert command.files() == {"in.jsonl"}


# Rows with errors.


def test_rows_with_errors_give_code_3_and_the_rest_is_scored(command: Command):
    bad = b'{"id": 7, "prompt": "x"}\n{"id": "7", "prompt": "y"}\n[1]\n{"prompt": "a\\ud83d"}\n{"prompt": "caf\xe9"}\n'
    command.input.write_bytes(bad + '{"prompt": "a\u2028b", "metadata": "c\u2028d"}\n'.encode())
    done = command("--report", "r.json")
    assert done.code == 3
    assert [row["error"] is None for row in command.rows] == [True, False, False, False, False, True]
    assert command.rows[5]["metadata"] == "c\u2028d"
    assert "rows    6 in, 6 lines out, 4 of them errors" in done.stderr
    assert "row error: line 2: duplicate id '7'" in done.stderr
    assert "of the output have an error" not in done.stderr, "all are listed"
    command.input.write_text('{"prompt_token_ids": [9999]}\n' * 7)
    done = command("--adapters", "A=../adapter", "--adapters", "B=../adapter", "--overwrite")
    assert "rows    7 in, 14 lines out, 14 of them errors" in done.stderr
    assert done.stderr.count("row error: ") == 5
    assert done.stderr.splitlines()[-1] == "14 lines of the output have an error; each says which"
    assert json.loads((command.folder / "r.json").read_text())["error_rows"] == 4


# Refused before any work.

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
    (["--devices", "0,99"], "CUDA devices"),
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
    assert done.stderr.splitlines()[-1].startswith("error: ")
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


# Failures.


def test_an_unexpected_failure_gives_code_1_and_leaves_nothing(command: Command, capfd: pytest.CaptureFixture[str]):
    command.input.write_text(GOOD + '{"prompt_token_ids": [15]}\n')
    command.output.write_text("old")
    done = command("--overwrite", "--report", "r.json")
    assert done.code == 1
    assert done.stderr.splitlines()[-1] == "error: RuntimeError: token 15 breaks the engine (--debug shows where)"
    assert command.output.read_text() == "old"
    assert command.files() == {"in.jsonl", "out.jsonl"}
    with pytest.raises(SystemExit) as caught:
        main(["prefill", str(command.model), "--input", str(command.input), "--output", "new.jsonl", "--debug"])
    assert caught.value.code == 1
    assert "Traceback" in capfd.readouterr().err


# As a process of its own.


def test_a_reader_that_leaves_is_no_error(command: Command):
    command.input.write_text('{"prompt_token_ids": [20, 21, 22]}\n' * 20_000)
    arguments = ["prefill", command.model, "--input", command.input, "--output", "-", "--quiet"]
    with subprocess.Popen(
        [*SCRIPT, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["id"] == 1
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1
    assert said == "a library prints to stdout\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full stands for a full disk")
@pytest.mark.parametrize(
    ("output", "more", "name"),
    [("-", [], "standard output"), ("-", ["--dry-run"], "standard output"), ("/dev/full", [], "/dev/full")],
)
def test_a_full_disk_is_told_with_the_name_of_the_output(command: Command, output: str, more: list[str], name: str):
    arguments = ["prefill", command.model, "--input", command.input, "--output", output, "--quiet", *more]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*SCRIPT, *map(str, arguments)], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=60
        )
    assert done.returncode == 1
    assert f"error: {name}: No space left on device" in done.stderr.splitlines()
    assert done.stderr.count("No space") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_no_file(command: Command, number: int, code: int):
    """Rows come through a pipe that stays open, so the run is certain to be under way when it is stopped."""
    arguments = ["prefill", command.model, "--input", "-", "--output", command.output, "--quiet"]
    with subprocess.Popen(
        [*SCRIPT, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        # A suite that runs in the background ignores SIGINT, and would hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write('{"prompt_token_ids": [20, 21]}\n' * 10)
        process.stdin.flush()
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            if any(name.endswith(".tmp") for name in command.files()):
                break
            time.sleep(0.02)
        process.send_signal(number)
        said = process.stderr.read()
        process.stdin.close()
    assert process.returncode == code
    assert "Traceback" not in said
    assert command.files() == {"in.jsonl"}


def test_another_locale_changes_nothing(command: Command):
    command.input.write_bytes(b'\xef\xbb\xbf{"id": "\xc3\xbc", "prompt": "gr\xc3\xbcn"}\r\n{"prompt": "\xe9"}\r\n')
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "cp1252", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = run("prefill", command.model, "--input", command.input, "--output", "-", env=environment)
    assert done.returncode == 3
    assert json.loads(done.stdout.splitlines()[0])["id"] == "ü"
    assert "not UTF-8" in json.loads(done.stdout.splitlines()[1])["error"]


@pytest.mark.parametrize(("redirect", "code"), [(">&-", 2), (">/dev/full", 1)])
def test_a_standard_output_that_takes_nothing_is_told_without_a_traceback(command: Command, redirect: str, code: int):
    arguments = [*SCRIPT, "prefill", str(command.model), "--input", str(command.input), "--output", "-", "--quiet"]
    line = f"{shlex.join(arguments)} {redirect}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert done.returncode == code
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "AttributeError" not in done.stderr
