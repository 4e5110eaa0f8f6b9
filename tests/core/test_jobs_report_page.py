"""The report as a page, and what it draws: tokens by second, scores by adapter."""

import json
import random
import re
import statistics
from html.parser import HTMLParser

import pytest

from moelora.jobs import score_tally
from moelora.jobs import timeline as timeline_module
from moelora.jobs.charts import histogram_rows, nice_ticks
from moelora.jobs.parquet import ParquetSink
from moelora.jobs.report import build_report
from moelora.jobs.report_page import render_page
from moelora.jobs.run import JobStats
from moelora.jobs.score_tally import BIN_NATS, ScoreTally, TallySink, tally_output
from moelora.jobs.timeline import Timeline, joined, rates
from moelora.jobs.writer import Discard, encode_row


def output_rows(count: int) -> list[dict]:
    rows = []
    for i in range(count):
        tokens = random.randint(1, 30)
        bad = random.random() < 0.1
        rows.append(
            {
                "id": str(i),
                "adapter": random.choice(["__base__", "a<b>", "c"]),
                "num_tokens": tokens,
                "logprob_sum": None if bad else -random.random() * 9 * (tokens - 1),
                "error": "line 3: too long" if bad else None,
            }
        )
    return [*rows, {"id": "x", "adapter": None, "num_tokens": None, "logprob_sum": None, "error": "no JSON"}]


def expected(rows: list[dict], adapter: str) -> tuple[int, int, int, float]:
    mine = [r for r in rows if r["adapter"] == adapter]
    good = [r for r in mine if r["error"] is None]
    return (
        len(good),
        len(mine) - len(good),
        sum(r["num_tokens"] - 1 for r in good),
        sum(r["logprob_sum"] for r in good),
    )


def found(tally: ScoreTally, adapter: str) -> tuple[int, int, int, float]:
    scores = tally.adapters[adapter]
    return scores.rows, scores.errors, scores.tokens, pytest.approx(scores.logprob_sum, abs=1e-6)


def test_scores_are_counted_alike_from_lines_parquet_parts_and_on_the_way(tmp_path):
    rows = output_rows(400)
    lines = [encode_row(row) for row in rows]
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines))
    full = {"truncated_tokens": 0, "is_greedy": None, "next_token": None, "mode": None, "metadata": None}
    with ParquetSink(tmp_path / "out.parquet") as sink:
        for row in rows:
            sink.write(encode_row({**row, **full}))
    parts = tmp_path / "parts"
    parts.mkdir()
    for window in range(4):
        body = b"".join(lines[window::4])
        (parts / f"part-{window:08}.jsonl").write_bytes(b'{"window": 0, "counts": {}}\n' + body)
    on_the_way = ScoreTally()
    with TallySink(Discard(), on_the_way) as sink:
        for line in lines:
            sink.write(line)
    shards = [tally_output(parts, shard=(i, 2)) for i in range(2)]
    for adapter in ("__base__", "a<b>", "c"):
        wanted = expected(rows, adapter)
        for tally in (tally_output(tmp_path / "out.jsonl"), tally_output(tmp_path / "out.parquet"), on_the_way):
            assert wanted == found(tally, adapter)
        halves = [s.adapters[adapter] for s in shards]
        assert sum(h.rows for h in halves) == wanted[0]
        assert expected([r for i, r in enumerate(rows) if i % 2], adapter) == found(shards[1], adapter)


def test_bins_hold_each_row_at_its_mean():
    tally = ScoreTally()
    for mean in (-0.01, -0.07, -3.999, 0.0):
        tally.add({"adapter": "a", "num_tokens": 11, "logprob_sum": mean * 10, "error": None})
    assert tally.adapters["a"].bins == {-1: 1, -2: 1, -80: 1, 0: 1}
    assert tally.adapters["a"].median == pytest.approx(-0.04)


def tally_of(means: list[float]) -> ScoreTally:
    tally = ScoreTally()
    for mean in means:
        tally.add({"adapter": "a", "num_tokens": 2, "logprob_sum": mean, "error": None})
    return tally


def test_the_median_of_few_rows_is_exact_and_of_many_within_half_a_bin(monkeypatch):
    monkeypatch.setattr(score_tally, "_MOST_VALUES", 100)
    for means in ([-8.155, -3.897], *([random.uniform(-9, 0) for _ in range(n)] for n in (1, 2, 99, 100))):
        text = page({}, tally := tally_of(means), [])
        assert tally.adapters["a"].median == statistics.median(means)
        assert f">{statistics.median(means):.3f}</td></tr>" in text
    for count in (101, 102, 1000):
        tally = tally_of(means := [random.uniform(-9, 0) for _ in range(count)])
        median = tally.adapters["a"].median
        assert median == pytest.approx(statistics.median(means), abs=BIN_NATS / 2 + 1e-9)
        assert f">about {median:.2f}</td></tr>" in page({}, tally, [])
        assert not tally.adapters["a"].values
    assert tally_of([-8.0] * 51 + [-2.0] * 51).adapters["a"].median == pytest.approx(-5, abs=BIN_NATS / 2 + 1e-9)


def test_the_line_of_a_histogram_is_the_median_and_one_row_is_one():
    svg = histogram_rows({"a": {-10: 1, -1: 1}}, {"a": -0.25}, bin_width=BIN_NATS, x_label="x")
    assert re.search(r'd="M([\d.]+) [\d.]+V[\d.]+" stroke="var\(--b\)"', svg)[1] == f"{(160 + 880) / 2:.1f}"
    assert svg.count("a: 1 row from") == 2


def test_rates_keep_every_token():
    points = [(0.0, 0)]
    for _ in range(300):
        points.append((points[-1][0] + random.random() ** 3, points[-1][1] + random.randint(0, 5000)))
    for bins in (1, 7, 100):
        series = rates(points, bins=bins)
        width = points[-1][0] / bins
        assert len(series) == bins
        assert sum(rate * width for _, rate in series) == pytest.approx(points[-1][1], rel=1e-3)
    assert rates([(0.0, 0)]) == rates([]) == []


def test_a_long_timeline_stays_short_and_ends_with_all_tokens(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timeline_module.time, "monotonic", lambda: now[0])
    timeline = Timeline()
    for _ in range(20_000):
        now[0] += random.random()
        timeline.add(7)
    points = timeline.as_json(now[0])["points"]
    assert len(points) < 600
    assert points[-1] == [pytest.approx(now[0], abs=1e-3), 140_000]
    assert points == sorted(points)
    halfway = min(points, key=lambda p: abs(p[0] - now[0] / 2))
    assert halfway[1] == pytest.approx(70_000, rel=0.05)


def test_a_timeline_covers_scoring_alone(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timeline_module.time, "monotonic", lambda: now[0])
    timeline = Timeline()
    now[0] = 5.0  # loading
    timeline.begin()
    now[0] = 6.0
    timeline.add(7)
    now[0] = 9.0  # writing
    assert timeline.as_json(1.5)["points"] == [[0.0, 0], [1.0, 7], [1.5, 7]]


def test_timelines_of_workers_add_up():
    one = {"began": 100.0, "points": [[0.0, 0], [1.0, 10], [3.0, 30]]}
    two = {"began": 101.5, "points": [[0.0, 0], [1.0, 5]]}
    assert joined([one, two]) == {
        "began": 100.0,
        "points": [[0.0, 0], [1.0, 10], [1.5, 10], [2.5, 15], [3.0, 35]],
    }


@pytest.mark.parametrize("largest", [0, 0.003, 1, 7.3, 99, 12_345, 8e9])
def test_ticks_are_few_and_reach_the_largest(largest):
    ticks = nice_ticks(largest)
    assert ticks[0] == 0
    assert ticks[-1] >= largest
    assert 2 <= len(ticks) <= 8


def test_histograms_draw_every_row_once():
    bins = {i: random.randint(1, 9) for i in random.sample(range(-400, 0), 150)}
    svg = histogram_rows({"a": bins}, {"a": -1.0}, bin_width=BIN_NATS, x_label="x")
    assert sum(int(n.replace(",", "")) for n in re.findall(r"a: ([\d,]+) rows?", svg)) == sum(bins.values())


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(v) for k, v in attrs if k in ("src", "href")]


def page(engine: dict, tally: ScoreTally, points: list) -> str:
    stats = JobStats(rows=3, output_rows=6, tokens=60, first_errors=["line 2: <script>alert(1)</script>"])
    report = build_report(
        stats,
        seconds=2.0,
        load_seconds=1.0,
        engine=engine,
        run={"model": "m<i>", "adapters": {"a<b>": "/x"}},
        timeline={"began": 1.0, "points": points},
    )
    return render_page(json.loads(json.dumps(report)), tally).decode()


def test_the_page_stands_alone_and_shows_what_was_counted():
    tally = ScoreTally()
    for row in output_rows(200):
        tally.add(row)
    engine = {
        "model": "m<i>",
        "device": "cuda:0",
        "passes": [
            {"phase": "prefill", "mode": "full", "bucket": 512, "count": 31},
            {"phase": "prefill", "mode": "eager", "bucket": None, "count": 2},
        ],
        "eager_reasons": {"bucket_too_sparse": 2},
        "tokens": 900,
        "padding_share": 0.1,
    }
    text = page(engine, tally, [[0.0, 0], [1.0, 30], [2.0, 60]])
    seen = Elements()
    seen.feed(text)
    assert not {"script", "img", "iframe"} & set(seen.tags)
    assert seen.addresses == ["data:,"]  # an empty icon, or browsers ask for one
    assert "url(" not in text
    assert "http" not in text
    assert "<script>alert" not in text
    assert "m<i>" not in text
    shown = (
        "full, 512 tokens",
        ">31<",
        "waste more than half",
        "tokens run",
        ">100<",
        "10.0%",
        "a&lt;b&gt;",
        "__base__",
    )
    for said in shown:
        assert said in text, said
    assert seen.tags.count("svg") == 4


def test_the_rate_counts_what_this_run_scored():
    """A run that goes on counts the rows of finished parts as its own."""
    timeline = {"began": 1.0, "points": [[0.0, 0], [2.0, 30]]}
    stats = JobStats(tokens=600)
    options = {"seconds": 2.0, "load_seconds": 0.0, "engine": {}, "run": {}}
    assert build_report(stats, **options, timeline=timeline)["tokens_per_second"] == 15.0
    assert build_report(stats, **options)["tokens_per_second"] == 300.0


@pytest.mark.parametrize(("batches", "drawn"), [(1, False), (3, False), (4, True)])
def test_a_rate_over_time_is_not_drawn_of_a_few_batches(batches, drawn):
    engine = {"passes": [{"phase": "prefill", "mode": "eager", "bucket": None, "count": batches}]}
    text = page(engine, ScoreTally(), [[0.0, 0], [2.0, 60]])
    assert ("tokens per second over seconds" in text) is drawn
    assert (f"Too few batches ({batches}) to draw a rate over time." in text) is not drawn


def test_a_run_that_scored_nothing_has_a_page_too():
    text = page({}, ScoreTally(), [])
    assert "Nothing was scored" in text
    assert "No batch ran" in text
    assert "No row was scored" in text


def test_options_are_shown_as_people_write_them():
    run = {"adapters": {"a": "/x", "b": "/y"}, "with_base": True, "batch_invariant": False, "top_k": 0, "slots": None}
    report = build_report(JobStats(), seconds=0.0, load_seconds=0.0, engine={}, run={**run, "buckets": [16, 64]})
    text = render_page(report, ScoreTally()).decode()
    for name, value in (("adapters", "a, b"), ("with-base", "yes"), ("batch-invariant", "no"), ("top-k", "0")):
        assert f"<tr><td>{name}</td><td>{value}</td></tr>" in text
    assert "<tr><td>slots</td><td>–</td></tr><tr><td>buckets</td><td>16, 64</td></tr>" in text
