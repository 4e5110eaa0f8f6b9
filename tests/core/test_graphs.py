"""Graph runners without a GPU: a recorder that runs the work again, and one that replays what capture saw.

The fake recorder does what a CUDA graph does: the same work, on the same buffers, whatever they hold by then. The stale
one plays back what was true at capture; every test that passes with it would be worth nothing.
"""

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import moelora.engine
import moelora.graphs.captured as captured
import moelora.graphs.select
import moelora.models.base_model
import moelora.options
from arch_world import adapt_everything, make, runnable
from fake_recorder import CapturableTorchBackend, FakeRecorder, FakeRecording
from moelora import BASE_ADAPTER, EngineOptions, GraphMode, PrefillEngine, Request, RunMode
from moelora.capacity import EagerReason
from moelora.errors import ConfigError
from moelora.graphs.select import select_runner
from moelora.jobs.plan import PlanningEngine
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue
from tiny_models import VOCAB, peft_adapter, save_model

BUCKETS = (4, 16, 48, 64)
NAMES = ["attention", "experts", "both"]


class StaleRecorder(FakeRecorder):
    """What a runner with a stale pointer would do: the result of capture, whatever the buffers hold now."""

    def record(self, work):
        work()
        return FakeRecording(lambda: None)

    def record_parts(self, work):
        work(lambda eager: eager())
        return FakeRecording(lambda: None)


class UncapturableRecorder(FakeRecorder):
    """Fails like a model that synchronises: whole graphs always, parts if `parts` says so."""

    parts = True

    def record(self, work):
        raise RuntimeError("operation not permitted when stream is capturing")

    def record_parts(self, work):
        if type(self).parts:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record_parts(work)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    model = save_model(folder / "model", "qwen3_moe", seed=1)
    experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    peft_adapter(folder / "attention", model, 2, rank=8, target_modules=["q_proj", "v_proj", "embed_tokens"])
    peft_adapter(folder / "experts", model, 3, rank=2, target_modules=[], **experts)
    peft_adapter(folder / "both", model, 4, rank=3, target_modules=["o_proj", "lm_head"], **experts)
    peft_adapter(folder / "saved", model, 5, target_modules=["q_proj"], modules_to_save=["lm_head"])
    return folder


def make_engine(
    world,
    monkeypatch,
    mode,
    recorder=FakeRecorder,
    names=NAMES,
    backend=CapturableTorchBackend,
    on_event=None,
    **options,
):
    monkeypatch.setattr(moelora.options, "get_backend", lambda name: backend())
    monkeypatch.setattr(moelora.engine, "select_runner", lambda wanted: select_runner(wanted, recorder))
    options = {"max_tokens": 64, "buckets": BUCKETS, **options}
    return PrefillEngine(
        world / "model",
        adapters={n: world / n for n in names},
        options=EngineOptions(device="cpu", graph=mode, **options),
        on_event=on_event,
    )


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.BREAKABLE])
@pytest.mark.parametrize("names", [NAMES, ["saved"], []])
def test_a_plan_foresees_graphs_and_fallbacks(world, monkeypatch, mode, names):
    rows = [row(1 + 13 * i % 70, [*names, BASE_ADAPTER][i % (len(names) + 1)], i) for i in range(40)]
    rows += [row(1, start=i) for i in range(60)]
    engine = make_engine(world, monkeypatch, mode, names=names)
    original = moelora.graphs.select.graphs_blocked
    monkeypatch.setattr(
        moelora.graphs.select, "graphs_blocked", lambda **facts: original(**{**facts, "has_graph_device": True})
    )
    planned = PlanningEngine(world / "model", adapters={n: world / n for n in names}, options=engine.options)
    for some in (rows[:7], rows, rows[3:4]):
        engine.score(some)
        list(planned.score_stream(some))
    told, foreseen = engine.report(), planned.report()
    shared = (set(told) & set(foreseen)) - {"memory"}
    assert {key: foreseen[key] for key in shared} == {key: told[key] for key in shared}
    assert foreseen["graph_mode"] == told["graphs"]["mode"]
    assert foreseen["eager_reasons"]


@pytest.fixture(scope="module")
def eager(world):
    return PrefillEngine(
        world / "model",
        adapters={n: world / n for n in NAMES},
        options=EngineOptions(device="cpu", graph=GraphMode.OFF),
    )


@pytest.fixture(scope="module", params=[GraphMode.FULL, GraphMode.BREAKABLE])
def graphed(request, world):
    with pytest.MonkeyPatch.context() as monkeypatch:
        return make_engine(world, monkeypatch, request.param)


def close(results, expected):
    for got, want in zip(results, expected, strict=True):
        assert got.error is None
        for a, b in zip(got.token_logprobs[1:], want.token_logprobs[1:], strict=True):
            assert abs(a - b) < 1e-5
        assert abs(got.next_token.logprob - want.next_token.logprob) < 1e-5


def row(length, adapter=BASE_ADAPTER, start=0):
    return Request(token_ids=[(start + 7 * i) % VOCAB for i in range(length)], adapter=adapter)


requests = st.builds(row, st.integers(1, 30), st.sampled_from([*NAMES, BASE_ADAPTER]), st.integers(0, 100))


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(requests, min_size=1, max_size=8), min_size=1, max_size=4))
def test_replays_of_any_batches_in_any_order_equal_eager_runs(graphed, eager, batches):
    for batch in batches:
        close(graphed.score(batch), eager.score(batch))


def test_large_small_all_base_one_token_others_large_again(graphed, eager):
    large = [row(20, "both"), row(14, "experts", 3), row(9), row(5, "attention", 8)]
    before = graphed.report()["passes"]
    for batch in (large, [row(3, "both")], [row(7), row(6)], [row(1, "experts")], [row(12, "attention")], large):
        results = graphed.score(batch)
        assert {r.mode for r in results} <= {RunMode.FULL, RunMode.BREAKABLE}
        close(results, eager.score(batch))
    assert graphed.report()["passes"] != before


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.BREAKABLE])
def test_these_tests_notice_a_stale_graph(world, eager, monkeypatch, mode):
    stale = make_engine(world, monkeypatch, mode, StaleRecorder)
    with pytest.raises(AssertionError):
        close(stale.score([row(30, "both")]), eager.score([row(30, "both")]))


@pytest.mark.parametrize(("tokens", "bucket"), [(49, 64), (63, 64), (64, 64), (1, 4), (4, 4), (24, 48)])
def test_bucket_edges(world, eager, monkeypatch, tokens, bucket):
    engine = make_engine(world, monkeypatch, GraphMode.FULL)
    close(engine.score([row(tokens, "both")]), eager.score([row(tokens, "both")]))
    assert engine.report()["passes"] == [{"phase": "prefill", "mode": "full", "bucket": bucket, "count": 1}]


@pytest.mark.parametrize(
    ("mode", "options", "batch", "reason"),
    [
        (GraphMode.OFF, {}, [5], EagerReason.GRAPH_OFF),
        (GraphMode.FULL, {}, [65], EagerReason.TOKENS_OVER_LARGEST_BUCKET),
        (GraphMode.FULL, {"buckets": (4, 64)}, [7], EagerReason.BUCKET_TOO_SPARSE),
        (GraphMode.FULL, {"max_tokens": 64}, [2, 2, 2, 1, 1], EagerReason.REQUESTS_OVER_SLOTS),
        (GraphMode.BREAKABLE, {"max_tokens": 64}, [2, 2, 2, 1, 1], None),
        (GraphMode.FULL, {"names": ["saved"]}, [5], EagerReason.ADAPTER_NOT_CAPTURABLE),
        (GraphMode.FULL, {"recorder": UncapturableRecorder}, [5], EagerReason.ARCHITECTURE_NOT_CAPTURABLE),
    ],
)
def test_every_eager_reason_can_be_provoked_and_is_counted(world, monkeypatch, mode, options, batch, reason):
    engine = make_engine(world, monkeypatch, mode, **options)
    results = engine.score([row(n) for n in batch])
    expected = {} if reason is None else {str(reason): 1}
    assert engine.report()["eager_reasons"] == expected
    assert {r.mode for r in results} == ({RunMode.BREAKABLE} if reason is None else {RunMode.EAGER})


def test_reasons_of_the_machine_the_backend_and_the_architecture(world, monkeypatch, tmp_path):
    assert EngineOptions(device="cpu").graph is GraphMode.AUTO
    plain = PrefillEngine(world / "model", options=EngineOptions(device="cpu"))
    plain.score([row(3)])
    assert plain.report()["eager_reasons"] == {"no_graph_device": 1}
    monkeypatch.setattr(moelora.engine, "select_runner", lambda wanted: select_runner(wanted, FakeRecorder))
    torch_only = PrefillEngine(world / "model", options=EngineOptions(device="cpu"))
    torch_only.score([row(3)])
    assert torch_only.report()["eager_reasons"] == {"backend_not_capturable": 1}
    save_model(tmp_path, "llama")
    mixing = replace(open_base(tmp_path).architecture, packs=False)
    monkeypatch.setattr(moelora.models.base_model, "find_verdict", lambda *given: mixing)
    alone = PrefillEngine(tmp_path, options=EngineOptions(device="cpu"))
    alone.score([row(3), row(4)])
    assert alone.report()["eager_reasons"] == {"packing_not_supported": 2}


def test_full_steps_down_to_breakable_and_says_where(world, eager, monkeypatch):
    monkeypatch.setattr(UncapturableRecorder, "parts", False)
    engine = make_engine(world, monkeypatch, GraphMode.FULL, UncapturableRecorder)
    report = engine.report()["graphs"]
    assert report["mode"] == "breakable"
    assert "full graphs cannot be captured" in report["notes"][0]
    assert "test_graphs.py" in report["notes"][0]
    close(engine.score([row(30, "both")]), eager.score([row(30, "both")]))


def test_auto_measures_every_bucket_once(world, eager, monkeypatch):
    engine = make_engine(world, monkeypatch, GraphMode.AUTO)
    timings = engine.report()["graphs"]["timings"]
    assert [t["bucket"] for t in timings] == list(BUCKETS)
    assert all(t["eager_s"] > 0 and t["graph_s"] > 0 for t in timings)
    results = engine.score([row(n, "both") for n in (3, 20, 40)])
    close(results, eager.score([row(n, "both") for n in (3, 20, 40)]))
    slower = {t["bucket"] for t in timings if t["eager_s"] < 0.97 * t["graph_s"]}
    assert all((p["mode"] == "eager") or p["bucket"] not in slower for p in engine.report()["passes"])


def test_long_requests_leave_graphs_that_are_no_faster(world, monkeypatch):
    """Where a backend has a faster attention for known lengths, and eager and replay take the same time."""
    monkeypatch.setattr(captured, "_seconds", lambda works, device: [1.0] * len(works))
    monkeypatch.setattr(CapturableTorchBackend, "long_request_tokens", 20)
    engine = make_engine(world, monkeypatch, GraphMode.AUTO)
    assert engine.eager_buckets == [[bucket, 20] for bucket in BUCKETS]
    short, long = engine.score([row(19, "both"), row(19)])[0], engine.score([row(20), row(20, "both")])[1]
    assert short.mode is RunMode.FULL
    assert long.mode is RunMode.EAGER
    assert engine.report()["eager_reasons"]["eager_faster"] == 1


def test_the_choice_of_auto_can_be_taken_over(world, eager, monkeypatch):
    engine = make_engine(world, monkeypatch, GraphMode.AUTO)
    for chosen, mode in (([[48, 30]], RunMode.EAGER), ([[48, 31]], RunMode.FULL), ([], RunMode.FULL)):
        engine.eager_buckets = chosen
        assert engine.eager_buckets == chosen
        (result,) = engine.score([row(30, "both")])
        assert result.mode is mode
    assert engine.report()["eager_reasons"]["eager_faster"] == 1


@pytest.mark.parametrize("chosen", [[64], [[64]], [[64, 1, 2]], [[64, "1"]], ["64"], [None]])
@pytest.mark.parametrize("mode", [GraphMode.AUTO, GraphMode.OFF])
def test_a_choice_of_another_form_is_refused(world, monkeypatch, mode, chosen):
    engine = make_engine(world, monkeypatch, mode)
    before = engine.eager_buckets
    with pytest.raises(ConfigError, match=re.escape(f"{chosen}") + ".*--overwrite"):
        engine.eager_buckets = chosen
    assert engine.eager_buckets == before


class ChoosingBackend(CapturableTorchBackend):
    """Has two kernels of attention, as the Triton backends do; here they are one."""

    def __init__(self):
        super().__init__()
        self._choice = {"4/2 heads of 16": {"requests": None, "buckets": 16}}

    @property
    def attention_choice(self):
        return self._choice

    @attention_choice.setter
    def attention_choice(self, choices):
        self._choice = choices


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.BREAKABLE])
def test_graphs_that_hold_another_kernel_of_attention_are_captured_anew(world, eager, monkeypatch, mode):
    said = []
    engine = make_engine(world, monkeypatch, mode, backend=ChoosingBackend, on_event=said.append)
    before = len(said)
    engine.attention_choice = dict(engine.attention_choice)
    engine.attention_choice = {"4/2 heads of 16": {"requests": 64, "buckets": 16}}
    assert len(said) == before, "no graph holds what exact lengths choose"
    engine.attention_choice = {"4/2 heads of 16": {"requests": 64, "buckets": None}}
    if mode is GraphMode.FULL:
        assert "capturing graphs anew" in said[before]
        assert len(said) == before + 1 + len(BUCKETS)
    else:
        assert len(said) == before, "attention runs between the parts of these graphs"
    assert engine.attention_choice == {"4/2 heads of 16": {"requests": 64, "buckets": None}}
    close(engine.score([row(30, "both")]), eager.score([row(30, "both")]))


def test_adapters_loaded_replaced_and_dropped_after_capture(world, monkeypatch, eager):
    engine = make_engine(world, monkeypatch, GraphMode.FULL, slots=1)
    for name in ("both", "experts", "both", "attention"):
        close(engine.score([row(11, name)]), eager.score([row(11, name)]))
    assert engine.report()["adapter_loads"] == 4


def test_a_graph_of_base_rows_alone_has_no_lora(world, monkeypatch):
    engine = make_engine(world, monkeypatch, GraphMode.FULL)
    calls = []
    original = CapturableTorchBackend.linear
    monkeypatch.setattr(CapturableTorchBackend, "linear", lambda *a: calls.append(1) or original(*a))
    engine.score([row(9)])
    assert not calls
    engine.score([row(9, "attention")])
    assert calls


def test_token_mixers_between_the_parts_of_a_graph(tmp_path, monkeypatch):
    """An architecture whose linear attention knows nothing of requests, captured with breaks around it."""
    model = save_model(tmp_path / "model", "qwen3_next", seed=3)
    peft_adapter(tmp_path / "both", model, 4, target_modules=["in_proj_qkvz", "out_proj", "q_proj"])
    eager = PrefillEngine(
        tmp_path / "model", adapters={"both": tmp_path / "both"}, options=EngineOptions(device="cpu", graph="off")
    )
    graphed = make_engine(tmp_path, monkeypatch, GraphMode.AUTO, names=["both"])
    assert graphed.report()["graphs"]["mode"] == "breakable"
    assert "called once per request" in graphed.report()["graphs"]["notes"][0]
    graphed.eager_buckets = []
    for batch in (
        [row(20, "both"), row(14), row(9, "both")],
        [row(3)],
        [row(2, "both"), row(30, start=5)],
        [row(5)] * 7,
    ):
        results = graphed.score(batch)
        assert {r.mode for r in results} == {RunMode.BREAKABLE}
        close(results, eager.score(batch))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "glm5_next",  # an attention that hands top-k indices to later layers, or None
        "inkling+nofloor",  # one convolution function, called at several widths
    ],
)
def test_token_mixers_whose_results_differ_between_layers(tmp_path, monkeypatch, name):
    model_class, config = runnable(name)
    make(model_class, config, seed=3).save_pretrained(tmp_path / "model")
    adapt_everything(build_catalogue(open_base(tmp_path / "model").skeleton()), tmp_path / "tuned", seed=5)
    adapters = {"tuned": tmp_path / "tuned"}
    eager = PrefillEngine(tmp_path / "model", adapters=adapters, options=EngineOptions(device="cpu", graph="off"))
    graphed = make_engine(tmp_path, monkeypatch, GraphMode.BREAKABLE, names=["tuned"])
    for batch in ([row(20, "tuned"), row(14), row(9, "tuned")], [row(30, start=5)], [row(5), row(8, "tuned")]):
        results = graphed.score(batch)
        assert {r.mode for r in results} == {RunMode.BREAKABLE}
        close(results, eager.score(batch))
