"""The report of a job, its summary for people, and its metrics."""

import json

import pytest

from core.job_runs import ids, run
from fake_engine import FakeEngine
from moelora.jobs.metrics import encode_metrics
from moelora.jobs.report import build_report, encode_report, summary
from moelora.jobs.stats import JobStats


def test_the_summary_tells_where_another_kernel_of_attention_runs():
    _, stats = run([ids(1, 2)])
    chosen = [
        {"attention": "a", "fa4_from_request_tokens": 1024, "fa4_from_bucket": None},
        {"attention": "b", "fa4_from_request_tokens": 512, "fa4_from_bucket": 2048},
        {"attention": "c", "fa4_from_request_tokens": None, "fa4_from_bucket": None},
    ]
    report = build_report(stats, seconds=2.0, load_seconds=1.0, engine={"attention": chosen}, run={})
    assert [text for label, text in summary(report) if label == "attention"] == [
        "FlashAttention 4 in requests of 1,024 tokens and more (a)",
        "FlashAttention 4 in requests of 512 tokens and more and graphs of 2,048 tokens and more (b)",
    ]


def test_report_summary_and_metrics_agree():
    _, stats = run([ids(1, 2), ids(1, 2, 3, 4, 5), {"prompt": 1}], max_length=4, on_long="truncate-left")
    engine = FakeEngine().report()
    report = build_report(stats, seconds=2.0, load_seconds=1.0, engine=engine, run={"model": "m"})
    loaded = json.loads(encode_report(report))
    assert loaded["tokens"] == 6
    assert loaded["tokens_per_second"] == 3.0
    assert (loaded["rows"], loaded["output_rows"], loaded["error_rows"]) == (3, 3, 1)
    assert loaded["engine"] == engine
    assert loaded["versions"]["torch"]
    said = dict(summary(report))
    assert said["rows"] == "3 in, 3 lines out, 1 of them an error"
    assert said["batches"] == "2 full at 64, 3 eager: graphs are switched off (--graph off)"
    assert "1 token of 1 row" in said["cut"]
    text = encode_metrics(report).decode()
    for line in (
        "moelora_tokens_total 6.0",
        "moelora_input_rows_total 3.0",
        "moelora_error_rows_total 1.0",
        'moelora_cuda_graph_passes_total{bucket="64",mode="full",phase="prefill"} 2.0',
        'moelora_eager_passes_total{phase="prefill",reason="graph_off"} 3.0',
    ):
        assert f"{line}\n" in text
    assert "_created" not in text
    assert "python_info" not in text


def test_a_report_survives_what_json_cannot_hold():
    report = build_report(JobStats(), seconds=0.0, load_seconds=0.0, engine={"share": float("nan")}, run={"p": {1}})
    assert json.loads(encode_report(report))["engine"]["share"] is None


def test_seconds_of_a_short_run_and_its_rate_agree():
    report = build_report(JobStats(tokens=60), seconds=0.0437, load_seconds=2.34, engine={}, run={})
    assert dict(summary(report))["time"] == "0.044 s scoring (1,373 tokens/s), 2.3 s loading"


@pytest.mark.parametrize(("scored", "said"), [(90, "90 of them (45 tokens/s)"), (200, "2.0 s scoring (100 tokens/s)")])
def test_the_summary_says_which_tokens_its_rate_counts(scored, said):
    """A run that goes on counts the tokens of earlier ones, and scores the others alone."""
    timeline = {"began": None, "points": [[1.0, 10], [2.0, scored]]}
    report = build_report(JobStats(tokens=200), seconds=2.0, load_seconds=1.0, engine={}, run={}, timeline=timeline)
    assert said in dict(summary(report))["time"]
