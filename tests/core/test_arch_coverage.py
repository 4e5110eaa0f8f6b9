"""Every MoE architecture of transformers: packed, with adapters on all it can take, against transformers alone."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from arch_world import (
    ARCHITECTURES,
    WRAPPERS,
    adapt_everything,
    has_masks_by_request,
    has_registered_experts,
    is_decided,
    logprobs,
    make,
    merged,
    runnable,
    tiny,
    wrapped,
)
from moelora import BASE_ADAPTER, EngineOptions, PrefillEngine, Request
from moelora.adapters.base import TargetKind
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue

TOLERANCE = 1e-4

# Experts that no adapter can be applied to, and why: they run by their own forward.
OWN_EXPERTS = {
    "dbrx": "its experts are stored as matrices [E·I, H]",
    "doge": "its experts are rows of embeddings",
    "jetmoe": "its experts take sorted pairs, and lie within attention too",
}

# One of each architecture; the others vary settings of one.
DECODERS = sorted({re.split("[+-]", name)[0] for name in ARCHITECTURES})


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES, *WRAPPERS}))
@pytest.mark.filterwarnings("ignore")
def test_equals_transformers_with_merged_weights(tmp_path, name):
    """Ragged requests of base and adapter in one forward; the adapter is on every linear layer, router and expert."""
    model_class, config = runnable(name)
    make(model_class, config, seed=3).save_pretrained(tmp_path / "model")
    model = model_class.from_pretrained(tmp_path / "model").eval()
    catalogue = build_catalogue(open_base(tmp_path / "model").skeleton())
    writer = adapt_everything(catalogue, tmp_path / "tuned", seed=5)
    kinds = {catalogue.targets[target].kind for target in writer.deltas}
    own_experts = name in OWN_EXPERTS or not has_registered_experts(model_class)
    assert kinds >= ({TargetKind.LINEAR} if own_experts else {TargetKind.LINEAR, TargetKind.EXPERTS})
    tuned = merged(model, catalogue, writer)

    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 120, (n,), generator=generator).tolist() for n in (2, 40, 9, 27)]
    requests = [Request(token_ids=ids, adapter=adapter) for ids in prompts for adapter in ("tuned", BASE_ADAPTER)]
    engine = PrefillEngine(
        tmp_path / "model", adapters={"tuned": tmp_path / "tuned"}, options=EngineOptions(device="cpu")
    )
    results = engine.score(requests)

    packs = has_masks_by_request(config)
    assert engine.report()["packed"] == packs, engine.report()["packing_reason"]
    assert sum(passes["count"] for passes in engine.report()["passes"]) == (1 if packs else len(requests))
    effect, undecided = 0.0, 0
    for request, result in zip(requests, results, strict=True):
        base = logprobs(model, request.token_ids)
        expected = base if request.adapter == BASE_ADAPTER else logprobs(tuned, request.token_ids)
        if (torch.tensor(result.token_logprobs[1:]) - expected).abs().max() >= TOLERANCE:
            truth = tuned if request.adapter == "tuned" else model
            undecided += not is_decided(truth, request.token_ids)
            assert undecided == 1, "differs from transformers"
        effect = max(effect, float((expected - base).abs().max()))
    assert effect > 100 * TOLERANCE, "the adapter changes too little for this test to mean anything"


def test_at_least_sixty_take_adapters_on_their_experts():
    assert len(DECODERS) == 68
    assert len(set(DECODERS) - set(OWN_EXPERTS)) >= 60


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe+wrapped", "llama4+wrapped", "mistral3"])
@pytest.mark.filterwarnings("ignore")
def test_keys_of_adapters_may_name_the_language_model(tmp_path, name):
    """Adapters trained on the multimodal model carry `language_model.` in their keys; those of its text part do not."""
    model_class, config = wrapped(name)
    make(model_class, config, seed=3).save_pretrained(tmp_path / "model")
    catalogue = build_catalogue(open_base(tmp_path / "model").skeleton())
    ids = list(range(3, 33))
    scores = []
    for spelling in ("model.", "model.language_model."):
        folder = tmp_path / spelling.replace(".", "_")
        writer = adapt_everything(catalogue, folder, seed=5, layers=spelling)
        assert any(key.startswith(f"{spelling}layers") for key in writer.tensors)
        engine = PrefillEngine(tmp_path / "model", adapters={"tuned": folder}, options=EngineOptions(device="cpu"))
        scores.append(engine.score([Request(token_ids=ids, adapter="tuned"), Request(token_ids=ids)]))
    assert scores[0][0].token_logprobs == scores[1][0].token_logprobs
    assert abs(scores[0][0].logprob_sum - scores[0][1].logprob_sum) > 0.1


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_omni_moe"])
def test_what_only_images_and_sound_go_through_is_not_kept(tmp_path, name):
    model_class, config = wrapped(name)
    model = make(model_class, config, seed=3)
    model.save_pretrained(tmp_path)
    engine = PrefillEngine(tmp_path, options=EngineOptions(device="cpu"))
    held = sum(p.numel() for p in engine._base.causal_lm.parameters())
    encoders = re.compile(r"\b(visual|audio_tower)\.")
    text = sum(p.numel() for n, p in model.named_parameters() if not encoders.search(n))
    assert held == text < sum(p.numel() for p in model.parameters())
    assert not any(encoders.search(target.name) for target in engine.catalogue)


def test_plain_classes_of_transformers_are_still_found(tmp_path):
    """A text checkpoint goes to the same class as transformers' own automatic one."""
    model_class, config = tiny("qwen3_moe")
    make(model_class, config, seed=3).save_pretrained(tmp_path)
    assert open_base(tmp_path).model_class is type(AutoModelForCausalLM.from_pretrained(tmp_path))
