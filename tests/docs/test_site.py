"""What the site is made with: the command reference, plots of tables, and the check for requests to other hosts."""

import re
from pathlib import Path

import click
import pytest
from check_site import Loads, outside_urls
from site_hooks import PLOT_MARK, command_reference, number, on_page_markdown, plot_of

from moelora_cli.main import cli

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_has_every_option_with_its_sentence():
    text = command_reference(cli)
    for command in cli.commands.values():
        part = text.split(f"## moelora {command.name}\n")[1].split("\n## moelora ")[0]
        for option in command.params:
            if isinstance(option, click.Option):
                assert (f"`{option.opts[0]}" in part) is not option.hidden
                assert option.hidden or f":   {option.help}" in part


def test_a_description_in_paragraphs_is_no_code_block():
    for part in command_reference(cli).split("## moelora ")[1:]:
        description = part.split("```")[2].split("\n`-")[0]
        assert not [line for line in description.splitlines() if line.startswith("    ")]


TABLE = "| tokens | full | eager |\n|---|---|---|\n| 128 | 5.9 | 31–44 |\n| 8,192 | 1,009.5 (+27 %) | – |\n"


def test_a_table_that_asks_for_it_is_drawn():
    page = on_page_markdown(f"# x\n\n<!-- plot -->\n{TABLE}\nend\n")
    assert TABLE in page
    assert "<!--" not in page
    assert page.count("<svg") == 1
    assert on_page_markdown(f"# x\n\n{TABLE}") == f"# x\n\n{TABLE}"


@pytest.mark.parametrize("between", ["\n", "A sentence.\n\n", "| no | table |\n\n"])
def test_a_mark_without_a_table_behind_it_fails_the_build(between):
    with pytest.raises(ValueError, match="needs a table on the very next line"):
        on_page_markdown(f"<!-- plot -->\n{TABLE}\n<!-- plot -->\n{between}{TABLE}")


def test_every_mark_of_the_pages_draws_a_plot():
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert on_page_markdown(text).count('<div class="plot">') == text.count(PLOT_MARK)


def test_bars_are_as_long_as_the_numbers():
    svg = plot_of(TABLE)
    for label in ("128 tokens: full: 5.9", "128 tokens: eager: 37.5", "8,192 tokens: full: 1,009.5"):
        assert label in svg
    assert svg.count("<rect") == 3


def test_quotients_are_not_drawn_among_times():
    svg = plot_of("| tokens | `mm` | LoRA / base | with LoRA |\n|---|---|---|---|\n| 64 | 0.41 | 1.13 | 0.37 |\n")
    assert [*re.findall(r">(64 tokens: [^<]+)<", svg)] == ["64 tokens: mm", "64 tokens: with LoRA"]
    assert "1.13" not in svg


@pytest.mark.parametrize(
    ("cell", "value"),
    [("5.9", 5.9), ("31–44", 37.5), ("0.515 (+30 %)", 0.515), ("1,234", 1234), ("–", None), ("", None)],
)
def test_numbers_are_read_from_cells(cell, value):
    assert number(cell) == value


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//cdn.example/x.css">',
        '<link rel="preconnect" href="https://cdn.example">',
        '<img src="http://example/x.png">',
        "<p style=\"background: url('https://example/x.png')\">",
    ],
)
def test_what_a_browser_would_fetch_elsewhere_is_found(page):
    loads = Loads()
    loads.feed(page)
    assert len(loads.outside) == 1


def test_links_and_own_files_are_no_requests():
    loads = Loads()
    loads.feed('<a href="https://example"></a><img src="a.png"><link rel="canonical" href="https://example/x">')
    assert loads.outside == []
    assert outside_urls("a { background: url(x.png) } @import 'y.css';") == []
    assert outside_urls('@import "https://example/y.css";') == ["https://example/y.css"]
