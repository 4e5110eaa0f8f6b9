"""A benchmark's report as bars: shares of the floor by workload, with their tokens per second."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelora.errors import ConfigError, choose_from
from moelora.wording import counted

if TYPE_CHECKING:
    from moelora.bench.report import BenchReport, Measurement

_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Raises `ConfigError` for a file that could not be drawn."""
    if Path(path).suffix not in _SUFFIXES:
        raise ConfigError(choose_from("plot format", Path(path).suffix, _SUFFIXES))
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: python -m pip install 'moelora-cli[plot]'")


def draw(report: BenchReport, path: str) -> None:
    """Writes one panel per task, a group of bars per workload, and a bar per setting.

    Rates of different workloads share no axis that is worth reading together, so bars are shares of the floor and carry
    their tokens per second as text.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(one.task for one in report.measurements))
    settings = list(dict.fromkeys(_setting(one) for one in report.measurements))
    workloads = list(dict.fromkeys(one.workload for one in report.measurements))
    figure = Figure(figsize=(2 + 1.1 * len(workloads) * max(len(settings), 2), 3.6 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(tasks), 1, squeeze=False)[:, 0]
    for task, panel in zip(tasks, panels, strict=True):
        measured = {(_setting(one), one.workload): one for one in report.measurements if one.task == task}
        _panel(panel, task, measured, settings, workloads)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize="small")
    figure.suptitle(f"{report.model}: {counted(report.layers, 'layer')}, {report.dtype}, {report.device_name}")
    figure.savefig(path)


def _panel(
    panel: Any, task: str, measured: dict[tuple[str, str], Measurement], settings: list[str], workloads: list[str]
) -> None:
    width = 0.8 / len(settings)
    for i, setting in enumerate(settings):
        places = [n + i * width for n, name in enumerate(workloads) if (setting, name) in measured]
        ones = [measured[setting, name] for name in workloads if (setting, name) in measured]
        bars = panel.bar(places, [100 * one.floor_share for one in ones], width, label=setting)
        panel.bar_label(
            bars, [f"{one.tokens_per_second:,.0f}" for one in ones], fontsize="x-small", rotation=90, padding=3
        )
    panel.set_xticks([n + 0.4 - width / 2 for n in range(len(workloads))], workloads)
    panel.set_title(f"{task}: share of the floor, and tokens per second", fontsize="medium")
    panel.set_ylabel("% of the floor")
    panel.margins(y=0.3)


def _setting(one: Measurement) -> str:
    adapters = f"{one.adapters} × rank {one.rank}" if one.adapters else f"base, {counted(one.loaded, 'adapter')} loaded"
    return f"{one.engine} {one.backend}, graph {one.graph}, {adapters}"
