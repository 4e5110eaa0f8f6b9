"""Collects from the source every message that the program can print to a user, with … for what is filled in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CARRIERS = {
    "refuse": slice(1, 2),
    "require": slice(1, 2),
    "fail": slice(0, 1),
    "Refused": slice(0, 1),
    "say": slice(0, 1),
    "_say": slice(0, 1),
    "say_error": slice(0, 1),
    "on_event": slice(0, 1),
    "note": slice(0, 1),
}
"""Functions that take a message, or a part of one, and where among their arguments."""

LISTS = frozenset({"problems", "refusals", "notes", "warnings"})
"""Lists whose entries become messages."""

NOT_SHOWN = frozenset(
    {"AssertionError", "AttributeError", "NotImplementedError", "RuntimeError", "SystemExit", "TypeError"}
)
"""Exceptions that tell of a mistake in the program, or in whose place another message is printed."""

NOT_MESSAGES = frozenset(
    {
        "bench_plot.py",
        "bench_tables.py",
        "charts.py",
        "describe.py",
        "env.py",
        "inspect.py",
        "report.py",
        "report_page.py",
    }
)
"""Modules whose functions return text that is no message."""

FRAGMENTS = frozenset({"an empty list", "an object", "unknown place", "row error: …", "unknown … ….… Valid: …"})
"""Texts that only ever stand inside one of the other messages."""


@dataclass(frozen=True, slots=True)
class Template:
    """A message and where it is made."""

    text: str
    file: str
    line: int


def source_files() -> list[Path]:
    """Every module of the three packages."""
    return sorted(ROOT.glob("packages/*/src/**/*.py"))


def collect() -> list[Template]:
    """All templates, in the order of files and lines."""
    found = []
    for path in source_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file = str(path.relative_to(ROOT / "packages")).replace("/src/", "/")
        for node in ast.walk(tree):
            for expression in _messages(node, path.name):
                found += [Template(text, file, expression.lineno) for text in _texts(expression)]
    return sorted(set(found), key=lambda t: (t.file, t.line))


def _messages(node: ast.AST, file: str) -> Iterator[ast.expr]:
    """The expressions at `node` whose value is shown to a user."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        if _name(node.exc.func) not in NOT_SHOWN:
            yield node.exc.args[0]
    elif isinstance(node, ast.Call):
        if _name(node.func) in CARRIERS:
            yield from node.args[CARRIERS[_name(node.func)]]
        if _appends_to_a_list_of_messages(node):
            yield from node.args
        yield from (k.value for k in node.keywords if k.arg == "error")
    elif isinstance(node, ast.Assign):
        names = {getattr(target, "id", "") for target in node.targets}
        if names & {"error", "reason"}:
            yield node.value
        elif names & {"_REASON_TEXT", "_REFUSED"} and isinstance(node.value, ast.Dict):
            yield from node.value.values
    elif isinstance(node, ast.FunctionDef) and file not in NOT_MESSAGES and _returns_text(node):
        yield from (n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None)
    elif isinstance(node, ast.FunctionDef) and node.name == "warnings":
        yield from (n.elt for n in ast.walk(node) if isinstance(n, ast.ListComp))


def _appends_to_a_list_of_messages(call: ast.Call) -> bool:
    function = call.func
    return isinstance(function, ast.Attribute) and function.attr == "append" and _name(function.value) in LISTS


def _returns_text(function: ast.FunctionDef) -> bool:
    return function.returns is not None and ast.unparse(function.returns) in ("str", "str | None")


def _name(expression: ast.expr) -> str:
    return expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")


def _texts(expression: ast.expr) -> list[str]:
    """The templates that an expression can become: two for a conditional, none for what holds no text of its own."""
    if isinstance(expression, ast.IfExp):
        return _texts(expression.body) + _texts(expression.orelse)
    if isinstance(expression, ast.Call) and _name(expression.func) == "choose_from":
        what = expression.args[0]
        return [f"unknown {what.value if isinstance(what, ast.Constant) else '…'} ….… Valid: …"]
    if isinstance(expression, ast.BoolOp):
        return [text for value in expression.values for text in _texts(value)]
    text = " ".join(_flat(expression).split())
    return [text] if re.search(r"[a-zA-Z]{2,}[ .].*[a-zA-Z]{2,}", text) and text not in FRAGMENTS else []


def _flat(expression: ast.expr) -> str:
    if isinstance(expression, ast.Constant):
        return expression.value if isinstance(expression.value, str) else ""
    if isinstance(expression, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else "…" for p in expression.values]
        return re.sub("…+", "…", "".join(map(str, parts)))
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add):
        return _flat(expression.left) + _flat(expression.right)
    if isinstance(expression, ast.Call) and _name(expression.func) == "strip":
        return _flat(expression.func.value)
    return "…" if isinstance(expression, ast.Call | ast.Name | ast.Attribute) else ""


if __name__ == "__main__":
    for template in collect():
        print(f"{template.file}:{template.line}: {template.text}")
