"""A benchmark's report as tables for people, no wider than the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from moelora.wording import counted
from moelora_cli.command import size
from moelora_cli.layout import output_width

if TYPE_CHECKING:
    from moelora.bench.report import BenchReport, Measurement, Setup

_NOTHING = "–"
_GAP = 2
"""Characters between two columns."""
_ENGINE = "engine"
"""The column that moves into the title where all rows have it in common."""
_RUN = ("work", "task", _ENGINE, "adapters")
"""The columns that tell one run from another."""


def tables(report: BenchReport) -> str:
    """The whole report as plain text. What does not fit into one table stands in further ones of the same rows."""
    from rich.console import Console

    out = io.StringIO()
    width = output_width()
    console = Console(file=out, width=width, highlight=False, color_system=None)
    ceilings = report.ceilings
    console.print(
        f"{report.model}: {report.architecture}, {counted(report.layers, 'layer')}, {report.dtype} on "
        f"{report.device_name}",
        markup=False,
    )
    console.print(f"batches: of at most {counted(report.max_tokens, 'token')}")
    console.print(
        f"ceilings: {ceilings.bytes_per_second / 1e12:.3g} TB/s copied, "
        f"{ceilings.flops_per_second / 1e12:.3g} TFLOP/s in products"
    )
    for title, labels, numbers, rows in (_speeds(report), _parts(report), _setups(report), _buckets(report)):
        for table in _within(width, title, labels, numbers, rows):
            console.print(table)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


_Content = tuple[str, tuple[str, ...], tuple[str, ...], list[tuple[str, ...]]]
"""A table: its title, the headings of the columns that tell its rows apart and of the others, and its rows."""


def _speeds(report: BenchReport) -> _Content:
    headings = ("tokens/s", "ms", "of floor", "LoRA ×", "graph ×", "peer ×", "padding", "memory", "passes")
    rows: list[tuple[str, ...]] = [
        (
            *_labels(one),
            f"{one.tokens_per_second:,.0f}",
            f"{one.median_s * 1e3:,.1f}",
            f"{one.floor_share:.1%}",
            _times(report.lora_overhead(one)),
            _times(report.graph_gain(one)),
            _times(report.over_peer(one)),
            f"{one.padding_share:.1%}",
            size(one.memory_bytes) if one.memory_bytes is not None else _NOTHING,
            ", ".join(f"{n} {mode} {bucket or ''}".rstrip() for mode, bucket, n in one.passes) or _NOTHING,
        )
        for one in report.measurements
    ]
    return "speed", _RUN, headings, rows


def _parts(report: BenchReport) -> _Content:
    from moelora.bench.parts import PARTS

    rows: list[tuple[str, ...]] = [
        (
            *_labels(one),
            *(f"{one.profile.parts[part] * 1e3:,.1f}" for part in PARTS),
            f"{one.profile.host_s * 1e3:,.1f}",
            f"{one.profile.idle_share:.1%}",
            f"{sum(one.floor_s.values()) * 1e3:,.1f}",
        )
        for one in report.measurements
        if one.profile is not None
    ]
    return "ms by part", _RUN, (*PARTS, "host", "idle", "floor"), rows


def _setups(report: BenchReport) -> _Content:
    rows: list[tuple[str, ...]] = [
        (
            _engine(one),
            _adapters(one.adapters, one.rank),
            f"{one.seconds:.1f}",
            f"{one.report.get('graphs', {}).get('capture_seconds', 0):.1f}",
            size(one.weight_bytes),
            size(one.slot_bytes),
            size(one.report.get("graphs", {}).get("capture_bytes", 0)),
        )
        for one in report.setups
    ]
    return "set up", (_ENGINE, "adapters"), ("seconds", "capture s", "weights", "slots", "graphs"), rows


def _buckets(report: BenchReport) -> _Content:
    rows: list[tuple[str, ...]] = [
        (
            _engine(one),
            _adapters(one.adapters, one.rank),
            f"{timing['bucket']:,}",
            f"{timing['eager_s'] * 1e3:,.2f}",
            f"{timing['graph_s'] * 1e3:,.2f}",
        )
        for one in report.setups
        for timing in _timings(one)
    ]
    title = "body by bucket, all base, as auto measured it"
    return title, (_ENGINE, "adapters"), ("tokens", "eager ms", "graph ms"), rows


def _timings(setup: Setup) -> list[dict[str, float]]:
    return setup.report.get("graphs", {}).get("timings", [])


def _within(
    width: int, title: str, labels: Sequence[str], numbers: Sequence[str], rows: list[tuple[str, ...]]
) -> Iterator[Any]:
    """Tables of at most `width` characters that together say what is in `rows`; none of no rows.

    Each has the columns that tell rows apart. An engine that all rows share moves into the title, and a column without
    a value is left out.
    """
    if not rows:
        return
    columns = dict(zip((*labels, *numbers), zip(*rows, strict=True), strict=True))
    kept = {name: columns[name] for name in labels}
    if len(engines := set(kept[_ENGINE])) == 1:
        title = f"{title}: {engines.pop()}"
        del kept[_ENGINE]
    rest = {name: columns[name] for name in numbers if set(columns[name]) != {_NOTHING}}
    while rest:
        block = dict(kept)
        for name, cells in rest.items():
            if len(block) > len(kept) and _width({**block, name: cells}) > width:
                break
            block[name] = cells
        rest = {name: cells for name, cells in rest.items() if name not in block}
        yield _table(title, block, len(kept))
        title = ""


def _width(columns: dict[str, tuple[str, ...]]) -> int:
    """Characters of a line of the table: cells, the gaps behind them, and a space at its beginning."""
    return sum(max(map(len, (name, *cells))) + _GAP for name, cells in columns.items()) + 1


def _table(title: str, columns: dict[str, tuple[str, ...]], labels: int) -> Any:
    """A table of columns, the first `labels` of which stand to the left and the others to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < labels else "right")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _labels(one: Measurement) -> tuple[str, ...]:
    return one.workload, one.task, _engine(one), _adapters(one.adapters, one.rank)


def _engine(one: Measurement | Setup) -> str:
    """Ours by backend and graph mode, a peer by its name."""
    from moelora.bench.report import OWN

    return f"{one.backend}, graph {one.graph}" if one.engine == OWN else one.engine


def _adapters(count: int, rank: int) -> str:
    return f"{count}, rank {rank}" if count else "none"


def _times(factor: float | None) -> str:
    return _NOTHING if factor is None else f"{factor:.3f}"
