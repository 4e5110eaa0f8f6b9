"""Charts as SVG text, for a page that must carry everything itself. Colours are CSS variables of that page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from moelora.wording import counted

_WIDTH = 900
_LEFT = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: what it stands for, how long it is, and the CSS variable of its colour."""

    label: str
    value: float
    colour: str = "--a"


def area_chart(series: Sequence[tuple[float, float]], *, mean: float, x_label: str, y_label: str) -> str:
    """A filled line over (x, y) with x ascending from 0, and a dashed line at `mean`."""
    height, top, bottom = 230, 22, 190
    right = _WIDTH - 20
    x_end = series[-1][0] + series[0][0]
    ticks = nice_ticks(max(mean, *(y for _, y in series)))
    scale_y = (bottom - top) / ticks[-1]
    scale_x = (right - _LEFT) / x_end
    line = " ".join(f"{_LEFT + x * scale_x:.1f},{bottom - y * scale_y:.1f}" for x, y in series)
    first, last = _LEFT + series[0][0] * scale_x, _LEFT + series[-1][0] * scale_x
    parts = [_horizontal(bottom - t * scale_y, right, f"{t:,.0f}") for t in ticks]
    parts.append(f'<polygon points="{first:.1f},{bottom} {line} {last:.1f},{bottom}" fill="var(--a)" opacity=".25"/>')
    parts.append(f'<polyline points="{line}" fill="none" stroke="var(--a)" stroke-width="1.8"/>')
    y = bottom - mean * scale_y
    parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="var(--b)" stroke-dasharray="5 4"/>')
    parts.append(_text(right, 12, f"mean {mean:,.0f}, dashed", "end", "soft"))
    parts += [
        _text(_LEFT + t * scale_x, bottom + 16, f"{t:g}", "middle", "soft") for t in nice_ticks(x_end) if t <= x_end
    ]
    parts += [_text(right, height - 6, x_label, "end", "soft"), _text(4, 12, y_label, "start", "soft")]
    return _svg(height, parts, f"{y_label} over {x_label}")


def bar_chart(bars: Sequence[Bar]) -> str:
    """Horizontal bars with their labels on the left and their values behind them."""
    step = 26
    left = max([210, *(7 * len(bar.label) + 14 for bar in bars)])  # a letter is about 7 wide
    longest = max((bar.value for bar in bars), default=0) or 1
    parts = []
    for i, bar in enumerate(bars):
        y, width = 6 + i * step, (_WIDTH - left - 90) * bar.value / longest
        parts.append(_text(left - 10, y + 14, bar.label, "end"))
        parts.append(
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="18" rx="3" fill="var({bar.colour})" opacity=".8"/>'
        )
        parts.append(_text(left + width + 8, y + 14, f"{bar.value:,.10g}"))
    return _svg(12 + len(bars) * step, parts, "; ".join(f"{bar.label}: {bar.value:,.10g}" for bar in bars))


def histogram_rows(
    rows: Mapping[str, Mapping[int, int]], medians: Mapping[str, float], *, bin_width: float, x_label: str
) -> str:
    """One histogram per row over one common axis; each as high as its own largest bin, its median marked.

    rows: counts by bin, bin i covering [i, i + 1) × `bin_width`. medians: of the same rows, in the unit of `bin_width`.
    Bins are put together where there are too many to see.
    """
    low = min(min(bins) for bins in rows.values())
    high = max(max(bins) for bins in rows.values()) + 1
    merge = max(1, -(-(high - low) // 90))
    left, right, step = 160, _WIDTH - 20, 44
    scale = (right - left) / ((high - low) * bin_width)
    bottom = 8 + len(rows) * step
    parts = []
    for tick in _round_numbers(low * bin_width, high * bin_width):
        x = left + (tick - low * bin_width) * scale
        parts.append(f'<path class="grid" d="M{x:.1f} 8V{bottom}"/>')
        parts.append(_text(x, bottom + 16, f"{tick:g}", "middle", "soft"))
    for i, (name, bins) in enumerate(rows.items()):
        base = 8 + (i + 1) * step - 4
        wide: dict[int, int] = {}
        for index, count in bins.items():
            wide[(index - low) // merge] = wide.get((index - low) // merge, 0) + count
        unit, tallest = (step - 8) / max(wide.values()), merge * bin_width * scale
        parts.append(_text(left - 10, base - 8, name, "end"))
        for index, count in sorted(wide.items()):
            x, tall = left + index * tallest, count * unit
            start = (low + index * merge) * bin_width
            parts.append(
                f'<rect x="{x:.1f}" y="{base - tall:.1f}" width="{max(tallest - 1, 1):.1f}" height="{tall:.1f}" '
                f'fill="var(--a)" opacity=".75"><title>{escape(name)}: {counted(count, "row")} from {start:.2f} to '
                f"{start + merge * bin_width:.2f}</title></rect>"
            )
        x = left + (medians[name] - low * bin_width) * scale
        parts.append(f'<path d="M{x:.1f} {base - step + 8}V{base}" stroke="var(--b)" stroke-width="2"/>')
    parts.append(_text(right, bottom + 34, x_label + "; the line is the median", "end", "soft"))
    return _svg(bottom + 42, parts, x_label)


def nice_ticks(largest: float) -> list[float]:
    """From 0 in equal round steps, four to eight of them, to at least `largest`."""
    step = _round_step(largest / 5 if largest > 0 else 1)
    return [step * i for i in range(math.ceil(largest / step - 1e-9) + 1)] if largest > 0 else [0, step]


def _round_numbers(low: float, high: float) -> list[float]:
    step = _round_step((high - low) / 8)
    return [round(step * i, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough - 1e-12)


def _horizontal(y: float, right: float, label: str) -> str:
    return f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>' + _text(_LEFT - 8, y + 4, label, "end", "soft")


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}>{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<div class="wide"><svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg></div>"
    )
