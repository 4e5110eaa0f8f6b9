"""What the README and the quickstart show runs as it stands, one line after the other."""

import json
import re
import shlex
from pathlib import Path

import pytest

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
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").open(encoding="utf-8")]
    assert [row["error"] for row in scores] == [None] * len(scores)
    assert {row["id"] for row in scores} == {"a", "b", "c"}


def test_the_output_that_the_page_of_commands_shows_is_what_plan_prints(monkeypatch, capfd):
    """But for its numbers, which move with every change of the planner."""
    monkeypatch.chdir(ROOT)
    command = blocks("docs/commands.md", "bash")[0].replace("\\\n", " ")
    assert command.startswith("moelora plan ")
    with pytest.raises(SystemExit):
        main(shlex.split(command)[1:])
    numbers = r"[\d.,]+ ?(?:bytes|[KMG]iB)?"
    shown, printed = (
        re.sub(r" +", " ", re.sub(numbers, "0", text)).splitlines()
        for text in (blocks("docs/commands.md", "text")[0], capfd.readouterr().out)
    )
    assert shown == printed
