"""`moelora verify`: compares a sample of the input with transformers + PEFT, adapter by adapter."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from moelora.errors import ConfigError
from moelora.wording import counted
from moelora_cli.command import EXIT_DONE, EXIT_FAILED, MoeloraCommand
from moelora_cli.options import (
    POSITIVE,
    engine_options,
    engine_options_of,
    job_options_of,
    model_options,
    quiet_libraries,
    row_options,
    stdout_for_results,
)
from moelora_cli.progress import Progress

if TYPE_CHECKING:
    from moelora.verify.run import Verdict

_HEADINGS = ("adapter", "reference", "rows", "tokens", "largest", "at line", "mean", "greedy")


@click.command(cls=MoeloraCommand, short_help="Compare a sample with transformers + PEFT.")
@model_options
@click.option(
    "--input", "input_", required=True, metavar="FILE|-", help="Rows: JSON Lines or Parquet; - is standard input."
)
@click.option("--sample", type=POSITIVE, default=8, show_default=True, help="Most rows of the base and each adapter.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="Most nats of difference: the largest in float32 (1e-3), the mean in 16-bit (0.1).",
)
@row_options
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", is_flag=True, help="No progress.")
def verify(**options: Any) -> int:
    """Scores a sample of --input twice, and prints by how much the log-probabilities differ, adapter by adapter.

    Once as prefill does, adapters mixed in one batch; once with transformers and PEFT, one prompt at a time. Adapters
    that PEFT is known to apply wrongly are compared with weights merged by hand. The exit code is 1 if the difference
    of the base or of any adapter is larger than the tolerance.
    """
    with stdout_for_results() as stdout:
        return _verify(options, stdout)


def _verify(options: dict[str, Any], stdout: BinaryIO | None) -> int:
    from moelora.jobs.adapter_list import resolve_adapters
    from moelora.jobs.reader import open_rows
    from moelora.jobs.rows import parse_rows

    if stdout is None:
        raise ConfigError("standard output is closed, and nothing else would be written")
    adapters = resolve_adapters(options["adapters"])
    job_options = job_options_of(options, list(adapters))
    with open_rows(options["input_"]) as lines, Progress(quiet=options["quiet"]) as progress:
        quiet_libraries()
        from moelora.jobs.text import load_encoder
        from moelora.verify.run import verify as compare

        verdict = compare(
            options["model"],
            parse_rows(lines),
            load_encoder(options["model"]),
            adapters=adapters,
            options=engine_options_of(options),
            job_options=job_options,
            sample=options["sample"],
            tolerance=options["tolerance"],
            on_event=progress.event,
        )
    text = json.dumps(_facts(verdict), indent=2, ensure_ascii=False) if options["as_json"] else _table(verdict)
    stdout.write(text.encode() + b"\n")
    stdout.flush()
    return EXIT_FAILED if verdict.failed else EXIT_DONE


def _facts(verdict: Verdict) -> dict[str, Any]:
    """The verdict for programs. A difference that is not finite is null, and its row of `adapters` has not passed."""
    from moelora.jobs.writer import finite_row

    adapters = []
    for one in verdict.comparisons:
        facts = {key: value for key, value in asdict(one).items() if not key.startswith("_")}
        facts |= {"mean": one.mean, "passed": verdict.tolerance.admits(one), "error": None}
        adapters.append(finite_row(facts))
    return {
        "passed": not verdict.failed,
        "tolerance": verdict.tolerance.nats,
        "tolerance_on": verdict.tolerance.on,
        "dtype": verdict.dtype,
        "device": verdict.device,
        "rows": verdict.stats.rows,
        "error_rows": verdict.stats.error_rows,
        "adapters": adapters,
    }


def _table(verdict: Verdict) -> str:
    """The verdict for people: one line per adapter, the reasons, the conclusion."""
    rows = [_HEADINGS]
    for one in verdict.comparisons:
        greedy = f"{one.greedy_agree}/{one.greedy_total}"
        counts = (f"{one.rows:,}", f"{one.tokens:,}", f"{one.largest:.2e}", str(one.worst_line), f"{one.mean:.2e}")
        rows.append((one.adapter, one.reference, *counts, greedy))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    lines += [f"note: {one.adapter}: {one.note}" for one in verdict.comparisons if one.note]
    if verdict.stats.error_rows:
        pairs = f"{counted(verdict.stats.error_rows, 'pair')} of row and adapter"
        lines.append(f"note: left out because of errors: {pairs}")
    lines += [f"note: {error}" for error in verdict.stats.first_errors]
    return "\n".join([*lines, _conclusion(verdict)])


def _conclusion(verdict: Verdict) -> str:
    allowed, where = verdict.tolerance, f"{verdict.dtype} on {verdict.device}"
    bound = f"{where}, {allowed.on} difference up to {allowed.nats:g} nats allowed"
    return f"too far apart: {', '.join(verdict.failed)} ({bound})" if verdict.failed else f"all agree ({bound})"
