"""Models whose token mixers hold a causal convolution: one call for all requests of a row, inside graphs too."""

import pytest
import torch

from adapter_writers import AdapterWriter
from arch_world import logprobs, make, tiny
from fake_recorder import FakeRecorder
from kernels.dense_common import DEVICES
from moelora import EngineOptions, GraphMode, PrefillEngine, Request
from moelora.graphs.select import select_runner
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue
from moelora.models.mixers import LoopedCall
from moelora_kernels.fused import TritonOps

DEVICE = DEVICES[0]
LENGTHS = (5, 1, 9, 2)


@pytest.fixture(params=["lfm2_moe", "granitemoehybrid"])
def model(request, tmp_path):
    make(*tiny(request.param), seed=3).save_pretrained(tmp_path / "model")
    catalogue = build_catalogue(open_base(tmp_path / "model").skeleton())
    writer = AdapterWriter(catalogue, r=2, alpha=3, seed=5)
    writer.dense(*(t.name for t in catalogue if t.name.endswith(("in_proj", "out_proj")))).write(tmp_path / "a")
    return tmp_path


def engine_of(model, adapters=(), **options):
    options = {"graph": "off", "max_tokens": 20, **options}
    options = EngineOptions(device=DEVICE, backend="triton", dtype="float32", **options)
    return PrefillEngine(model / "model", adapters={n: model / n for n in adapters}, options=options)


def requests(engine):
    names = ["__base__", *engine.adapter_names]
    return [
        Request(token_ids=[(3 + 5 * i + 7 * j) % 60 for j in range(n)], adapter=names[i % len(names)])
        for i, n in enumerate(LENGTHS)
    ]


def values(result):
    return torch.tensor([*result.token_logprobs[1:], result.next_token.logprob])


def scores(engine):
    return [values(result) for result in engine.score(requests(engine))]


def count(monkeypatch):
    calls = []
    original = TritonOps.causal_conv
    monkeypatch.setattr(TritonOps, "causal_conv", lambda *args: calls.append(args[1].shape[0]) or original(*args))
    return calls


def convolutions(engine):
    return sum(isinstance(one, torch.nn.Conv1d) for one in engine._base.body.modules())


@pytest.mark.filterwarnings("ignore")
def test_one_call_a_layer_for_all_requests_which_equal_each_alone(model, monkeypatch):
    engine = engine_of(model, ["a"])
    assert [label for label in engine.report()["substitutes"]["used"] if label.startswith("convolution modeling_")]
    calls = count(monkeypatch)
    got = scores(engine)
    assert calls == [sum(LENGTHS)] * convolutions(engine)
    own = type(engine._base.causal_lm).from_pretrained(model / "model").eval()
    for one, request in zip(got, requests(engine), strict=True):
        (alone,) = engine.score([request])
        torch.testing.assert_close(one, values(alone))
        if request.adapter == "__base__":
            torch.testing.assert_close(one[:-1], logprobs(own, request.token_ids), atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["lfm2_moe"], indirect=True)
def test_inside_the_parts_of_a_graph(model, monkeypatch):
    want = scores(engine_of(model))
    monkeypatch.setattr("moelora.engine.select_runner", lambda wanted: select_runner(wanted, FakeRecorder))
    monkeypatch.setattr("moelora.graphs.select.graphs_blocked", lambda **facts: None)
    engine = engine_of(model, graph="breakable", buckets=(20,))
    assert engine.report()["graphs"]["mode"] == str(GraphMode.BREAKABLE)
    calls = count(monkeypatch)
    for _ in range(2):
        calls.clear()
        torch.testing.assert_close(scores(engine), want)
        assert calls == [20] * convolutions(engine)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["lfm2_moe"], indirect=True)
def test_what_differs_is_not_used_and_reported(model, monkeypatch):
    want = scores(engine_of(model))
    original = TritonOps.causal_conv
    monkeypatch.setattr(TritonOps, "causal_conv", lambda *args: original(*args) * (1 + 1e-3))
    engine = engine_of(model)
    assert [label for label in engine.report()["substitutes"]["kept"] if label.startswith("convolution modeling_")]
    assert all(isinstance(one, LoopedCall) for one in engine._base.functions.values())
    torch.testing.assert_close(scores(engine), want)
