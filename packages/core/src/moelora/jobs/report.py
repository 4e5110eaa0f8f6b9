"""The report of a run: what was scored, how fast, and what the engine did for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moelora.capacity import EagerReason
from moelora.jobs.stats import JobStats
from moelora.jobs.writer import finite_row
from moelora.types import RunMode
from moelora.versions import versions
from moelora.wording import counted, measured

MEMORY_PARTS = {
    "base": "base weights",
    "bank": "adapter slots",
    "static": "metadata and expert scratch",
    "graphs": "captured graphs",
    "activations": "activations of the largest batch",
    "scoring_chunk": "scoring chunk",
}
"""Parts of device memory, of `memory.MemoryPlan`, in words."""


def build_report(
    stats: JobStats,
    *,
    seconds: float,
    load_seconds: float,
    engine: Mapping[str, Any],
    run: Mapping[str, Any],
    timeline: Mapping[str, Any] | None = None,
    earlier_tokens: int = 0,
) -> dict[str, Any]:
    """The report as a JSON object.

    seconds: from the first row until the last was scored. load_seconds: model, adapters and capture.
    engine: the engine's own report, kept whole under `engine`. run: what was asked for (model, adapters, options).
    timeline: tokens scored by second, of `timeline.Timeline`; the rate counts them alone, as a run that goes on counts
    rows of earlier ones too. earlier_tokens: those that earlier ones scored.
    """
    scored = _scored(timeline, stats.tokens)
    return {
        "rows": stats.rows,
        "output_rows": stats.output_rows,
        "error_rows": stats.error_rows,
        "first_errors": list(stats.first_errors),
        "requests": stats.requests,
        "tokens": stats.tokens,
        "earlier_tokens": earlier_tokens,
        "truncated_rows": stats.truncated_rows,
        "truncated_tokens": stats.truncated_tokens,
        "seconds": seconds,
        "load_seconds": load_seconds,
        "tokens_per_second": scored / seconds if seconds > 0 else 0.0,
        "timeline": dict(timeline or {"began": None, "points": []}),
        "warnings": list(stats.warnings),
        "engine": dict(engine),
        "run": dict(run),
        "versions": versions(),
    }


def _scored(timeline: Mapping[str, Any] | None, tokens: int) -> int:
    """The tokens that the rate counts: those of the timeline, or all if there is none."""
    points = timeline["points"] if timeline else []
    return int(points[-1][1]) if points else tokens


def encode_report(report: Mapping[str, Any]) -> bytes:
    """The report as indented JSON. What JSON cannot hold is written as its text."""
    text = json.dumps(finite_row(dict(report)), indent=2, default=str, ensure_ascii=False) + "\n"
    # What is no UTF-8 in a file's name is a lone surrogate here, and `\udcff` behind it, as JSON has it.
    return text.encode("utf-8", "backslashreplace")


def summary(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The report in a few (label, text) lines for people."""
    scored = _scored(report["timeline"], report["tokens"])
    which = "" if scored == report["tokens"] else f"{scored:,} of them "  # the others were scored before, or elsewhere
    lines = [
        ("rows", rows_and_lines(report["rows"], report["output_rows"], report["error_rows"])),
        ("tokens", f"{report['tokens']:,} in {counted(report['requests'], 'request')}"),
        (
            "time",
            f"{measured(report['seconds'])} scoring {which}({report['tokens_per_second']:,.0f} tokens/s), "
            f"{measured(report['load_seconds'])} loading",
        ),
    ]
    if report["truncated_rows"]:
        cut = counted(report["truncated_tokens"], "token")
        lines.append(("cut", f"{cut} of {counted(report['truncated_rows'], 'row')}"))
    engine = report["engine"]
    passes = [
        f"{entry['count']:,} {entry['mode']} at {entry['bucket']}"
        for entry in engine.get("passes", [])
        if entry["mode"] != RunMode.EAGER
    ]
    passes += [f"{count:,} eager: {_why(reason)}" for reason, count in engine.get("eager_reasons", {}).items()]
    if passes:
        lines.append(("batches", ", ".join(passes)))
    lines += [("longest", text) for text in _longest(engine)]
    lines += [("attention", text) for text in _attention(engine.get("attention", []))]
    if engine.get("peak_device_bytes"):
        lines.append(("memory", f"{engine['peak_device_bytes'] / 2**30:.2f} GiB at most on the device"))
    if engine.get("memory_measured"):
        parts = [f"{engine['memory_measured'][key] / 2**30:.2f} {text}" for key, text in MEMORY_PARTS.items()]
        lines.append(("", f"GiB by part: {', '.join(parts)}"))
    return lines


def rows_and_lines(rows: int, lines: int, errors: int) -> str:
    """Rows of the input beside lines of the output, one for each adapter of a row, and those of them with an error."""
    said = f"{rows:,} in, {counted(lines, 'line')} out, "
    return said + (f"{errors:,} of them {'errors' if errors > 1 else 'an error'}" if errors else "no errors")


def _longest(engine: Mapping[str, Any]) -> Iterator[str]:
    """The largest batch, of all workers, where it had more tokens than a batch may: it was one sequence."""
    workers = [one for one in engine.get("workers") or [engine] if one.get("largest_batch")]
    largest = max(workers, key=lambda one: int(one["largest_batch"]), default=None)
    if largest is not None and largest["largest_batch"] > largest["max_tokens"]:
        tokens = counted(largest["largest_batch"], "token")
        yield f"{tokens} in one sequence; those longer than --max-tokens ({largest['max_tokens']:,}) run alone"


def _attention(chosen: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where FlashAttention 4 runs; nothing for attention that always runs the kernel of the backend."""
    for entry in chosen:
        places = (("requests", entry["fa4_from_request_tokens"]), ("graphs", entry["fa4_from_bucket"]))
        told = [f"{what} of {least:,} tokens and more" for what, least in places if least is not None]
        if told:
            yield f"FlashAttention 4 in {' and '.join(told)} ({entry['attention']})"


def _why(reason: str) -> str:
    """An eager reason in words; one that this version does not know stays as it is."""
    known = {str(one): one.text for one in EagerReason}
    return known.get(reason, reason)
