"""The engine against transformers + PEFT, and against weights merged by hand where PEFT is wrong."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

from moelora import EngineOptions, PrefillEngine, Request
from tiny_models import VOCAB, reference_logprobs, save_model

TOLERANCE = 1e-4

ATTENTION = {"target_modules": r".*self_attn\.(q|k|v|o)_proj"}
MLA = {"target_modules": r".*self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": []}
CASES = [
    ("qwen3_moe", ATTENTION),
    ("qwen3_moe", EXPERTS),
    ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"], "use_rslora": True}),
    ("qwen3_moe", {"target_modules": ["embed_tokens", "lm_head"]}),
    ("qwen3_moe", {**ATTENTION, "rank_pattern": {"layers.1.self_attn.q_proj": 7}, "alpha_pattern": {"k_proj": 3}}),
    ("qwen3_moe", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    ("qwen2_moe", {"target_modules": r".*(self_attn\.\w_proj|shared_expert\.\w+_proj|shared_expert_gate)"}),
    (
        "qwen2_moe",
        {"target_modules": r".*layers\.0\.mlp\.\w+_proj", "target_parameters": ["layers.1.mlp.experts.down_proj"]},
    ),
    ("mixtral", {**EXPERTS, "target_modules": ["o_proj"]}),
    ("olmoe", {"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": []}),
    ("deepseek_v2", MLA),
    ("deepseek_v3", {**EXPERTS, "target_modules": r".*shared_experts\.\w+_proj"}),
    ("glm4_moe", EXPERTS),
    ("gpt_oss", {**EXPERTS, "target_modules": ["q_proj", "o_proj"]}),
    ("granitemoe", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    ("ernie4_5_moe", EXPERTS),
    ("qwen3_next", {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]}),
    ("qwen3", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]}),
    ("llama", {"target_modules": "all-linear"}),
]


def prompts(seed, lengths=(1, 9, 23, 40)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def make_adapter(folder, model, seed, **options):
    """Saves a PEFT adapter with random A and B; returns the adapted model."""
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=10, task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.15)
            elif "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return adapted.eval()


def worst(results, model, token_lists):
    difference = 0.0
    for result, ids in zip(results, token_lists, strict=True):
        expected = reference_logprobs(model, ids)
        assert result.token_logprobs[0] is None
        if len(ids) > 1:
            difference = max(difference, (torch.tensor(result.token_logprobs[1:]) - expected).abs().max().item())
    return difference


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "options"), CASES)
def test_equals_peft(tmp_path, model_type, options):
    model = save_model(tmp_path / "model", model_type, seed=5)
    adapted = make_adapter(tmp_path / "tuned", model, 6, **options)
    engine = PrefillEngine(
        tmp_path / "model", adapters={"tuned": tmp_path / "tuned"}, options=EngineOptions(device="cpu")
    )
    ids = prompts(7)
    base = engine.score([Request(token_ids=i) for i in ids])
    tuned = engine.score([Request(token_ids=i, adapter="tuned") for i in ids])
    assert worst(base, model, ids) < TOLERANCE
    assert worst(tuned, adapted, ids) < TOLERANCE
    assert worst(tuned, model, ids) > 100 * TOLERANCE, "the adapter changes too little for this test to mean anything"
    # A reload in PEFT must agree too: what was saved is what was tested.
    again = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "tuned").eval()
    assert worst(tuned, again, ids) < TOLERANCE


def per_expert_adapter(folder, model, *, experts, projections, rslora=False, extra=None):
    """Writes per-expert keys and returns `model` with the same deltas merged by hand."""
    torch.manual_seed(11)
    rank, alpha = 3, 6
    scale = alpha / rank**0.5 if rslora else alpha / rank
    merged, tensors = copy.deepcopy(model), {}
    for number, layer in enumerate(merged.model.layers):
        if not hasattr(layer.mlp, "experts"):
            continue
        inter = layer.mlp.experts.down_proj.shape[2]
        for expert in experts:
            for projection in projections:
                weight = layer.mlp.experts.down_proj if projection == "down_proj" else layer.mlp.experts.gate_up_proj
                rows = slice(inter, None) if projection == "up_proj" else slice(0, inter)
                part = weight.data[expert] if projection == "down_proj" else weight.data[expert, rows]
                a, b = 0.2 * torch.randn(rank, part.shape[1]), 0.2 * torch.randn(part.shape[0], rank)
                part += scale * b @ a
                key = f"base_model.model.model.layers.{number}.mlp.experts.{expert}.{projection}"
                tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a, b
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "use_rslora": rslora, **(extra or {})}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": list(projections)}))
    return merged


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        # PEFT applies gate and up √2 too strong.
        ("qwen3_moe", {"experts": range(6), "projections": ["gate_proj", "up_proj", "down_proj"], "rslora": True}),
        # PEFT drops gate and up.
        ("qwen3_moe", {"experts": range(6), "projections": ["gate_proj", "up_proj"]}),
        # PEFT raises.
        ("qwen3_moe", {"experts": range(6), "projections": ["up_proj"]}),
        ("qwen3_moe", {"experts": [3], "projections": ["gate_proj", "up_proj", "down_proj"]}),
        ("olmoe", {"experts": [0, 7], "projections": ["down_proj"]}),
        # PEFT drops the routed experts without a word.
        ("qwen2_moe", {"experts": range(6), "projections": ["gate_proj", "up_proj", "down_proj"]}),
        ("deepseek_v3", {"experts": [1, 2, 5], "projections": ["gate_proj", "down_proj"]}),
    ],
)
def test_equals_weights_merged_by_hand(tmp_path, model_type, options):
    model = save_model(tmp_path / "model", model_type, seed=8)
    merged = per_expert_adapter(tmp_path / "tuned", model, **options)
    engine = PrefillEngine(
        tmp_path / "model", adapters={"tuned": tmp_path / "tuned"}, options=EngineOptions(device="cpu")
    )
    ids = prompts(9)
    tuned = engine.score([Request(token_ids=i, adapter="tuned") for i in ids])
    assert worst(tuned, merged, ids) < TOLERANCE
    assert worst(tuned, model, ids) > 100 * TOLERANCE


def test_bf16_is_no_further_from_fp32_than_peft(tmp_path):
    """The error of bf16 against fp32, relative to that of transformers + PEFT in bf16 on the same input."""
    model = save_model(tmp_path / "model", "qwen3_moe", seed=5, num_hidden_layers=4)
    adapted = make_adapter(tmp_path / "tuned", model, 6, **EXPERTS)
    ids = prompts(12, lengths=(60,) * 12)
    truth = [reference_logprobs(adapted, i) for i in ids]
    options = EngineOptions(device="cpu", dtype="bfloat16")
    engine = PrefillEngine(tmp_path / "model", adapters={"tuned": tmp_path / "tuned"}, options=options)
    ours = engine.score([Request(token_ids=i, adapter="tuned") for i in ids])
    half = copy.deepcopy(adapted).to(torch.bfloat16)
    theirs = [reference_logprobs(half, i) for i in ids]
    our_error = torch.cat([torch.tensor(r.token_logprobs[1:]) - t for r, t in zip(ours, truth)]).abs().mean()
    their_error = torch.cat([a - t for a, t in zip(theirs, truth)]).abs().mean()
    assert our_error <= 1.25 * their_error
