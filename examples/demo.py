"""Score four kinds of text under a tiny mixture-of-experts model and its four adapters, and show who knows what.

    python examples/demo.py

Runs `moelora prefill` once over `examples/tiny-moe` and prints the mean log-probability per token for every kind of
text and adapter. Exits with 1 unless each kind's own adapter is the best of its row, and clearly better than the base.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tiny_moe_recipe.matrix import BASE, mean_logprobs

CHECKPOINT = Path(__file__).parent / "tiny-moe"
MARGIN = 0.3
"""Nats per token by which a kind's own adapter must beat the base."""

Matrix = dict[str, dict[str, float]]


def prefill(output: Path, device: str) -> None:
    """Score every held-out row under the base and every adapter, in one run of the command line."""
    command = [sys.executable, "-m", "moelora_cli", "prefill", str(CHECKPOINT)]
    command += ["--adapters", str(CHECKPOINT / "adapters"), "--with-base", "--device", device]
    command += ["--input", str(CHECKPOINT / "heldout.jsonl"), "--output", str(output)]
    subprocess.run(command, check=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The output rows. Raises ValueError where there are none or one of them reports an error."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if row["error"]:
            raise ValueError(f"row {row['id']} under {row['adapter']}: {row['error']}")
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def as_table(matrix: Matrix) -> Table:
    """Kinds down, base and adapters across; the best of each row in bold green, with a star."""
    adapters = sorted({name for cells in matrix.values() for name in cells if name != BASE})
    table = Table(title="mean log-probability per token (nats, higher is better)")
    table.add_column("text", style="bold")
    for heading in ("base", *adapters):
        table.add_column(heading, justify="right")
    for kind, cells in sorted(matrix.items()):
        best = max(cells, key=cells.__getitem__)
        table.add_row(
            kind,
            *(
                f"[bold green]* {cells[name]:.3f}[/]" if name == best else f"{cells[name]:.3f}"
                for name in (BASE, *adapters)
            ),
        )
    return table


def shortfalls(matrix: Matrix) -> list[str]:
    """One sentence for each kind whose own adapter is not the best, or not by MARGIN better than the base."""
    sentences: list[str] = []
    for kind, cells in sorted(matrix.items()):
        best = max(cells, key=cells.__getitem__)
        if best != kind:
            sentences.append(f"{kind}: the best is {best}, not its own adapter")
        elif cells[kind] - cells[BASE] < MARGIN:
            sentences.append(f"{kind}: its own adapter gains only {cells[kind] - cells[BASE]:.3f} nat over the base")
    return sentences


def main() -> int:
    """Read the command line, run, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="passed on to moelora prefill (default: cpu)")
    parser.add_argument("--scores", type=Path, help="show this output of moelora prefill instead of running it")
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as directory:
        scores: Path = arguments.scores or Path(directory) / "scores.jsonl"
        if arguments.scores is None:
            try:
                prefill(scores, arguments.device)
            except subprocess.CalledProcessError as failure:
                console.print(f"[bold red]moelora prefill failed with exit status {failure.returncode}.[/]")
                return 1
        try:
            matrix = mean_logprobs(read_rows(scores))
        except ValueError as failure:
            console.print(f"[bold red]{failure}[/]")
            return 1
    console.print(as_table(matrix))
    missing = shortfalls(matrix)
    if missing:
        console.print("[bold red]Not as it should be:[/] " + "; ".join(missing))
        return 1
    gain = min(cells[kind] - cells[BASE] for kind, cells in matrix.items())
    console.print(f"[bold green]Every kind is best under its own adapter, by at least {gain:.2f} nat over the base.[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
