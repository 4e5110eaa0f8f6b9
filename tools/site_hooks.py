"""What the site generator asks of this repository: the command line reference, and plots of tables."""

from __future__ import annotations

import inspect
import re

import click

from moelora.jobs.charts import Bar, bar_chart
from moelora_cli.main import cli

COMMANDS = "<!-- commands -->"
PLOT_MARK = "<!-- plot -->"
PLOT = re.compile(rf"{PLOT_MARK}\n(\|.*\n\|[-|: ]+\n(?:\|.*\n)+)")
COLOURS = ("--plot-a", "--plot-b", "--plot-c", "--plot-d")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called for every page: puts in the reference, and bars behind every table that asks for them.

    Raises `ValueError` for a mark that stands directly before no table: the page would lack the plot and nobody know.
    """
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, command_reference(cli))
    drawn = PLOT.sub(lambda found: f"{found.group(1)}\n{plot_of(found.group(1))}\n", markdown)
    if PLOT_MARK in drawn:
        after = drawn.partition(PLOT_MARK)[2].strip().partition("\n")[0]
        raise ValueError(f"{PLOT_MARK} needs a table on the very next line, not {after[:60]!r}")
    return drawn


def plot_of(table: str) -> str:
    """Bars of the numbers of a Markdown table: a group per row, a colour per column. Ranges count by their middle.

    Columns called "A / B" are left out: a quotient has not the unit of the others.
    """
    lines = [[cell.strip(" `") for cell in line.strip().strip("|").split("|")] for line in table.strip().splitlines()]
    kept = [i for i, head in enumerate(lines[0]) if " / " not in head]
    heads, *rows = ([line[i] for i in kept] for line in (lines[0], *lines[2:]))
    bars = [
        Bar(label=f"{row[0]} {heads[0]}: {heads[i]}", value=value, colour=COLOURS[(i - 1) % len(COLOURS)])
        for row in rows
        for i in range(1, len(row))
        if (value := number(row[i])) is not None
    ]
    return f'<div class="plot">{bar_chart(bars)}</div>'


def number(cell: str) -> float | None:
    """The value of a cell; the middle of a range such as 31–44; None for a cell without a number."""
    found = [float(digits.replace(",", "")) for digits in re.findall(r"\d[\d,]*(?:\.\d+)?", cell.split("(")[0])]
    return sum(found) / len(found) if found else None


def command_reference(group: click.Group) -> str:
    """Markdown of all commands: usage, description, and every argument and option with its sentence."""
    ctx = click.Context(group, info_name="moelora")
    return "\n\n".join(_command(group.commands[name], ctx) for name in sorted(group.commands))


def _command(command: click.Command, parent: click.Context) -> str:
    ctx = click.Context(command, info_name=command.name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(ctx))
    parts = [
        f"## moelora {command.name}",
        f"```text\n{ctx.command_path} {usage}\n```",
        inspect.cleandoc(command.help or ""),
    ]
    options = [p for p in command.get_params(ctx) if isinstance(p, click.Option) and not p.hidden]
    return "\n\n".join(parts + [_option(option, ctx) for option in options])


def _option(option: click.Option, ctx: click.Context) -> str:
    """A term with the option and its value, and what it does."""
    value = "" if option.is_flag else " " + option.make_metavar(ctx)
    names = ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))
    extra = option.get_help_extra(ctx)
    facts = [f"default `{extra['default']}`"] if "default" in extra else []
    facts += ["required"] if option.required else []
    facts += [f"`{extra['range']}`"] if "range" in extra else []
    return f"{names}\n:   {option.help}" + (f" *({', '.join(facts)})*" if facts else "")
