"""`moelora verify` from the outside: the table, JSON, exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from moelora_cli.main import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    lines = ['{"prompt_token_ids": [5, 6, 7, 8]}', '{"prompt": "def main():"}', '{"prompt": 3}']
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    return path


def verify(capfd: pytest.CaptureFixture[str], rows: Path, *arguments: Any) -> tuple[int, str, str]:
    capfd.readouterr()
    adapters = ["--adapters", f"python={EXAMPLE}/adapters/python", "--adapters", f"old={EXAMPLE}/adapters/scripture"]
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(EXAMPLE), *adapters, "--input", str(rows), "--device", "cpu", "--quiet", *arguments])
    stdout, stderr = capfd.readouterr()
    return int(caught.value.code or 0), stdout, stderr


@pytest.mark.filterwarnings("ignore")
def test_the_table_and_the_conclusion(capfd: pytest.CaptureFixture[str], rows: Path):
    code, stdout, _ = verify(capfd, rows)
    assert code == 0
    lines = stdout.splitlines()
    assert lines[0].split() == ["adapter", "reference", "rows", "tokens", "largest", "at", "line", "mean", "greedy"]
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["__base__", "plain", "2"],
        ["python", "peft", "2"],
        ["old", "merged", "2"],
    ]
    assert "note: old: PEFT does not apply layout P as it is meant" in lines
    assert "note: left out because of errors: 1 pair of row and adapter" in lines
    assert lines[-1] == "all agree (float32 on cpu, largest difference up to 0.001 nats allowed)"


@pytest.mark.filterwarnings("ignore")
def test_json_and_a_tolerance_that_nothing_meets(capfd: pytest.CaptureFixture[str], rows: Path):
    code, stdout, _ = verify(capfd, rows, "--json", "--tolerance", "0", "--sample", "1")
    assert code == 1
    facts = json.loads(stdout)
    assert not facts["passed"]
    assert (facts["tolerance"], facts["tolerance_on"], facts["error_rows"]) == (0.0, "largest", 1)
    assert [one["adapter"] for one in facts["adapters"]] == ["__base__", "python", "old"]
    assert set(facts["adapters"][0]) == {
        "adapter",
        "reference",
        "note",
        "rows",
        "tokens",
        "largest",
        "worst_line",
        "greedy_agree",
        "greedy_total",
        "mean",
        "passed",
        "error",
    }


@pytest.mark.filterwarnings("ignore")
def test_what_is_too_far_apart_is_named(capfd: pytest.CaptureFixture[str], rows: Path):
    code, stdout, _ = verify(capfd, rows, "--tolerance", "0", "--sample", "1")
    assert code == 1
    said = "too far apart: __base__, python, old (float32 on cpu, largest difference up to 0 nats allowed)"
    assert stdout.splitlines()[-1] == said


def test_an_input_without_a_good_row_is_refused(capfd: pytest.CaptureFixture[str], rows: Path):
    rows.write_text('{"prompt": 3}\n')
    code, stdout, stderr = verify(capfd, rows)
    assert (code, stdout) == (2, "")
    assert "nothing to compare" in stderr
