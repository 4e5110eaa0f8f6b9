"""What the README and the quickstart show runs as it stands, one line after the other."""

import json
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from moelora.jobs.rows import parse_row
from moelora_cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/quickstart.md"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_example_runs(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (example,) = blocks(page, "python")
    exec(compile(example, page, "exec"), {"__name__": "readme"})
    base, tuned, *best = capsys.readouterr().out.split(maxsplit=2)
    assert float(base) != float(tuned)
    assert best[0].count("TokenScore") == 3


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_run_with_the_rows_that_the_page_shows(page, monkeypatch, tmp_path, capsys):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "rows.jsonl").write_text(blocks(page, "json")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.startswith("moelora ")]
    assert {c.split()[1] for c in commands} >= {"inspect", "prefill", "verify"}
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command)[1:])
        assert (ended.value.code or 0) == 0, f"{command}: {capsys.readouterr().err}"
    output = re.search(r"--output (\S*scores\.jsonl)", "\n".join(commands))[1]
    scores = [json.loads(line) for line in (tmp_path / output).open(encoding="utf-8")]
    assert [row["error"] for row in scores] == [None] * len(scores)
    assert {row["id"] for row in scores} == {"a", "b", "c"}


def test_one_page_after_the_other_runs_in_one_folder():
    outputs = [set(re.findall(r"--output (\S+)", "\n".join(blocks(page, "bash")))) for page in PAGES]
    assert outputs[0] & outputs[1] == set()


@pytest.fixture
def scored(monkeypatch, tmp_path):
    """A folder with an output of two adapters, one good and one bad row, in both formats."""
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "prompt": "def main():", "metadata": 7}\n{"prompt": ""}\n')
    monkeypatch.chdir(tmp_path)
    example = ROOT / "examples" / "tiny-moe"
    for name in ("scores.jsonl", "scores.parquet"):
        arguments = ["--adapters", f"{example}/adapters", "--logprobs", "tokens", "--quiet", "--output", name]
        with pytest.raises(SystemExit) as ended:
            main(["prefill", str(example), "--input", "rows.jsonl", *arguments])
        assert ended.value.code == 3
    return tmp_path


def assert_scores_anew(source, capsys):
    """A next input gives what the run before gave for that adapter."""
    capsys.readouterr()
    example = ROOT / "examples" / "tiny-moe"
    with pytest.raises(SystemExit) as ended:
        main(["prefill", str(example), "--adapters", f"{example}/adapters", "--input", source, "--output", "n.jsonl"])
    assert (ended.value.code or 0) == 0, capsys.readouterr().err
    (again,) = map(json.loads, Path("n.jsonl").read_text().splitlines())
    before = map(json.loads, Path("scores.jsonl").read_text().splitlines())
    first = next(one for one in before if one["adapter"] == "python")
    assert again["logprob_sum"] == pytest.approx(first["logprob_sum"], abs=1e-4)
    assert (again["id"], again["adapter"], again["metadata"]) == ("a", "python", 7)


def test_the_output_of_one_run_becomes_the_next_input_as_the_page_of_files_has_it(scored, capsys):
    pytest.importorskip("pyarrow", reason="Parquet is an extra")
    (recipe,) = (block for block in blocks("docs/files.md", "python") if "next.parquet" in block)
    exec(compile(recipe, "files.md", "exec"), {})
    assert_scores_anew("next.parquet", capsys)


@pytest.mark.skipif(shutil.which("jq") is None, reason="the line needs jq")
def test_the_line_for_json_lines_does_the_same(scored, capsys):
    (recipe,) = (block for block in blocks("docs/files.md", "bash") if "next.jsonl" in block)
    subprocess.run(recipe, shell=True, check=True)
    assert_scores_anew("next.jsonl", capsys)


@pytest.fixture
def plain_rows(monkeypatch, tmp_path):
    """A folder with rows scored under the base, one of them a single token and one an error; the ids to be kept."""
    example = ROOT / "examples" / "tiny-moe"
    rows = [json.loads(line) for line in (example / "heldout.jsonl").open(encoding="utf-8")][::4]
    rows = [{"id": "one token", "prompt_token_ids": [5]}, {"id": "bad", "prompt": 3}, *rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([*f"prefill {example} --input rows.jsonl --output scores.jsonl --logprobs tokens --quiet".split()])
    scores = [json.loads(line) for line in Path("scores.jsonl").read_text().splitlines()]
    means = {row["id"]: row["token_logprobs"][1:] for row in scores if row["error"] is None}
    kept = [name for name, values in means.items() if values and math.exp(-sum(values) / len(values)) < 100]
    assert 2 < len(kept) < len(rows) - 4
    return kept


def kept_ids():
    return [json.loads(line)["id"] for line in Path("kept.jsonl").read_text(encoding="utf-8").splitlines()]


def test_rows_are_filtered_by_perplexity_as_the_page_of_files_has_it(plain_rows):
    (recipe,) = (block for block in blocks("docs/files.md", "python") if "math.log" in block)
    exec(compile(recipe, "files.md", "exec"), {})
    assert kept_ids() == plain_rows


@pytest.mark.skipif(shutil.which("jq") is None, reason="the lines need jq")
def test_the_lines_for_perplexity_do_the_same(plain_rows):
    (recipe,) = (block for block in blocks("docs/files.md", "bash") if "kept.jsonl" in block)
    subprocess.run(recipe, shell=True, check=True)
    assert kept_ids() == plain_rows


def test_the_rows_that_the_page_of_files_shows_are_rows():
    for line in blocks("docs/files.md", "json")[0].splitlines():
        assert parse_row(1, line.encode()).error is None


def test_the_output_that_the_page_of_commands_shows_is_what_plan_prints(monkeypatch, capfd):
    """But for its numbers, which move with every change of the planner."""
    monkeypatch.chdir(ROOT)
    command = next(block for block in blocks("docs/commands.md", "bash") if "plan" in block).replace("\\\n", " ")
    assert command.startswith("moelora plan ")
    with pytest.raises(SystemExit):
        main(shlex.split(command)[1:])
    numbers = r"[\d.,]+ ?(?:bytes|[KMG]iB)?"
    shown, printed = (
        re.sub(r" +", " ", re.sub(numbers, "0", text)).splitlines()
        for text in (blocks("docs/commands.md", "text")[0], capfd.readouterr().out)
    )
    assert shown == printed
