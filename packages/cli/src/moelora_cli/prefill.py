"""`moelora prefill`: scores a file of prompts under a base model and its adapters."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from moelora.errors import ConfigError
from moelora_cli.command import EXIT_DONE, EXIT_ROW_ERRORS, JobFailedError, MoeloraCommand
from moelora_cli.interrupts import end_with, interrupts
from moelora_cli.options import (
    engine_options,
    engine_options_of,
    is_stream,
    job_options_of,
    model_options,
    quiet_libraries,
    row_options,
    score_options,
    share_options,
    stdout_for_results,
)
from moelora_cli.parts import finish_parts, in_use, open_parts, refuse_changed, score_in_parts, worker_facts
from moelora_cli.progress import Progress, WorkerProgress
from moelora_cli.workers import check_devices, score_with_workers

if TYPE_CHECKING:
    from moelora.jobs.parts import PartStore
    from moelora.jobs.rows import Row
    from moelora.jobs.run import JobOptions, PrefillJob
    from moelora.jobs.score_tally import ScoreTally
    from moelora.jobs.stats import JobStats
    from moelora.jobs.text import TextEncoder
    from moelora.jobs.timeline import Timeline


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

    options["shard"] = parse_shard(options["shard"])
    check_devices(options)
    if stdout is None:  # closed by whoever started us
        if options["output"] == "-" or options["dry_run"]:
            raise ConfigError("standard output is closed; give --output FILE")
        stdout = BytesIO()
    _check_files(options)
    adapters = resolve_adapters(options["adapters"])
    job_options = job_options_of(options, list(adapters))
    with open_rows(options["input_"]) as lines, _progress(options, stdout) as progress:
        progress.expect(lines.total)
        quiet_libraries()
        from moelora.jobs.text import load_encoder

        encoder = load_encoder(options["model"])
        if options["dry_run"]:
            return _dry_run(options, job_options, encoder, list(adapters), lines, stdout)
        if not _some_row_is_good(options, job_options, encoder, list(adapters)):
            return _write_errors(options, job_options, encoder, adapters, lines, progress, stdout)
        if options["devices"] is not None:
            return score_with_workers(options, adapters, progress)
        return _score(options, job_options, encoder, adapters, lines, progress, stdout)


def _progress(options: dict[str, Any], stdout: BinaryIO) -> Progress:
    """A worker's is for its parent, which shows that of all."""
    if options["worker"] is not None:
        return WorkerProgress(Path(options["worker"]).parent)
    on_stdout = options["output"] == "-" or options["dry_run"]
    return Progress(quiet=options["quiet"], results=stdout if on_stdout else None)


def _some_row_is_good(options: dict[str, Any], job_options: JobOptions, encoder: TextEncoder, names: list[str]) -> bool:
    """Whether a row of the input can be scored: as a rule the first, and minutes of loading are not for nothing.

    True where it is not looked at: an input that can be read only once, and a shard, which leaves parts for the others.
    """
    from moelora.jobs.dry import dry_scorer
    from moelora.jobs.run import PrefillJob

    if is_stream(options["input_"]) or options["shard"] is not None or options["worker"] is not None:
        return True
    job = PrefillJob(dry_scorer(options["model"], names), encoder, job_options)
    return any(True for _ in job.requests(_read_rows(options["input_"])))


def _write_errors(
    options: dict[str, Any],
    job_options: JobOptions,
    encoder: TextEncoder,
    adapters: dict[str, Path],
    lines: Any,
    progress: Progress,
    stdout: BinaryIO,
) -> int:
    """The run of an input without a good row: every line is an error, and no engine is needed for it."""
    from moelora.jobs.dry import dry_scorer
    from moelora.jobs.run import PrefillJob
    from moelora.jobs.timeline import Timeline

    start = time.monotonic()
    progress.note("no row of the input can be scored; the model is not loaded")
    with ExitStack() as held:
        parts = held.enter_context(open_parts(options, adapters)[0]) if _in_parts(options) else None
        scorer = dry_scorer(options["model"], list(adapters))
        job = PrefillJob(scorer, encoder, job_options, on_progress=progress.counts)
        code = _run(options, adapters, job, scorer, Timeline(), None, lines, progress, stdout, start)
        if parts is not None:
            parts.discard()
    return code


def _score(
    options: dict[str, Any],
    job_options: JobOptions,
    encoder: TextEncoder,
    adapters: dict[str, Path],
    lines: Any,
    progress: Progress,
    stdout: BinaryIO,
) -> int:
    from moelora.jobs.run import PrefillJob
    from moelora.jobs.timeline import TimedScorer, Timeline

    start = time.monotonic()
    worker = worker_facts(options)
    if worker is not None:
        end_with(worker["parent"], Path(options["worker"]).parent)
    with ExitStack() as held:
        parts = open_parts(options, adapters) if _in_parts(options) else None
        if parts is not None:
            held.enter_context(parts[0])
        engine = _load_engine(options, adapters, progress)
        timeline = Timeline()
        job = PrefillJob(TimedScorer(engine, timeline), encoder, job_options, on_progress=progress.counts)
        if parts is not None:
            refuse_changed(parts[2], options, adapters)
            parts[0].begin({**parts[1], **in_use(engine)})
        return _run(options, adapters, job, engine, timeline, parts and parts[0], lines, progress, stdout, start)


def _run(
    options: dict[str, Any],
    adapters: dict[str, Path],
    job: PrefillJob,
    engine: Any,
    timeline: Timeline,
    parts: PartStore | None,
    lines: Any,
    progress: Progress,
    stdout: BinaryIO,
    start: float,
) -> int:
    """What follows once everything is loaded and nothing was refused."""
    from moelora.jobs.report import build_report
    from moelora.jobs.rows import read_rows
    from moelora.jobs.score_tally import ScoreTally, TallySink
    from moelora.jobs.writer import open_output

    loaded = time.monotonic()
    progress.begin()
    tally = None
    try:
        if parts is not None:
            read = partial(_read_rows, options["input_"])
            with interrupts(engine.stop, progress.say, worker=options["worker"] is not None):
                score_in_parts(options, parts, job, engine, read, lines.total, progress)
                scored = time.monotonic()
                finish_parts(options, parts)
        else:
            tally = ScoreTally()
            sink = open_output(options["output"], stdout)
            taking = TallySink(sink, tally) if is_page(options["report"]) else sink
            with taking, interrupts(engine.stop, progress.say):
                job.run(read_rows(lines), taking)
                scored = time.monotonic()
                progress.scored(job.stats, job.earlier)
        stats = job.stats
        report = build_report(
            stats,
            seconds=scored - loaded,
            load_seconds=loaded - start,
            engine=engine.report(),
            run=asked_for(options, adapters),
            timeline=timeline.as_json(),
            earlier_tokens=job.earlier.tokens,
        )
        write_reports(options, report, tally)
    except BrokenPipeError:
        raise
    except Exception as error:
        raise JobFailedError from error
    tell(stats, report, progress, quiet=options["quiet"])
    return EXIT_ROW_ERRORS if stats.error_rows else EXIT_DONE


def _read_rows(source: str) -> Iterator[Row]:
    """The rows of a file, from the first on."""
    from moelora.jobs.reader import open_rows
    from moelora.jobs.rows import read_rows

    with open_rows(source) as lines:
        yield from read_rows(lines)


def _load_engine(options: dict[str, Any], adapters: dict[str, Path], progress: Progress) -> Any:
    from moelora.engine import PrefillEngine
    from moelora.environment import device_of_place, free_host_memory, freeze_objects
    from moelora.jobs.shards import local_place

    chosen = engine_options_of(options)
    worker, place = worker_facts(options), local_place() if options["shard"] is not None else None
    sharing = worker["workers"] if worker is not None else place[1] if place is not None else 1
    if sharing > 1 and (free := free_host_memory()) is not None:
        chosen = replace(chosen, host_bytes=free // (2 * sharing))
    if place is not None and chosen.device == "auto":  # else all shards of a machine would crowd its first GPU
        chosen = replace(chosen, device=device_of_place(place[0]))
    engine = PrefillEngine(options["model"], adapters=adapters, options=chosen, on_event=progress.event)
    freeze_objects()
    return engine


def _dry_run(
    options: dict[str, Any],
    job_options: JobOptions,
    encoder: TextEncoder,
    names: list[str],
    lines: Any,
    stdout: BinaryIO,
) -> int:
    from moelora.jobs.dry import dry_scorer
    from moelora.jobs.rows import parse_rows
    from moelora.jobs.run import PrefillJob
    from moelora.jobs.writer import StreamSink

    job = PrefillJob(dry_scorer(options["model"], names), encoder, job_options)
    with StreamSink(stdout) as sink:
        stats = job.dry_run(parse_rows(lines), sink)
    return EXIT_ROW_ERRORS if stats.error_rows else EXIT_DONE


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
            check_output(path, overwrite=may_exist, what=name)


def _in_parts(options: dict[str, Any]) -> bool:
    """Whether the run can be resumed: its input can be read again, and its output is a file or a folder."""
    if is_stream(options["input_"]) or options["output"] == "-":
        return False
    return options["shard"] is not None or not os.path.exists(options["output"]) or os.path.isfile(options["output"])


def asked_for(options: dict[str, Any], adapters: dict[str, Path]) -> dict[str, Any]:
    """The options as the report keeps them."""
    left_out = ("adapters", "quiet", "dry_run", "worker")
    asked = {key.strip("_"): value for key, value in options.items() if key not in left_out}
    return {**asked, "adapters": {name: str(path) for name, path in adapters.items()}}


def is_page(path: str | None) -> bool:
    """Whether a report is wanted as a page."""
    return path is not None and path.lower().endswith((".html", ".htm"))


def write_reports(options: dict[str, Any], report: dict[str, Any], tally: ScoreTally | None = None) -> None:
    """Writes --report and --metrics-file, where they were asked for. tally: of the rows, None to read the output."""
    from moelora.jobs.metrics import encode_metrics
    from moelora.jobs.report import encode_report
    from moelora.jobs.writer import write_whole

    if is_page(options["report"]):
        from moelora.jobs.report_page import render_page
        from moelora.jobs.score_tally import tally_output

        rows = tally or tally_output(Path(options["output"]), shard=options["shard"])
        write_whole(options["report"], render_page(report, rows))
    elif options["report"] is not None:
        write_whole(options["report"], encode_report(report))
    if options["metrics_file"] is not None:
        write_whole(options["metrics_file"], encode_metrics(report))


def tell(stats: JobStats, report: dict[str, Any], progress: Progress, *, quiet: bool) -> None:
    """The summary, the first errors and the warnings; warnings are said even under --quiet."""
    from moelora.jobs.report import summary

    if not quiet:
        for label, text in summary(report):
            progress.say(f"{label:<8}{text}")
        for error in stats.first_errors:
            progress.say(f"row error: {error}")
        if stats.error_rows > len(stats.first_errors):
            progress.say(f"{stats.error_rows:,} lines of the output have an error; each says which")
    for warning in stats.warnings:
        progress.say(f"warning: {warning}")
