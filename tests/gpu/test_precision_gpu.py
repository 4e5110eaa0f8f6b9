"""bf16 on a GPU: no further from fp32 than transformers + PEFT in bf16 on the same input."""

import copy

import pytest
import torch

from core.test_against_peft import EXPERTS, make_adapter
from moelora import EngineOptions, PrefillEngine, Request
from tiny_models import VOCAB, reference_logprobs, save_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Wide enough for sums to lose something, and for every kernel to take more than one step.
SIZES = {"hidden_size": 256, "num_hidden_layers": 4}
PROMPTS, LENGTH = 40, 60


@pytest.mark.parametrize("backend", ["triton", "csgmv"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss"])
def test_bf16_is_no_further_from_fp32_than_peft(tmp_path, model_type, backend):
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2} if model_type == "gpt_oss" else {}
    model = save_model(tmp_path / "model", model_type, seed=5, **SIZES, **layers)
    adapted = make_adapter(tmp_path / "tuned", model, 6, **{**EXPERTS, "target_modules": ["o_proj"]})
    generator = torch.Generator().manual_seed(9)
    prompts = torch.randint(0, VOCAB, (PROMPTS, LENGTH), generator=generator).tolist()
    truth = torch.stack([reference_logprobs(adapted, ids) for ids in prompts])

    half = copy.deepcopy(adapted).to("cuda", torch.bfloat16)
    theirs = []
    for ids in prompts:
        with torch.no_grad():
            logits = half(input_ids=torch.tensor([ids], device="cuda"), use_cache=False).logits[0].float().cpu()
        theirs.append(torch.log_softmax(logits, dim=-1)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0])

    options = EngineOptions(device="cuda", dtype="bfloat16", backend=backend)
    engine = PrefillEngine(tmp_path / "model", adapters={"tuned": tmp_path / "tuned"}, options=options)
    ours = engine.score([Request(token_ids=ids, adapter="tuned") for ids in prompts])

    our_error = float((torch.tensor([r.token_logprobs[1:] for r in ours]) - truth).abs().mean())
    their_error = float((torch.stack(theirs) - truth).abs().mean())
    print(
        f"{model_type} {backend}: mean error {our_error:.5f}, of PEFT {their_error:.5f}: {our_error / their_error:.2f}"
    )
    assert our_error <= 1.25 * their_error
