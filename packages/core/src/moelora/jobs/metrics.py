"""The counters of a run in Prometheus text format, for a file that a node exporter picks up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moelora.types import Phase, RunMode

_WHOLE = " Of the whole output: what earlier processes scored, which this run goes on from, counts too."
_OWN = " Of this run's own processes, without those that it goes on from."
_PLAIN = {
    "rows": ("moelora_input_rows_total", "Rows read from the input."),
    "output_rows": ("moelora_output_rows_total", "Lines written, one per row and adapter."),
    "error_rows": ("moelora_error_rows_total", "Lines written that hold an error."),
    "requests": ("moelora_requests_total", "Sequences scored."),
    "tokens": ("moelora_tokens_total", "Tokens scored, choices included, padding left out."),
    "truncated_tokens": ("moelora_truncated_tokens_total", "Prompt tokens cut away by --on-long truncate-left."),
}


def encode_metrics(report: Mapping[str, Any]) -> bytes:
    """The counters of a report (`report.build_report`) as Prometheus text.

    Of `report["engine"]` it reads `passes`, a list of `{phase, mode, bucket, count}`; `eager_reasons`, a count by
    reason; and `peak_device_bytes`.
    """
    from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

    registry = CollectorRegistry()  # of its own: the process-wide one would add counters of the interpreter
    for key, (name, text) in _PLAIN.items():
        Counter(name, text + _WHOLE, registry=registry).inc(report[key])
    _count_passes(report["engine"], registry)
    seconds = "Seconds of scoring, loading left out." + _OWN
    Gauge("moelora_run_seconds", seconds, registry=registry).set(report["seconds"])
    peak = report["engine"].get("peak_device_bytes")
    if peak is not None:
        most = "Most device memory in use at once." + _OWN
        Gauge("moelora_peak_device_bytes", most, registry=registry).set(peak)
    # Each counter also has a series with its creation time, which says nothing about a run that is over.
    text = generate_latest(registry).decode("utf-8").splitlines(keepends=True)
    return "".join(line for line in text if "_created" not in line).encode("utf-8")


def _count_passes(engine: Mapping[str, Any], registry: Any) -> None:
    from prometheus_client import Counter

    graphs = Counter(
        "moelora_cuda_graph_passes_total",
        "Batches that replayed a CUDA graph." + _OWN,
        ("phase", "mode", "bucket"),
        registry=registry,
    )
    for entry in engine.get("passes", []):
        if entry["mode"] != RunMode.EAGER:
            graphs.labels(phase=entry["phase"], mode=entry["mode"], bucket=entry["bucket"]).inc(entry["count"])
    eager = Counter(
        "moelora_eager_passes_total", "Batches that ran without a graph." + _OWN, ("phase", "reason"), registry=registry
    )
    for reason, count in engine.get("eager_reasons", {}).items():
        eager.labels(phase=Phase.PREFILL.value, reason=reason).inc(count)
