"""`moelora prefill` from the outside, with an engine that needs no model: files, exit codes, what is said where."""

import json
import os
import re
import subprocess
import sys
import time
from io import BytesIO, TextIOWrapper
from typing import Any

import pytest

import fake_engine
from cli.prefill_command import GOOD, Command
from moelora_cli import progress, run
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
    assert len(re.findall(r"<tr><td>(?:__base__|A)</td><td class=n>2</td><td class=n>0</td>", page)) == 2


def test_the_json_report_tells_tokens_by_second(command: Command, monkeypatch: pytest.MonkeyPatch):
    def slow(*_: Any, **__: Any) -> None:
        time.sleep(0.3)
        finish(*_, **__)

    finish = run.finish_parts
    monkeypatch.setattr(run, "finish_parts", slow)  # what is behind the last score is no scoring
    command("--report", "r.json")
    report = json.loads((command.folder / "r.json").read_text())
    seconds, tokens = report["timeline"]["points"][-1]
    assert tokens == report["tokens"]
    assert seconds == pytest.approx(report["seconds"], abs=0.001)


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
    shares = [int(share) for share in re.findall(r"^(\d+)%", done.stderr, re.M)]
    assert shares == sorted(shares)
    assert len(set(shares)) > 30
    assert shares[-1] == 100


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


def test_a_folder_that_is_made_is_named(command: Command):
    said = "making the folder {}, which --output names and which is not there\n"
    done = command(output="new/deep/out.jsonl")
    assert (done.code, said.format("new/deep") in done.stderr) == (0, True)
    assert "making the folder" not in command(output="new/deep/again.jsonl").stderr
    assert "making the folder" not in command(output="out.jsonl").stderr
    assert "making the folder" not in command("--dry-run", output="other/out.jsonl").stderr
    assert not (command.folder / "other").exists()


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
