"""Every MoE architecture of transformers on a GPU: captured as far as its structure allows, replays equal to eager."""

import pytest
import torch
import transformers

from arch_world import ARCHITECTURES, adapt_everything, make, tiny
from gpu.graph_world import mixed_requests, values
from gpu.test_graphs_gpu import replay_and_padded
from moelora import EngineOptions, GraphMode, PrefillEngine
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.filterwarnings("ignore")
def test_replays_equal_eager_runs_bit_for_bit(tmp_path, name):
    """`--graph full` captures what it can; where nothing can be captured the report has the reason, and rows run."""
    try:
        model_class, config = tiny(name)
    except (ImportError, AttributeError):
        pytest.skip(f"transformers {transformers.__version__} has no such architecture")
    make(model_class, config, seed=3).save_pretrained(tmp_path / "model")
    catalogue = build_catalogue(open_base(tmp_path / "model").skeleton())
    adapt_everything(catalogue, tmp_path / "tuned", seed=5)

    def engine(backend, mode):
        options = EngineOptions(
            device="cuda", dtype="float32", backend=backend, graph=mode, max_tokens=256, buckets=(64, 256)
        )
        return PrefillEngine(tmp_path / "model", adapters={"tuned": tmp_path / "tuned"}, options=options)

    captured = engine("triton", GraphMode.FULL)
    graphs = captured.report()["graphs"]
    requests = mixed_requests(captured, 9, 25, shortest=12)
    replayed, padded = replay_and_padded(captured, requests) if graphs["mode"] != "off" else (None, None)
    print(f"{name}: {graphs['mode']} {graphs['notes']}")
    if replayed is not None:
        assert {str(r.mode) for r in replayed} == {graphs["mode"]}
        assert values(replayed) == values(padded)
    plain = engine("torch", GraphMode.OFF).score(requests)
    for got, want in zip(replayed or captured.score(requests), plain, strict=True):
        assert got.error is None
        assert got.token_logprobs[1:] == pytest.approx(want.token_logprobs[1:], abs=2e-3)
