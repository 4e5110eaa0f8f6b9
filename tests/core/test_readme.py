"""What the README shows is run as it stands."""

import re
import shlex
from pathlib import Path

import pytest

from moelora_cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def test_the_python_example_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (example,) = blocks(ROOT / "README.md", "python")
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    base, tuned, *best = capsys.readouterr().out.split(maxsplit=2)
    assert float(base) != float(tuned)
    assert best[0].count("TokenScore") == 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_parses(page):
    """Options and their values, not the files they name."""
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["moelora"] and len(words) > 1:
            command = cli.commands[words[1]]
            command.make_context(words[1], words[2:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_session_that_is_named_exists():
    sessions = set(re.findall(r"@nox\.session.*?\ndef (\w+)", (ROOT / "noxfile.py").read_text()))
    for page in PAGES:
        for names in re.findall(r"nox -s ([a-z ]+)", page.read_text(encoding="utf-8")):
            assert set(names.split()) <= sessions
