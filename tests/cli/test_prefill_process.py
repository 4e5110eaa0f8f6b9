"""`moelora prefill` as a process of its own: terminals, readers that leave, full disks, signals, other locales."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any

import pytest

from cli.prefill_command import ENVIRONMENT, SCRIPT, Command, run

# Terminals.


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
    slow = {**ENVIRONMENT, "FAKE_ENGINE_SECONDS": "0.02", "TERM": "xterm", "COLUMNS": "120"}
    said = on_a_terminal(arguments, slow, "stderr")
    frames = re.findall(r"(\d+)%, about (\d+ s) left: \d+ lines, \d+ tokens, \d+ tokens/s", said)
    assert re.search(r"100%: 600 lines, 600 tokens, \d+ tokens/s; finishing", said)
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


# Outputs that take nothing, signals, locales.


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


def in_shell(redirect: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    line = f"{shlex.join([*SCRIPT, *map(str, arguments)])} {redirect}"
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)


@pytest.mark.parametrize("redirect", ["2>&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_file_is_written_whatever_standard_streams_are_closed(command: Command, redirect: str):
    arguments = ["prefill", command.model, "--input", command.input, "--output", command.output]
    assert in_shell("", *arguments).returncode == 0
    whole = command.output.read_bytes()
    done = in_shell(redirect, *arguments, "--overwrite")
    assert (done.returncode, "AttributeError" in done.stderr) == (0, False)
    assert command.output.read_bytes() == whole
    assert command.files() == {"in.jsonl", "out.jsonl"}


def test_a_log_that_takes_nothing_changes_no_exit_code(command: Command):
    assert in_shell("2>/dev/full", "inspect", command.output.with_name("absent")).returncode == 2
    assert in_shell("2>/dev/full", "prefill", command.model, "--nope").returncode == 2


def test_names_of_files_need_not_be_utf_8(command: Command):
    output = os.fsencode(command.output.with_name("b.jsonl")).replace(b"b.", b"b\xff.")
    report = command.output.with_name("report.json")
    arguments = ["prefill", command.model, "--input", command.input, "--output", output, "--report", report]
    subprocess.run([*SCRIPT, *map(os.fsencode, map(os.fspath, arguments))], env=ENVIRONMENT, check=True)
    assert os.path.exists(output)
    assert json.loads(report.read_bytes())["rows"] > 0


def test_merge_needs_standard_output_only_to_write_there(command: Command):
    shards = command.folder / "shards"
    arguments = ["prefill", command.model, "--input", command.input, "--output", shards, "--shard", "0/1", "--quiet"]
    assert in_shell("", *arguments).returncode == 0
    assert in_shell(">&-", "merge", shards, "--output", command.output).returncode == 0
    assert in_shell("2>&-", "merge", shards, "--output", command.output, "--overwrite").returncode == 0
    assert in_shell("", "merge", shards, "--output", "-").stdout == command.output.read_text()
    refused = in_shell(">&-", "merge", shards, "--output", "-")
    assert (refused.returncode, refused.stderr) == (2, "error: standard output is closed; give --output FILE\n")


def test_no_file_gets_the_number_of_a_stream_that_is_closed(command: Command):
    """Libraries in C print to these numbers: their warnings would end up in the output."""
    script = "import moelora_cli.main as m; m._occupy_closed_streams(); raise SystemExit(open('in.jsonl').fileno())"
    line = f"{shlex.join([SCRIPT[0], '-c', script])} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", line], env=ENVIRONMENT, cwd=command.folder, check=False).returncode > 2
