"""`moelora prefill`: scores a file of prompts under a base model and its adapters."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import click

from moelora.errors import ConfigError
from moelora_cli.command import MoeloraCommand
from moelora_cli.options import (
    engine_options,
    is_stream,
    job_options_of,
    model_options,
    quiet_libraries,
    refuse_closed,
    row_options,
    score_options,
    share_options,
    stdout_for_results,
)
from moelora_cli.parts import stats_of_made_output
from moelora_cli.progress import Progress, WorkerProgress
from moelora_cli.run import Run
from moelora_cli.workers import check_devices, score_with_workers


@click.command(cls=MoeloraCommand, short_help="Score prompts under a base model and its adapters.")
@model_options
@click.option(
    "--input",
    "input_",
    required=True,
    metavar="FILE|-",
    help="Rows: JSON Lines or Parquet; - is standard input.",
)
@click.option("--output", metavar="FILE|-", help="Scores: JSON Lines or Parquet; - is standard output.")
@row_options
@score_options
@engine_options
@share_options
@click.option("--worker", hidden=True)  # of a run with --devices; a file with what its parent knows
@click.option("--overwrite", is_flag=True, help="Replace an output that exists, and the parts of another run.")
@click.option("--report", metavar="FILE", help="Write the report of the run: a page if FILE ends in .html, else JSON.")
@click.option("--metrics-file", metavar="FILE", help="Write counters in Prometheus text format.")
@click.option("--dry-run", is_flag=True, help="Print the token ids that would be scored; load no weights.")
@click.option("--quiet", is_flag=True, help="No progress and no summary.")
def prefill(**options: Any) -> int:
    """Scores every row of --input under its adapters, in one pass over MODEL, and writes one line per row and adapter.

    MODEL is a checkpoint folder or a model in the Hugging Face cache. A row is a JSON object with one of prompt,
    prompt_token_ids or messages, and optionally id, adapter, choices or choices_token_ids, metadata.
    """
    with stdout_for_results() as stdout:
        return _prefill(options, stdout)


def _prefill(options: dict[str, Any], stdout: BinaryIO | None) -> int:
    """The command in its order: everything that can be refused cheaply comes before everything that costs."""
    from moelora.jobs.adapter_list import resolve_adapters
    from moelora.jobs.reader import open_rows
    from moelora.jobs.shards import parse_shard
    from moelora.jobs.writer import missing_folder

    options["shard"] = parse_shard(options["shard"])
    check_devices(options)
    refuse_closed(stdout, "-" if options["dry_run"] else options["output"])
    stdout = BytesIO() if stdout is None else stdout
    _check_files(options)
    adapters = resolve_adapters(options["adapters"])
    job_options = job_options_of(options, list(adapters))
    with open_rows(options["input_"]) as lines, _progress(options, stdout) as progress:
        progress.expect(lines.total)
        quiet_libraries()
        from moelora.jobs.text import load_encoder

        run = Run(
            options=options,
            adapters=adapters,
            job_options=job_options,
            encoder=load_encoder(options["model"]),
            lines=lines,
            progress=progress,
            stdout=stdout,
        )
        if options["dry_run"]:
            return run.print_token_ids()
        if options["worker"] is None and (missing := missing_folder(options["output"])) is not None:
            progress.note(f"making the folder {missing}, which --output names and which is not there")
        if (stats := stats_of_made_output(options)) is not None:
            return run.remove_parts(stats)
        if not run.has_good_row():
            return run.write_errors()
        if options["devices"] is not None:
            return score_with_workers(options, adapters, progress)
        return run.score()


def _progress(options: dict[str, Any], stdout: BinaryIO) -> Progress:
    """A worker's is for its parent, which shows that of all."""
    if options["worker"] is not None:
        return WorkerProgress(Path(options["worker"]).parent)
    on_stdout = options["output"] == "-" or options["dry_run"]
    return Progress(quiet=options["quiet"], results=stdout if on_stdout else None)


def _check_files(options: dict[str, Any]) -> None:
    """Refuses outputs that cannot be written and files given twice."""
    from moelora.jobs.writer import check_folder, check_output

    if options["shard"] is not None and (options["output"] in (None, "-") or is_stream(options["input_"])):
        raise ConfigError("--shard needs a file as --input and a folder as --output")
    if options["output"] is None and not options["dry_run"]:
        raise ConfigError("--output is missing; give a file, or - for standard output")
    files: dict[str, str] = {}
    for option in ("input_", "output", "report", "metrics_file"):
        path = options[option]
        if path is None or path == "-":
            if path == "-" and option in ("report", "metrics_file"):
                raise ConfigError(f"--{option.replace('_', '-')} needs a file; standard output is for results")
            continue
        name = "--" + option.strip("_").replace("_", "-")
        real = os.path.realpath(path)
        device = os.path.exists(real) and not os.path.isfile(real)  # several may go to /dev/null
        if real in files and not device:
            raise ConfigError(f"{files[real]} and {name} are the same file, {path}")
        files[real] = name
        if option != "input_" and not options["dry_run"]:
            if option == "output" and options["shard"] is not None:
                check_folder(path)
                continue
            # Reports are made anew by each run; only results are kept from being replaced by accident.
            # A worker writes parts alone, and its parent has checked.
            may_exist = options["overwrite"] or option != "output" or options["worker"] is not None
            may_exist = may_exist or stats_of_made_output(options) is not None
            check_output(path, overwrite=may_exist, what=name)
