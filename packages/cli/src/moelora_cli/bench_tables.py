"""A benchmark's report as tables for people."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from moelora.wording import counted
from moelora_cli.command import size

if TYPE_CHECKING:
    from moelora.bench.report import BenchReport, Measurement, Setup

_WIDTH = 200


def tables(report: BenchReport) -> str:
    """The whole report as plain text, the same on a terminal and in a file."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=_WIDTH, highlight=False, color_system=None, soft_wrap=True)
    ceilings = report.ceilings
    console.print(
        f"{report.model}: {report.architecture}, {counted(report.layers, 'layer')}, {report.dtype} on "
        f"{report.device_name}; at most {report.max_tokens:,} tokens per batch"
    )
    console.print(
        f"ceilings: {ceilings.bytes_per_second / 1e12:.3g} TB/s copied, "
        f"{ceilings.flops_per_second / 1e12:.3g} TFLOP/s in products"
    )
    console.print(_speeds(report))
    if any(one.profile for one in report.measurements):
        console.print(_parts(report))
    console.print(_setups(report))
    if any(_timings(one) for one in report.setups):
        console.print(_buckets(report))
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _speeds(report: BenchReport) -> Any:
    headings = ("tokens/s", "ms", "of floor", "LoRA ×", "graph ×", "peer ×", "padding", "memory", "passes")
    table = _table("speed", ("work", "task", "engine", "graph", "adapters"), headings)
    for one in report.measurements:
        table.add_row(
            *_labels(one),
            f"{one.tokens_per_second:,.0f}",
            f"{one.median_s * 1e3:,.1f}",
            f"{one.floor_share:.1%}",
            _times(report.lora_overhead(one)),
            _times(report.graph_gain(one)),
            _times(report.over_peer(one)),
            f"{one.padding_share:.1%}",
            size(one.memory_bytes) if one.memory_bytes is not None else "–",
            ", ".join(f"{n} {mode} {bucket or ''}".rstrip() for mode, bucket, n in one.passes) or "–",
        )
    return table


def _parts(report: BenchReport) -> Any:
    from moelora.bench.parts import PARTS

    table = _table("ms by part", ("work", "task", "engine", "graph", "adapters"), (*PARTS, "host", "idle", "floor"))
    for one in report.measurements:
        if one.profile is not None:
            table.add_row(
                *_labels(one),
                *(f"{one.profile.parts[part] * 1e3:,.1f}" for part in PARTS),
                f"{one.profile.host_s * 1e3:,.1f}",
                f"{one.profile.idle_share:.1%}",
                f"{sum(one.floor_s.values()) * 1e3:,.1f}",
            )
    return table


def _setups(report: BenchReport) -> Any:
    table = _table("set up", ("engine", "graph", "adapters"), ("seconds", "capture s", "weights", "slots", "graphs"))
    for one in report.setups:
        graphs = one.report.get("graphs", {})
        table.add_row(
            f"{one.engine} {one.backend}",
            one.graph,
            _adapters(one.adapters, one.rank),
            f"{one.seconds:.1f}",
            f"{graphs.get('capture_seconds', 0):.1f}",
            size(one.weight_bytes),
            size(one.slot_bytes),
            size(graphs.get("capture_bytes", 0)),
        )
    return table


def _buckets(report: BenchReport) -> Any:
    table = _table(
        "body by bucket, all base, as auto measured it", ("engine", "adapters"), ("tokens", "eager ms", "graph ms")
    )
    for one in report.setups:
        for timing in _timings(one):
            table.add_row(
                f"{one.engine} {one.backend}",
                _adapters(one.adapters, one.rank),
                f"{timing['bucket']:,}",
                f"{timing['eager_s'] * 1e3:,.2f}",
                f"{timing['graph_s'] * 1e3:,.2f}",
            )
    return table


def _timings(setup: Setup) -> list[dict[str, float]]:
    return setup.report.get("graphs", {}).get("timings", [])


def _table(title: str, labels: tuple[str, ...], numbers: tuple[str, ...]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for label in labels:
        table.add_column(label)
    for number in numbers:
        table.add_column(number, justify="right")
    return table


def _labels(one: Measurement) -> tuple[str, ...]:
    engine = f"{one.engine} {one.backend}"
    return one.workload, one.task, engine, one.graph, _adapters(one.adapters, one.rank)


def _adapters(count: int, rank: int) -> str:
    return f"{count} of rank {rank}" if count else "none"


def _times(factor: float | None) -> str:
    return "–" if factor is None else f"{factor:.3f}"
