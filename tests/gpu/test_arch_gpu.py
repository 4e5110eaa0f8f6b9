"""Every MoE architecture on a GPU: what its verdict allows is captured, and replays equal eager runs bit for bit."""

import pytest
import torch

from arch_world import ARCHITECTURES, adapt_everything, logprobs, make, merged, refusal, runnable
from gpu.graph_world import values
from gpu.test_graphs_gpu import replay_and_padded
from moelora import EngineOptions, GraphMode, PrefillEngine, Request
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

captured: dict[str, str] = {}
"""The mode by architecture, as the tests below found it; the last one counts."""


def world(folder, name, dtype):
    model_class, config = runnable(name, dtype)
    make(model_class, config, seed=3).save_pretrained(folder / "model")
    catalogue = build_catalogue(open_base(folder / "model").skeleton())
    return model_class, catalogue, adapt_everything(catalogue, folder / "tuned", seed=5)


def engine_of(folder, **options):
    options = {"max_tokens": 256, "buckets": (64, 256), "device": "cuda", "backend": "triton", **options}
    return PrefillEngine(folder / "model", adapters={"tuned": folder / "tuned"}, options=EngineOptions(**options))


def requests(lengths=(2, 40, 9, 27, 33)):
    generator = torch.Generator().manual_seed(7)
    return [
        Request(token_ids=torch.randint(3, 120, (n,), generator=generator).tolist(), adapter=adapter)
        for n in lengths
        for adapter in ("tuned", "__base__")
    ]


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.filterwarnings("ignore")
def test_a_replay_equals_the_eager_run_bit_for_bit(tmp_path, name):
    world(tmp_path, name, torch.bfloat16)
    engine = engine_of(tmp_path, graph=GraphMode.FULL, dtype="bfloat16")
    graphs = engine.report()["graphs"]
    captured[name] = graphs["mode"]
    print(f"captured: {name} {graphs['mode']} {graphs['notes']}")
    if graphs["mode"] == "off":
        assert graphs["notes"], "not captured, and no word of why"
        return
    for some in (requests(), requests((5, 3)), requests((30, 30, 30))):
        replayed, padded = replay_and_padded(engine, some)
        assert {str(result.mode) for result in replayed} == {graphs["mode"]}
        assert values(replayed) == values(padded)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.filterwarnings("ignore")
def test_fp32_equals_transformers_with_merged_weights(tmp_path, name):
    model_class, catalogue, writer = world(tmp_path, name, torch.float32)
    model = model_class.from_pretrained(tmp_path / "model").eval()
    # On the same device: which of equal scores a topk takes differs between devices.
    tuned, model = merged(model, catalogue, writer).to("cuda"), model.to("cuda")
    some = requests((2, 30, 9))
    results = engine_of(tmp_path, graph=GraphMode.OFF, dtype="float32").score(some)
    for request, result in zip(some, results, strict=True):
        expected = logprobs(tuned if request.adapter == "tuned" else model, list(request.token_ids))
        # A kernel of linear attention, where one is installed, may use TF32; and a near tie of a router may fall
        # otherwise on another device, which moves the tokens that it routes.
        assert (torch.tensor(result.token_logprobs[1:]) - expected).abs().median() < 1e-3


def test_at_least_twenty_were_captured():
    if any(name not in captured and not refusal(name, torch.bfloat16) for name in ARCHITECTURES):
        pytest.skip("counts only after all architectures have run")
    assert sum(mode != "off" for mode in captured.values()) >= 20, captured
