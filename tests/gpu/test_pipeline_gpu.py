"""The pipeline on a GPU: queueing a batch waits for nothing, and what comes back is what was computed."""

import pytest
import torch

from gpu.graph_world import SMALL, make_engine, mixed_requests, values, write_adapters, write_config
from moelora import GraphMode
from moelora.batching.transfer import Fetch
from moelora.pipeline import BatchPipeline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    model = write_config(folder / "model", "qwen3_moe", **SMALL)
    return model, write_adapters(folder / "adapters", model)


@pytest.mark.parametrize("backend", ["triton", "csgmv"])
@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.BREAKABLE, GraphMode.OFF])
def test_queueing_a_batch_waits_for_nothing(world, backend, mode, monkeypatch):
    engine = make_engine(*world, mode=mode, backend=backend, max_tokens=4096, buckets=(1024, 2048, 4096))
    requests = mixed_requests(engine, 64, 400)
    expected = values(engine.score(requests))  # kernels are compiled, adapters are resident
    queue = BatchPipeline._queue

    def strict(self, sequences, turn):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return queue(self, sequences, turn)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(BatchPipeline, "_queue", strict)
    assert values(engine.score(requests)) == expected


def test_scores_come_back_as_they_were_when_they_were_sent():
    """The buffers of a batch are overwritten by the next one while its scores travel."""
    static = torch.zeros(1 << 22, device="cuda")
    fetches = []
    for i in range(8):
        static.fill_(i)
        fetches.append(Fetch([static, static[:3].long()]))
    static.fill_(-1)
    for i, fetch in enumerate(fetches):
        values_N, ids = fetch.wait()
        assert bool((values_N == i).all())
        assert ids.tolist() == [i] * 3
