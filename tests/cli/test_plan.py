"""`moelora plan` from the outside: what it prints, JSON, exit codes, and that `prefill` then reports the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from moelora import memory
from moelora.jobs import windows
from moelora.scoring import head
from moelora_cli import progress
from moelora_cli.command import size
from moelora_cli.main import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    lines = (EXAMPLE / "choices.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([*lines, '{"prompt": "def main():", "adapter": "python"}', '{"prompt": 3}']))
    return path


def moelora(capfd: pytest.CaptureFixture[str], command: str, rows: Path, *arguments: Any) -> tuple[int, str, str]:
    capfd.readouterr()
    shared = ["--adapters", f"{EXAMPLE}/adapters", "--with-base", "--slots", "2", "--device", "cpu", "--quiet"]
    with pytest.raises(SystemExit) as caught:
        main([command, str(EXAMPLE), "--input", str(rows), *shared, *map(str, arguments)])
    stdout, stderr = capfd.readouterr()
    return int(caught.value.code or 0), stdout, stderr


@pytest.mark.parametrize("requests_of_a_window", [4096, 6])
def test_the_run_reports_what_was_planned(
    capfd: pytest.CaptureFixture[str], rows: Path, monkeypatch: pytest.MonkeyPatch, requests_of_a_window: int
):
    monkeypatch.setattr(windows, "_REQUESTS", requests_of_a_window)
    code, stdout, _ = moelora(capfd, "plan", rows, "--json", "--max-tokens", 300)
    assert code == 3
    planned = json.loads(stdout)
    report_file, output = rows.with_name("report.json"), rows.with_name("out.jsonl")
    code, _, _ = moelora(capfd, "prefill", rows, "--max-tokens", 300, "--output", output, "--report", report_file)
    assert code == 3
    report = json.loads(report_file.read_text())
    assert (planned["engine"]["adapter_loads"] > 4) == (requests_of_a_window == 6)
    for one, other in ((planned, report), (planned["engine"], report["engine"])):
        shared = (set(one) & set(other)) - {"engine"}
        assert len(shared) >= 8
        assert {key: one[key] for key in shared} == {key: other[key] for key in shared}


def test_the_plan_is_no_wider_than_the_terminal(
    capfd: pytest.CaptureFixture[str], rows: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    _, narrow, _ = moelora(capfd, "plan", rows)
    monkeypatch.setenv("COLUMNS", "1000")
    _, wide, _ = moelora(capfd, "plan", rows)
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
    assert narrow.split() == wide.split()


def test_the_lines_for_people(capfd: pytest.CaptureFixture[str], rows: Path):
    code, stdout, _ = moelora(capfd, "plan", rows, "--graph", "off")
    assert code == 3
    for part in (
        "qwen3_moe in float32 on cpu, backend torch",
        "6 in, 22 lines out, 1 of them an error",
        "eager: graphs are switched off (--graph off)",
        "4 in 2 slots, loaded 4 times in all",
        "base weights",
        "activations of the largest batch",
        "row error  line 6: prompt must be a string",
    ):
        assert part in stdout


def test_sequences_longer_than_a_batch_are_told(capfd: pytest.CaptureFixture[str], rows: Path):
    lengths = [30, 30, 41, 30, 97]
    rows.write_text("".join(json.dumps({"prompt_token_ids": [7] * n, "adapter": "python"}) + "\n" for n in lengths))
    _, stdout, _ = moelora(capfd, "plan", rows, "--max-tokens", 40)
    assert "at most 40 tokens and 40 requests each; 2 longer sequences, of up to 97 tokens, alone" in stdout
    assert f" {(30 * 3 + 41 + 97) / (40 * 3 + 41 + 97):.0%} full" in stdout
    activations = json.loads(moelora(capfd, "plan", rows, "--max-tokens", 97, "--json")[1])["engine"]["memory"]
    assert f"{size(activations['activations'])}  activations of the longest sequence, 97 tokens" in stdout
    capfd.readouterr()
    arguments = ["--input", str(rows), "--output", str(rows.with_name("out.jsonl")), "--max-tokens", "40"]
    with pytest.raises(SystemExit):
        main(["prefill", str(EXAMPLE), "--adapters", f"{EXAMPLE}/adapters", "--device", "cpu", *arguments])
    said = "longest 97 tokens in one sequence; those longer than --max-tokens (40) run alone"
    assert said in capfd.readouterr().err.splitlines()
    _, stdout, _ = moelora(capfd, "plan", rows, "--max-tokens", 97)
    assert "longer" not in stdout
    assert "activations of the largest batch" in stdout


def test_a_device_that_is_too_small(capfd: pytest.CaptureFixture[str], rows: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_device_memory", lambda device: (1 << 20, 1 << 30))
    code, stdout, _ = moelora(capfd, "plan", rows)
    assert code == 2
    assert "does not fit" in stdout
    assert "(1.0 MiB of 1.0 GiB are free)" in stdout


def test_a_longer_sequence_that_does_not_fit(
    capfd: pytest.CaptureFixture[str], rows: Path, monkeypatch: pytest.MonkeyPatch
):
    rows.write_text("".join(json.dumps({"prompt_token_ids": [7] * n}) + "\n" for n in (30, 450, 20)))
    monkeypatch.setattr(head, "_CPU_CHUNK_BYTES", 1)  # else a chunk of logits is more than this model's activations
    engine = json.loads(moelora(capfd, "plan", rows, "--max-tokens", 40, "--json")[1])["engine"]
    assert (engine["longer_sequences"], engine["largest_batch"]) == (5, 450)
    needed = engine["memory"]["needed"]
    for free, code in ((needed, 0), (needed - 1, 2)):
        monkeypatch.setattr(memory, "free_device_memory", lambda device, free=free: (free, 1 << 40))
        found, stdout, _ = moelora(capfd, "plan", rows, "--max-tokens", 40)
        assert found == code
        assert ("cpu: fits, 0 bytes left" in stdout) == (code == 0)
        assert ("cpu: does not fit, 1 bytes too much" in stdout) == (code == 2)
        assert ("is an error of its row; --max-length bounds sequences" in stdout) == (code == 2)
        assert moelora(capfd, "plan", rows, "--max-tokens", 40, "--max-length", 40)[0] == 3, "that row is refused"


def test_planning_has_no_speed(capfd: pytest.CaptureFixture[str], rows: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with pytest.raises(SystemExit):
        main(["plan", str(EXAMPLE), "--input", str(rows), "--adapters", f"{EXAMPLE}/adapters", "--device", "cpu"])
    lines = capfd.readouterr().err.splitlines()
    assert f"checking adapter python in {EXAMPLE}/adapters/python" in lines  # whose values are not read
    assert [line for line in lines if "lines, " in line and "tokens" in line]
    assert not [line for line in lines if "tokens/s" in line]


# Shards and workers.


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_REQUESTS", 1)


@pytest.mark.usefixtures("short_windows")
def test_the_plan_of_a_shard_is_what_the_shard_reports(capfd: pytest.CaptureFixture[str], rows: Path):
    whole = json.loads(moelora(capfd, "plan", rows, "--json")[1])
    assert whole["windows"] == {"planned": 5, "total": 5}
    added = 0
    for shard in ("0/3", "1/3", "2/3"):
        planned = json.loads(moelora(capfd, "plan", rows, "--json", "--shard", shard)[1])
        assert planned["windows"] == {"planned": 1 if shard == "2/3" else 2, "total": 5}
        folder, report_file = rows.with_name("shards"), rows.with_name("report.json")
        moelora(capfd, "prefill", rows, "--shard", shard, "--output", folder, "--report", report_file)
        report = json.loads(report_file.read_text())
        for one, other in ((planned, report), (planned["engine"], report["engine"])):
            shared = (set(one) & set(other)) - {"engine"}
            assert {key: one[key] for key in shared} == {key: other[key] for key in shared}
        added += planned["output_rows"]
    assert added == whole["output_rows"]
    stdout = moelora(capfd, "plan", rows, "--shard", "1/3")[1]
    assert "1/3: 2 of 5 windows" in stdout


@pytest.mark.usefixtures("short_windows")
def test_the_plan_of_workers(capfd: pytest.CaptureFixture[str], rows: Path):
    one = json.loads(moelora(capfd, "plan", rows, "--json")[1])
    two = json.loads(moelora(capfd, "plan", rows, "--json", "--device", "auto", "--devices", "cpu:2")[1])
    assert [d["device"] for d in two["devices"]] == ["cpu", "cpu"]
    assert two["windows"] == one["windows"]
    assert {**two["engine"], "adapter_loads": 0} == {**one["engine"], "adapter_loads": 0}
    assert two["engine"]["adapter_loads"] >= one["engine"]["adapter_loads"]
    assert "2 × cpu, for 5 windows" in moelora(capfd, "plan", rows, "--device", "auto", "--devices", "cpu:2")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shard", "3/3"], "is not I/N"),
        (["--devices", "cpu:2"], "cannot be combined"),
        (["--device", "auto", "--devices", "0,99"], "CUDA device"),
        (["--device", "auto", "--devices", "x"], "valid are all, GPU numbers like 0,1, or cpu:N"),
    ],
)
def test_shares_that_cannot_be_are_refused(
    capfd: pytest.CaptureFixture[str], rows: Path, arguments: list[str], said: str
):
    code, _, stderr = moelora(capfd, "plan", rows, *arguments)
    assert (code, said in stderr) == (2, True)
