"""How facts are laid out for people: no wider than the terminal, in a file as wide as they are up to a limit."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence

_UNLIMITED = 200
"""Columns where nobody says how wide the output is, as of a file."""
_GAP = "  "
_INDENT = "  "


def output_width() -> int:
    """Characters of a line of standard output: those of the terminal, or `COLUMNS`, else 200."""
    return shutil.get_terminal_size((_UNLIMITED, 0)).columns


def entry(label: str, text: str) -> list[str]:
    """`text` behind `label`; what does not fit into the line goes on below, indented to where the text begins."""
    if len(label) + len(text) <= output_width():
        return [f"{label}{text}".rstrip()]
    space = max(output_width() - len(label), 20)
    lines = textwrap.wrap(text, space, break_long_words=False, break_on_hyphens=False)
    return [f"{label if i == 0 else ' ' * len(label)}{line}" for i, line in enumerate(lines)]


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a name and a cell for each of `heads`, which stand behind the title; none for no rows.

    A name that leaves no room for its cells stands on a line of its own.
    """
    if not rows:
        return []
    widths = [max(map(len, cells)) for cells in zip(heads, *(row[1:] for row in rows), strict=True)]
    room = output_width() - sum(widths) - len(_GAP) * len(widths)
    names = [f"{_INDENT}{row[0]}" for row in rows]
    fitting = [len(name) for name in names if len(name) <= room]
    first = max(len(title), *fitting) if fitting else len(title)

    def cells(texts: Sequence[str]) -> str:
        return "".join(f"{_GAP}{text:<{width}}" for text, width in zip(texts, widths, strict=True)).rstrip()

    lines = [f"{title:<{first}}{cells(heads)}"]
    for name, row in zip(names, rows, strict=True):
        lines += [f"{name:<{first}}{cells(row[1:])}"] if len(name) <= first else [name, " " * first + cells(row[1:])]
    return lines


def alike_together(texts: Sequence[str], number: re.Pattern[str]) -> list[str]:
    """Texts that differ only in what `number` matches first, as one with all their numbers: "layers.0-2.x"."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(number.sub("\0", text, count=1), []).append(text)
    return [
        found[0] if len(found) == 1 else key.replace("\0", ranges([int(number.findall(text)[0]) for text in found]))
        for key, found in groups.items()
    ]


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in short, ascending: 0,2-4."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
