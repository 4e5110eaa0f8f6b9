"""`moelora.bench`: workloads, dummy adapters, the peer, and a whole benchmark."""

import gc
import json
import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moelora.adapters.base import Adapter, Factors
from moelora.adapters.loader import load_adapter
from moelora.bench.dummy_adapters import PROJECTIONS, dummy_adapters
from moelora.bench.peer import TransformersPeer
from moelora.bench.report import Measurement
from moelora.bench.run import BenchOptions, cut_to_layers, run_bench
from moelora.bench.workloads import WORKLOADS, Task, Workload, find_workload
from moelora.engine import EngineOptions, PrefillEngine
from moelora.errors import AdapterError, ConfigError
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue
from moelora.types import BASE_ADAPTER, GraphMode, Request

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "tiny-moe"
SHAPES = ROOT / "benchmarks" / "shapes"
CPU = torch.device("cpu")


class TestWorkloads:
    def test_the_same_prompts_every_time(self):
        one = WORKLOADS["W1"].requests(Task.SCORING, vocab_size=50, adapters=["a"])
        again = WORKLOADS["W1"].requests(Task.SCORING, vocab_size=50, adapters=["a"])
        assert one == again
        assert len(one) == 256
        assert all(256 <= len(r.token_ids) <= 768 and max(r.token_ids) < 50 for r in one)

    def test_adapters_take_turns_with_the_base_first(self):
        requests = WORKLOADS["W2"].requests(Task.SCORING, vocab_size=9, adapters=["a", "b"])
        assert [r.adapter for r in requests[:4]] == [BASE_ADAPTER, "a", "b", BASE_ADAPTER]
        (single,) = WORKLOADS["W4"].requests(Task.SCORING, vocab_size=9, adapters=["a", "b"])
        assert single.adapter == "a"

    def test_unknown_names_are_refused_with_the_known_ones(self):
        with pytest.raises(ConfigError, match="W1, W2, W3, W4"):
            find_workload("W9")


@pytest.fixture(scope="module")
def catalogue():
    return build_catalogue(open_base(TINY).skeleton())


class TestInMemoryAdapters:
    def test_score_as_those_from_disk(self, catalogue):
        """What a path gives and what an `Adapter` gives are the same numbers."""
        path = TINY / "adapters" / "python"
        loaded = load_adapter(path, name="x", catalogue=catalogue, dtype=torch.float32)
        request = Request(token_ids=list(range(40, 70)), adapter="python")
        options = EngineOptions(device="cpu")
        from_disk = PrefillEngine(TINY, adapters={"python": path}, options=options).score([request])[0]
        in_memory = PrefillEngine(TINY, adapters={"python": loaded}, options=options).score([request])[0]
        base = PrefillEngine(TINY, options=options).score([Request(token_ids=request.token_ids)])[0]
        assert in_memory.token_logprobs == from_disk.token_logprobs
        assert in_memory.logprob_sum != base.logprob_sum

    def test_misfits_are_refused(self, catalogue):
        def engine(target: str, a: torch.Tensor, b: torch.Tensor) -> None:
            adapter = Adapter(name="n", path=Path("n"), factors={target: Factors(a=a, b=b)})
            PrefillEngine(TINY, adapters={"n": adapter}, options=EngineOptions(device="cpu"))

        q_proj = "model.layers.0.self_attn.q_proj"
        with pytest.raises(AdapterError, match=r"unknown target.*q_projj.*Did you mean"):
            engine("model.layers.0.self_attn.q_projj", torch.zeros(2, 128), torch.zeros(128, 2))
        with pytest.raises(AdapterError, match="do not fit"):
            engine(q_proj, torch.zeros(2, 64), torch.zeros(128, 2))
        with pytest.raises(AdapterError, match="do not fit"):
            engine(q_proj, torch.zeros(2, 128), torch.zeros(128, 3))
        with pytest.raises(AdapterError, match="do not fit"):
            engine("model.norm", torch.zeros(2, 128), torch.zeros(128, 2))

    def test_dummies_cover_attention_and_experts_and_differ(self, catalogue):
        made = dummy_adapters(catalogue, count=3, rank=4, device=CPU, dtype=torch.float32)
        wanted = {t.name for t in catalogue if t.name.rpartition(".")[2] in (*PROJECTIONS, "gate_up_proj", "down_proj")}
        for adapter in made.values():
            assert set(adapter.factors) == wanted
            assert {f.rank for f in adapter.factors.values()} == {4}
        one, other, _ = (a.factors["model.layers.1.mlp.experts.down_proj"] for a in made.values())
        assert not torch.equal(one.a, other.a)
        assert one.a.std() == pytest.approx(0.02, rel=0.1)


class TestPeer:
    @pytest.mark.parametrize("rank", [0, 4])
    def test_it_does_the_same_work(self, catalogue, rank):
        """Base prompts, ragged and padded by the peer, get the scores of the engine, adapter held or not."""
        requests = Workload(name="x", prompts=7, shortest=2, longest=30).requests(
            Task.SCORING, vocab_size=3000, adapters=[]
        )
        peer = TransformersPeer(
            open_base(TINY), catalogue, device=CPU, dtype=torch.float32, rank=rank, max_tokens=64, seed=0
        )
        scores = peer.score(requests, Task.SCORING)
        best = peer.score(requests, Task.PREFILL)
        results = PrefillEngine(TINY, options=EngineOptions(device="cpu")).score(requests)
        for one, first, result in zip(scores, best, results, strict=True):
            assert one.tolist() == pytest.approx(result.token_logprobs[1:], abs=1e-4)
            assert first.item() == pytest.approx(result.next_token.logprob, abs=1e-4)

    def test_its_padding_is_counted(self, catalogue):
        peer = TransformersPeer(
            open_base(TINY), catalogue, device=CPU, dtype=torch.float32, rank=0, max_tokens=64, seed=0
        )
        lengths = [("a", 20), ("__base__", 10), ("a", 30), ("a", 31), ("a", 7), ("__base__", 64)]
        requests = [Request(token_ids=[5] * n, adapter=adapter) for adapter, n in lengths]
        # Under the base 10 | 64; under a 7 20 | 30 31.
        rows = [(1, 10), (1, 64), (2, 20), (2, 31)]
        ran = []
        body = getattr(peer._model, peer._model.base_model_prefix)
        body.register_forward_pre_hook(lambda _, given, named: ran.append(named["input_ids"].shape), with_kwargs=True)
        peer.score(requests, Task.PREFILL)
        assert [tuple(shape) for shape in ran] == rows
        total = sum(count * length for count, length in rows)
        assert peer.padding_share(requests) == pytest.approx(1 - sum(n for _, n in lengths) / total)

    def test_adapters_change_its_scores(self, catalogue):
        peer = TransformersPeer(
            open_base(TINY), catalogue, device=CPU, dtype=torch.float32, rank=4, max_tokens=64, seed=0
        )
        tokens = list(range(30))
        base, adapted = peer.score([Request(token_ids=tokens), Request(token_ids=tokens, adapter="a")], Task.SCORING)
        assert not torch.allclose(base, adapted)
        names = [n for n, _ in peer._model.named_parameters() if "lora_A" in n]
        assert any("experts" in n for n in names)
        assert any("q_proj" in n for n in names)


@pytest.fixture(scope="module")
def report():
    bench = BenchOptions(
        workloads=(WORKLOADS["W1"].scaled(prompts=0.04, tokens=0.04), WORKLOADS["W4"].scaled(tokens=0.1)),
        adapters=(0, 2),
        ranks=(4, 8),
        graphs=(GraphMode.OFF,),
        repeat=2,
        layers=2,
        peer=True,
    )
    options = EngineOptions(device="cpu", max_tokens=128, load_format="dummy")
    return run_bench(TINY, bench, options)


class TestRun:
    def test_measures_every_setting_once(self, report):
        keys = [(m.engine, m.workload, m.task, m.adapters, m.rank, m.loaded) for m in report.measurements]
        assert len(keys) == len(set(keys))
        # Without adapters one run, with them two (base and mixed), at two ranks; two tasks, two workloads, two engines.
        assert len(keys) == (1 + 2 * 2) * 2 * 2 * 2
        assert report.layers == 2

    def test_profiles_come_when_all_is_timed(self, monkeypatch):
        """The profiler stays in the process, and slows what is timed behind it."""
        done = []
        monkeypatch.setattr("moelora.bench.run.measure", lambda *given, **how: done.append("timed"))
        monkeypatch.setattr("moelora.bench.run.add_profile", lambda *given, **how: done.append("profiled"))
        monkeypatch.setattr("moelora.bench.run._Bench._profiles", True)
        bench = BenchOptions(
            workloads=(WORKLOADS["W1"].scaled(prompts=0.04, tokens=0.04), WORKLOADS["W4"].scaled(tokens=0.1)),
            adapters=(1,),
            ranks=(2,),
            graphs=(GraphMode.OFF,),
            layers=1,
        )
        options = EngineOptions(device="cpu", max_tokens=128, load_format="dummy")
        assert not run_bench(TINY, bench, options).notes
        assert done == ["timed"] * 8 + ["profiled"] * 8
        (note,) = run_bench(TINY, replace(bench, ranks=(2, 4)), options).notes
        assert "--no-profile" in note

    def test_numbers_belong_together(self, report):
        for one in report.measurements:
            assert len(one.seconds) == 2
            assert one.tokens == sum(find_scaled(one).lengths())
            assert one.tokens_per_second == pytest.approx(one.tokens / (sum(one.seconds) / 2))
            assert one.floor_share > 0
            assert (one.padding_share > 0) == (one.engine != "moelora" and one.workload == "W1")
            assert (report.lora_overhead(one) is None) == (one.adapters == 0)
            assert (report.over_peer(one) is None) == (one.engine != "moelora")
            assert one.memory_bytes is None
            assert one.profile is None
        own = [m for m in report.measurements if m.engine == "moelora"]
        assert all(sum(n for *_, n in m.passes) >= 1 and m.eager_reasons == {"graph_off": m.passes[0][2]} for m in own)

    def test_facts_are_json(self, report):
        facts = json.loads(json.dumps(report.facts(), allow_nan=False))
        assert facts["measurements"][0]["passes"][0]["mode"] == "eager"
        assert facts["setups"][0]["weight_bytes"] > 0
        assert facts["setups"][1]["slot_bytes"] > 0
        assert not math.isnan(facts["measurements"][0]["floor_share"])

    def test_graph_gain_compares_with_the_eager_run(self, report):
        eager: Measurement = report.measurements[0]
        graph = replace(eager, graph="full", seconds=tuple(s / 2 for s in eager.seconds))
        both = replace(report, measurements=[eager, graph])
        assert both.graph_gain(graph) == pytest.approx(2)
        assert both.graph_gain(eager) is None


def test_a_setting_without_memory_is_noted_and_the_others_go_on(monkeypatch):
    real = PrefillEngine.__init__

    def limited(self, *args, adapters, **kwargs):
        if len(adapters) == 2:
            raise torch.OutOfMemoryError
        real(self, *args, adapters=adapters, **kwargs)

    monkeypatch.setattr(PrefillEngine, "__init__", limited)
    bench = BenchOptions(
        workloads=(WORKLOADS["W4"].scaled(tokens=0.02),), adapters=(2, 1), ranks=(2,), repeat=1, tasks=(Task.SCORING,)
    )
    found = run_bench(TINY, bench, EngineOptions(device="cpu", max_tokens=64))
    assert found.notes == ["moelora auto, graph auto, 2 adapters of rank 2: out of device memory, left out"]
    assert [(m.loaded, m.adapters) for m in found.measurements] == [(1, 0), (1, 1)]


def test_engines_are_let_go_of_though_objects_are_frozen(monkeypatch):
    """On a GPU what lives when an engine is ready is kept from the collector, and must be handed back to it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    made = []
    real = PrefillEngine.__init__

    def noted(self, *args, **kwargs):
        real(self, *args, **kwargs)
        made.append(weakref.ref(self._base.causal_lm))

    monkeypatch.setattr(PrefillEngine, "__init__", noted)
    bench = BenchOptions(
        workloads=(WORKLOADS["W4"].scaled(tokens=0.02),), adapters=(0, 1), ranks=(2,), repeat=1, tasks=(Task.SCORING,)
    )
    run_bench(TINY, bench, EngineOptions(device="cpu", max_tokens=64))
    assert [ref() for ref in made] == [None, None]
    assert gc.get_freeze_count() == 0


def find_scaled(one: Measurement) -> Workload:
    if one.workload == "W1":
        return WORKLOADS["W1"].scaled(prompts=0.04, tokens=0.04)
    return WORKLOADS["W4"].scaled(tokens=0.1)


def test_prompts_beyond_the_models_positions_are_refused_before_anything_is_timed():
    said: list[str] = []
    bench = BenchOptions(workloads=(WORKLOADS["W4"], WORKLOADS["W3"]))
    with pytest.raises(ConfigError, match="W3 has prompts of up to 4,096 tokens, and the model 512 positions"):
        run_bench(TINY, bench, EngineOptions(device="cpu"), said.append)
    assert said == []


class TestCutting:
    def test_keeps_per_layer_lists_in_step(self):
        with cut_to_layers(SHAPES / "Qwen3.5-35B-A3B", 5, "dummy") as folder:
            config = json.loads((folder / "config.json").read_text())
        assert config["num_hidden_layers"] == 5
        assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention", "linear_attention"]

    def test_refuses_real_weights_and_too_many_layers(self):
        with pytest.raises(ConfigError, match="dummy"), cut_to_layers(TINY, 2, "auto"):
            pass
        with pytest.raises(ConfigError, match=r"\[1, 4\].*got 5"), cut_to_layers(TINY, 5, "dummy"):
            pass
