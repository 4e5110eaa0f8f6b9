"""What `moelora prefill` leaves beside its scores: the report, the metrics, and what is said at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelora_cli.progress import Progress

if TYPE_CHECKING:
    from moelora.jobs.score_tally import ScoreTally
    from moelora.jobs.stats import JobStats


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
