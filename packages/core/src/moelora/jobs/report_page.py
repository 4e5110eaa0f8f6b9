"""The report of a run as a page for people: one HTML file that needs nothing else, neither a network nor a script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from moelora.capacity import EagerReason
from moelora.jobs.charts import Bar, area_chart, bar_chart, histogram_rows
from moelora.jobs.score_tally import BIN_NATS, AdapterScores, ScoreTally
from moelora.jobs.timeline import rates
from moelora.types import RunMode
from moelora.wording import measured, repeated

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #64717f; --line: #d9dfe5; --card: #f5f7f9; --page: #fff;
  --a: #2f7fc1; --b: #e08a4a; --c: #58a86f; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --soft: #98a5b2; --line: #35414d; --card: #202a34;
  --page: #151c23; --a: #69aee6; --b: #eba36e; --c: #7cc592; --bad: #f2867f; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.soft, .soft a { color: var(--soft); } .bad { color: var(--bad); }
.cards { display: grid; gap: .7rem; grid-template-columns: repeat(4, 1fr); margin: 1.2rem 0; }
@media (max-width: 40rem) { .cards { grid-template-columns: repeat(2, 1fr); } }
.cards div { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.cards b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .9rem .25rem 0; text-align: left; }
td.n, th.n { text-align: right; } td { overflow-wrap: break-word; } details td { overflow-wrap: anywhere; }
svg { display: block; height: auto; max-width: 100%; min-width: 34rem; } svg text { fill: var(--ink); font-size: 12px; }
svg .soft { fill: var(--soft); } svg .grid { stroke: var(--line); }
summary { cursor: pointer; }
"""
_FEW_BATCHES = 4
"""Below it a line over time would show when batches ended, and no rate."""
_MODE_COLOURS = {RunMode.FULL: "--a", RunMode.BREAKABLE: "--c", RunMode.EAGER: "--b"}


def render_page(report: Mapping[str, Any], tally: ScoreTally) -> bytes:
    """The page in UTF-8. report: of `report.build_report`, with a timeline; tally: of the output's rows."""
    engine = report["engine"]
    model = _workers(engine)[0].get("model") or report["run"].get("model") or "prefill"
    parts = [
        f"<h1>{escape(str(model))}</h1>",
        f'<p class="soft">{escape(_setting(engine))}</p>',
        _cards(report),
        _notices(report),
        "<h2>Throughput over time</h2>",
        _throughput(report),
        "<h2>Batches by mode</h2>",
        _batches(engine),
        "<h2>Padding</h2>",
        _padding(engine),
        "<h2>Scores by adapter</h2>",
        _scores(tally),
        _details("Options", report["run"]),
        _details("Versions", report["versions"]),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'  # or browsers ask the host for one
        f"<title>moelora: {escape(str(model))}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body></html>\n"
    ).encode("utf-8", "backslashreplace")


def _workers(engine: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The engines of a run: one per worker, or the only one."""
    return engine.get("workers") or [engine]


def _setting(engine: Mapping[str, Any]) -> str:
    workers = _workers(engine)
    facts = ("architecture", "dtype", "backend")
    said = [str(workers[0][name]) for name in facts if name in workers[0]]
    on = repeated(str(w["device"]) for w in workers if "device" in w)
    return ", ".join(said + ([f"on {on}"] if on else []))


def _cards(report: Mapping[str, Any]) -> str:
    cards = [
        ("input rows", f"{report['rows']:,}"),
        ("output lines", f"{report['output_rows']:,}"),
        ("lines with errors", f"{report['error_rows']:,}"),
        ("tokens", f"{report['tokens']:,}"),
        ("scoring", measured(report["seconds"])),
        ("loading", measured(report["load_seconds"])),
        ("tokens per second", f"{report['tokens_per_second']:,.0f}"),
    ]
    if report["engine"].get("peak_device_bytes"):
        cards.append(("device memory, peak", f"{report['engine']['peak_device_bytes'] / 2**30:.2f} GiB"))
    tiles = '<div class="cards">' + "".join(f"<div><b>{value}</b>{name}</div>" for name, value in cards) + "</div>"
    earlier = report["earlier_tokens"]
    if not earlier:
        return tiles
    return (
        f'{tiles}<p class="soft">This run went on from an earlier one. Seconds, tokens per second, throughput, batches '
        f"and padding are of this one alone, which scored {report['tokens'] - earlier:,} of the tokens.</p>"
    )


def _notices(report: Mapping[str, Any]) -> str:
    lines = [*report["warnings"], *(f"row error: {error}" for error in report["first_errors"])]
    return "".join(f'<p class="bad">{escape(str(line))}</p>' for line in lines)


def _throughput(report: Mapping[str, Any]) -> str:
    batches = sum(entry["count"] for entry in report["engine"].get("passes", []))
    # Tokens come batch by batch: with fewer than a few batches in each, bins would show their rhythm and not a rate.
    series = rates(report["timeline"]["points"], bins=max(4, min(120, batches // 4)))
    if not series:
        return '<p class="soft">Nothing was scored in this run.</p>'
    if batches < _FEW_BATCHES:
        return f'<p class="soft">Too few batches ({batches}) to draw a rate over time.</p>'
    return area_chart(series, mean=report["tokens_per_second"], x_label="seconds", y_label="tokens per second")


def _batches(engine: Mapping[str, Any]) -> str:
    bars = [
        Bar(
            label="eager" if entry["bucket"] is None else f"{entry['mode']}, {entry['bucket']:,} tokens",
            value=entry["count"],
            colour=_MODE_COLOURS.get(entry["mode"], "--a"),
        )
        for entry in sorted(engine.get("passes", []), key=lambda e: (e["mode"], e["bucket"] or 0))
    ]
    if not bars:
        return '<p class="soft">No batch ran.</p>'
    known = {str(reason): reason.text for reason in EagerReason}
    reasons = engine.get("eager_reasons", {}).items()
    rows = [(f"{count:,}", known.get(reason, reason)) for reason, count in reasons]
    return bar_chart(bars) + (_table(["batches", "ran eagerly because"], rows, numbers=1) if rows else "")


def _padding(engine: Mapping[str, Any]) -> str:
    workers = _workers(engine)
    live = sum(w.get("tokens", 0) for w in workers)
    shares = [(w.get("tokens", 0), w.get("padding_share", 0.0)) for w in workers]
    padding = sum(tokens * share / (1 - share) for tokens, share in shares if share < 1)
    if not live:
        return '<p class="soft">No tokens went through the model.</p>'
    share = padding / (live + padding)
    bars = [Bar(label="tokens run", value=live, colour="--a")]
    bars += [Bar(label="padding up to buckets", value=round(padding), colour="--b")]
    note = "Batches that run eagerly are not padded." if not padding else f"{share:.1%} of what went through the model."
    return bar_chart(bars) + f'<p class="soft">{note}</p>'


def _scores(tally: ScoreTally) -> str:
    if not tally.adapters:
        return '<p class="soft">No row was scored.</p>'
    table = _table(
        ["adapter", "rows", "errors", "mean, nats per token", "median of rows"],
        [
            (name, f"{s.rows:,}", f"{s.errors:,}", _nats(s.mean), _median(s))
            for name, s in sorted(tally.adapters.items(), key=lambda item: -(item[1].mean or float("-inf")))
        ],
        numbers=4,
        first_is_text=True,
    )
    drawn = {name: scores.bins for name, scores in tally.adapters.items() if scores.bins}
    if not drawn:
        return table
    medians = {name: scores.median for name, scores in tally.adapters.items() if scores.median is not None}
    chart = histogram_rows(drawn, medians, bin_width=BIN_NATS, x_label="mean log-probability per token of a row (nats)")
    return chart + table


def _nats(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _median(scores: AdapterScores) -> str:
    """With as many decimals as are known."""
    if scores.median is None or scores.is_exact:
        return _nats(scores.median)
    return f"about {scores.median:.2f}"


def _details(title: str, values: Mapping[str, Any]) -> str:
    rows = [(name.replace("_", "-"), _said(value)) for name, value in values.items()]
    return f"<details><summary>{title}</summary>{_table(['', ''], rows)}</details>"


def _said(value: Any) -> str:
    """A value of an option for people; of what has names, the names."""
    if value is None or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple | Mapping) else str(value)


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0, first_is_text: bool = False
) -> str:
    """A table whose first columns are numbers, `numbers` of them; after the first column if that is a text."""
    right = range(int(first_is_text), int(first_is_text) + numbers)

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in right else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells)
        )

    head = f"<tr>{line(heads, 'th')}</tr>" if any(heads) else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}{body}</table></div>'
