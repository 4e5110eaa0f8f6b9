"""Runs the tutorials and writes them as Markdown, with outputs and plots, into docs/tutorials/ for the site.

    python tools/run_tutorials.py [NAME …]

A tutorial is a jupytext percent script in tutorials/. Its cells run in a kernel of their own, in a folder that is
thrown away and holds a link to examples/. A cell that raises ends the run with its traceback and exit code 1.
"""

import argparse
import base64
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "tutorials"
PAGES = ROOT / "docs" / "tutorials"
CELL_SECONDS = 300
"""No cell takes a tenth of this; one that hangs fails the run."""

Cell = dict
_COLOUR_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def run(source: Path) -> str:
    """The page of a tutorial. Raises `CellExecutionError` if a cell raises."""
    notebook = jupytext.read(source)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        # Sockets in the folder: on TCP, whoever is on the machine could listen.
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}})
        client = NotebookClient(notebook, timeout=CELL_SECONDS, resources={"metadata": {"path": folder}}, config=config)
        client.execute()
        images = PAGES / source.stem
        for kept in Path(folder, "tutorial-output").glob("*.html"):  # reports, which pages link to
            images.mkdir(parents=True, exist_ok=True)
            shutil.copy(kept, images)
    parts = [_part(cell, number, images) for number, cell in enumerate(notebook.cells)]
    note = f"*This page is what [`tutorials/{source.name}`](index.md#run-them) printed when the site was built.*"
    title, _, rest = parts[0].partition("\n")
    return "\n\n".join([title, note, rest.strip(), *filter(None, parts[1:])]) + "\n"


def _part(cell: Cell, number: int, images: Path) -> str:
    """Markdown of one cell: its text, or its code and what came out."""
    if cell["cell_type"] == "markdown":
        return cell["source"]
    language, code = "python", cell["source"]
    if code.startswith("%%bash"):
        language, code = "bash", code.partition("\n")[2]
    return "\n\n".join([_fence(language, code), *_outputs(cell, number, images)])


def _outputs(cell: Cell, number: int, images: Path) -> list[str]:
    parts: list[str] = []
    text = ""
    command = cell["source"].startswith("%%bash")
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            # A command reports on stderr; from Python there come bars and warnings of libraries alone.
            text += output["text"] if command or output["name"] == "stdout" else ""
            continue
        data = output.get("data", {})
        if "image/png" in data:
            images.mkdir(parents=True, exist_ok=True)
            file = images / f"{number}.png"
            file.write_bytes(base64.b64decode(data["image/png"]))
            caption = cell["metadata"].get("alt") or "plot"
            parts.append(f"![{caption}]({images.name}/{file.name})")
        elif "text/html" in data:
            parts.append(data["text/html"])
        elif "text/plain" in data:
            text += data["text/plain"] + "\n"
    if text.strip():
        parts.insert(0, _fence("{ .text .output .no-copy }", _COLOUR_CODES.sub("", text).rstrip()))
    return parts


def _fence(info: str, body: str) -> str:
    """A code block whose marks are longer than any in `body`."""
    marks = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", body))])
    return f"{marks}{info}\n{body}\n{marks}"


def main() -> int:
    """Runs the tutorials that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of file names, such as 3 (default: all)")
    names = tuple(parser.parse_args().names)
    PAGES.mkdir(parents=True, exist_ok=True)
    # Threads of torch that spin while they wait starve each other on a machine with other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    begin = time.monotonic()
    for source in sorted(SOURCES.glob("[0-9]*.py")):
        if names and not source.name.startswith(names):
            continue
        started = time.monotonic()
        try:
            page = run(source)
        except CellExecutionError as failure:
            print(f"{source.name}: a cell failed\n{failure}", file=sys.stderr)
            return 1
        (PAGES / source.with_suffix(".md").name).write_text(page, encoding="utf-8")
        print(f"{source.name}: {time.monotonic() - started:.1f} s")
    print(f"all: {time.monotonic() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
