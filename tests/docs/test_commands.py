"""Every command that a page shows parses, every option has its sentence, and every session named is there."""

import re
import shlex
from pathlib import Path

import click
import pytest

from moelora.capacity import EagerReason
from moelora_cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")])
NOTEBOOKS = sorted(ROOT.glob("tutorials/*.py"))
COMMANDS = sorted(cli.commands)


def shell_blocks(source: Path) -> list[str]:
    """The shell code of a page, or of a tutorial's cells."""
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, re.S | re.M)
    cells = re.findall(r'^# %% language="bash"\n((?:#.*\n)+)', text, re.M)
    return [re.sub(r"^# ?", "", cell, flags=re.M) for cell in cells]


def moelora_lines(source: Path) -> list[list[str]]:
    """The words of every call of the command: continued lines joined, pipes, redirections and comments cut off."""
    found = []
    for line in "\n".join(shell_blocks(source)).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("|&;<>"):
                break
            words.append(word)
        if words[:1] == ["moelora"]:
            found.append(words[1:])
    return found


@pytest.mark.parametrize("source", [*PAGES, *NOTEBOOKS], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_line_parses(source):
    """Against click's own parser: commands, options and their values, not the files they name."""
    for words in moelora_lines(source):
        if words == ["--help"] or words == ["--version"]:
            continue
        assert words[0] in cli.commands, f"moelora {' '.join(words)}: no such command"
        if words[1:] not in (["--help"], ["-h"]):
            cli.commands[words[0]].make_context(words[0], list(words[1:]))


def test_the_pages_show_commands_at_all():
    shown = {words[0] for source in [*PAGES, *NOTEBOOKS] for words in moelora_lines(source) if words}
    assert shown >= set(COMMANDS) - {"merge"}
    assert len([1 for source in PAGES for _ in moelora_lines(source)]) >= 10


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_a_sentence(name):
    command = cli.commands[name]
    assert (command.help or "").strip().split("\n\n")[0].endswith(".")
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help, f"{name} {option.opts[0]} has no help"
            assert option.help.endswith("."), f"{name} {option.opts[0]}: {option.help!r} is no sentence"


def test_every_option_of_prefill_is_on_the_page_of_its_files():
    page = (ROOT / "docs/files.md").read_text(encoding="utf-8")
    options = [p for p in cli.commands["prefill"].params if isinstance(p, click.Option) and not p.hidden]
    assert [o.opts[0] for o in options if f"`{o.opts[0]}" not in page] == []


def test_every_session_that_is_named_exists():
    sessions = set(re.findall(r"@nox\.session.*?\ndef (\w+)", (ROOT / "noxfile.py").read_text()))
    for page in PAGES:
        for names in re.findall(r"nox -s ([a-z ]+)", page.read_text(encoding="utf-8")):
            assert set(names.split()) <= sessions


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page):
    """On GitHub too. Pages that the tutorials become when they run count as there if their script is."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        path = (page.parent / target).resolve()
        script = ROOT / "tutorials" / f"{path.stem}.py"
        assert path.exists() or (path.parent.name == "tutorials" and script.exists()), f"{page.name} links to {target}"


def test_every_eager_reason_is_on_the_page_of_graphs():
    page = (ROOT / "docs/graphs.md").read_text(encoding="utf-8")
    assert [str(reason) for reason in EagerReason if f"| `{reason}` |" not in page] == []
