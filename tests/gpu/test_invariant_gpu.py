"""Batch invariance on a GPU: a row has the same bits alone, among any others, padded or not."""

import random

import pytest
import torch

from gpu.graph_world import QWEN3_30B_A3B, make_engine, mixed_requests, values, write_adapters, write_config
from moelora import GraphMode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {"hidden_size": 1024, "num_experts": 32, "vocab_size": 8192, "num_hidden_layers": 4}
PROMPTS = 300


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("invariant")
    model = write_config(folder / "model", "qwen3_moe", **{**QWEN3_30B_A3B, **SIZES})
    return model, write_adapters(folder / "adapters", model, (4, 16, 64))


@pytest.mark.parametrize("backend", ["triton", "csgmv"])
@pytest.mark.parametrize("mode", [GraphMode.OFF, GraphMode.FULL, GraphMode.BREAKABLE])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_300_prompts_alone_in_sevens_in_64s_and_shuffled(world, backend, mode, dtype):
    def engine(max_requests):
        buckets = {} if mode is GraphMode.OFF else {"buckets": tuple(2**i for i in range(4, 14))}
        return make_engine(
            *world, mode=mode, backend=backend, dtype=dtype, batch_invariant=True, max_requests=max_requests, **buckets
        )

    alone = engine(1)
    requests = mixed_requests(alone, PROMPTS, 90)
    expected = values(alone.score(requests))
    order = list(range(PROMPTS))
    random.Random(0).shuffle(order)
    for size in (7, 64):
        together = engine(size)
        assert values(together.score(requests)) == expected
        assert values(together.score([requests[i] for i in order])) == [expected[i] for i in order]
