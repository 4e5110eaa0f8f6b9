"""`moelora bench` as a command, on the model of the examples."""

import json
from pathlib import Path

import pytest

from moelora_cli.main import main

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"
SMALL = ["--scale", "0.03", "--adapters", "1", "--rank", "2", "--repeat", "1", "--device", "cpu", "--max-tokens", "64"]


def run(capfd, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["bench", str(TINY), *arguments])
    out, err = capfd.readouterr()
    return left.value.code or 0, out, err


def test_tables_json_and_plot(capfd, tmp_path):
    facts, plot = tmp_path / "b.json", tmp_path / "b.png"
    code, out, err = run(capfd, *SMALL, "--workload", "W2", "--json", str(facts), "--plot", str(plot))
    assert code == 0, err
    rows = [line.split() for line in out.splitlines() if line.startswith(" W2")]
    assert [row[1] for row in rows] == ["scoring", "scoring", "prefill", "prefill"]
    measured = json.loads(facts.read_text())["measurements"]
    assert len(measured) == 4
    assert all(f"{m['tokens_per_second']:,.0f}" in row for m, row in zip(measured, rows, strict=True))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "timing W2" in err


@pytest.mark.parametrize("width", [80, 160])
def test_tables_fit_the_terminal(capfd, monkeypatch, tmp_path, width):
    """And say the same at any width: every number that the JSON has."""
    monkeypatch.setenv("COLUMNS", str(width))
    facts = tmp_path / "b.json"
    grown = ["--adapters", "2", "--rank", "4", "--workload", "W4", "--peer", "transformers", "--json", str(facts)]
    code, out, err = run(capfd, *SMALL, *grown)
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= width
    report = json.loads(facts.read_text())
    words = out.split()
    for one in report["measurements"]:
        told = [one[key] for key in ("lora_overhead", "over_peer") if one[key] is not None]
        wanted = [f"{one['tokens_per_second']:,.0f}", f"{one['floor_share']:.1%}", *(f"{value:.3f}" for value in told)]
        assert [text for text in wanted if text not in words] == []
    assert ("graph ×" in out) is False  # nothing was run with --graph off to compare with
    (line,) = [line for line in out.splitlines() if "tokens/s" in line]
    assert ("peer ×" in line) is (width == 160)
    assert "FutureWarning" not in err


def test_an_engine_that_all_rows_share_stands_in_the_title(capfd):
    code, out, _ = run(capfd, *SMALL, "--workload", "W4", "--task", "prefill")
    assert code == 0
    assert "speed: torch, graph auto" in out.splitlines()
    assert not [line for line in out.splitlines() if line.split()[:1] == ["work"] and "engine" in line]


def test_json_on_standard_output_stands_alone(capfd):
    code, out, err = run(capfd, *SMALL, "--workload", "W4", "--task", "prefill", "--json", "-", "--quiet")
    assert code == 0, err
    facts = json.loads(out)
    assert {m["workload"] for m in facts["measurements"]} == {"W4"}
    assert {m["adapters"] for m in facts["measurements"]} == {0, 1}
    assert facts["measurements"][1]["lora_overhead"] > 0


def test_a_peer_without_peft_is_refused_before_any_work(capfd, monkeypatch):
    monkeypatch.setattr("moelora.bench.peer.find_spec", lambda name: None)
    monkeypatch.setattr("moelora.bench.run.measure_ceilings", lambda *given: pytest.fail("work has begun"))
    code, out, err = run(capfd, *SMALL, "--adapters", "0", "--peer", "transformers")
    assert (code, out) == (2, "")
    assert (
        err == "error: the peer's adapters need PEFT, which is not installed: python -m pip install 'moelora[verify]'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "W7"], "Valid: W1, W2, W3, W4"),
        (["--plot", "bars.gif"], "Valid: .pdf, .png, .svg"),
        (["--json", "missing/b.json"], "missing/b.json cannot be written"),
        (["--layers", "2"], "add --load-format dummy"),
        (["--backend", "magic"], "Valid:"),
    ],
)
def test_refused_before_any_work(capfd, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capfd, *SMALL, *arguments)
    assert code == 2
    assert said in err
    assert out == ""
