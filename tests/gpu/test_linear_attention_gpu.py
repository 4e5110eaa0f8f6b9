"""Gated linear attention at the shape of Qwen3.5-35B-A3B: packed, between the parts of graphs, a few calls a layer.

With flash-linear-attention one call a layer for the delta rule, whatever the number of requests; without it, one for
each group of requests of like length. The convolution has a kernel of its own.
"""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gpu.graph_world import make_engine, mixed_requests, values, write_adapters
from gpu.test_graphs_gpu import assert_replays
from moelora import GraphMode
from moelora.bench.run import cut_to_layers
from moelora.models.mixers import LoopedCall
from moelora.models.stacks import alike_lengths

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = Path(__file__).parents[2] / "benchmarks/shapes/Qwen3.5-35B-A3B"
LAYERS, LINEAR = 4, 3
DELTA_RULE, PACKAGE = "torch_chunk_gated_delta_rule", "fla"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with cut_to_layers(SHAPE, LAYERS, "dummy") as model:
        suffixes = ("q_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "gate_up_proj", "down_proj")
        adapters = write_adapters(tmp_path_factory.mktemp("adapters"), model, ranks=(8, 16), suffixes=suffixes)
        yield make_engine(model, adapters, mode=GraphMode.BREAKABLE, max_tokens=12288, buckets=(512, 4096, 12288))


@pytest.fixture
def calls(engine, monkeypatch):
    """How often each function that mixes requests is called, by its name."""
    counted: Counter[str] = Counter()

    def spy(name, function):
        def spied(*args, **kwargs):
            counted[name] += 1
            return function(*args, **kwargs)

        return spied

    for key, function in engine._base.functions.items():
        looped = function if isinstance(function, LoopedCall) else function._looped
        spied = spy(key.rpartition(":")[2], looped.original)
        monkeypatch.setattr(looped, "original", spied)
        for way in looped._ways:
            monkeypatch.setattr(way, "_function", spied)
    return counted


def test_64_mixed_requests_replay_their_padded_eager_run_bit_for_bit(engine):
    assert engine.report()["graphs"]["mode"] == "breakable"
    requests = mixed_requests(engine, 64, 256)
    first = assert_replays(engine, requests, GraphMode.BREAKABLE)
    assert_replays(engine, mixed_requests(engine, 3, 100, seed=1, shortest=90), GraphMode.BREAKABLE)
    assert values(engine.score(requests)) == values(first)


def test_a_few_calls_a_layer_for_all_requests(engine, calls):
    requests = mixed_requests(engine, 64, 256)
    before = sum(p["count"] for p in engine.report()["passes"])
    engine.score(requests)
    assert sum(p["count"] for p in engine.report()["passes"]) - before == 1, "all of them fit into one batch"
    groups = len(alike_lengths([len(request.token_ids) for request in requests]))
    at_once = 1 if find_spec(PACKAGE) else groups
    print(f"{calls} for {LINEAR} layers of {len(requests)} requests; {PACKAGE}: {at_once == 1}")
    assert calls == {DELTA_RULE: LINEAR * at_once}, "and none of the convolution's own code"


def test_packed_equals_one_by_one_within_the_spread_of_bf16(engine):
    requests = mixed_requests(engine, 24, 256, seed=2)
    worst = 0.0
    for request, together in zip(requests, engine.score(requests), strict=True):
        (alone,) = engine.score([request])
        pairs = zip(together.token_logprobs[1:], alone.token_logprobs[1:], strict=True)
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
    print(f"largest difference of any token's log-probability, packed against alone, bf16: {worst:.4f}")
    assert worst < 0.15
