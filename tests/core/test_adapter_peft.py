"""Adapters saved by PEFT itself: canonical factors against the deltas of the PEFT model that saved them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from adapter_writers import delta_of
from moelora.adapters.base import Adapter, Catalogue, TargetKind
from moelora.adapters.loader import load_adapter
from moelora.models.catalogue import build_catalogue
from tiny_models import make_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def save_with_peft(folder: Path, model: torch.nn.Module, **config: Any) -> tuple[Adapter, dict[str, torch.Tensor]]:
    """Trains nothing, but gives every factor random values; returns what is loaded and PEFT's ΔW by target name."""
    catalogue = build_catalogue(model)
    base = {name: tensor.clone() for name, tensor in model.named_parameters(remove_duplicate=False)}
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **{"r": 3, "lora_alpha": 6, **config}))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    wrapped.save_pretrained(folder)
    adapter = load_adapter(folder, name="a", catalogue=catalogue, dtype=torch.float32, base_weight=base.get)
    return adapter, peft_deltas(wrapped, catalogue)


def peft_deltas(wrapped: torch.nn.Module, catalogue: Catalogue) -> dict[str, torch.Tensor]:
    """`[out, in]`, experts `[E, out, in]`, the embedding `[hidden, vocabulary]`."""
    deltas = {}
    for name, module in wrapped.named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        path = name.removeprefix("base_model.model.").replace(".base_layer", "")
        parameter = getattr(module, "parameter_name", "weight")
        path = path if parameter == "weight" else f"{path}.{parameter}"
        with torch.no_grad():
            delta = module.get_delta_weight("default")
        target = catalogue.targets[path]
        turned = target.transposed or target.kind is TargetKind.EMBEDDING
        deltas[path] = delta.transpose(-1, -2) if turned else delta
    return deltas


def compare(adapter: Adapter, deltas: dict[str, torch.Tensor], catalogue: Catalogue) -> None:
    assert set(adapter.factors) == set(deltas)
    for name, factors in adapter.factors.items():
        delta = delta_of(factors, catalogue.targets[name]).float()
        torch.testing.assert_close(delta, deltas[name], rtol=1e-6, atol=1e-6)
        assert delta.abs().max() > 1e-3


CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"target_modules": ATTENTION}),
    ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS}),
    ("qwen3_moe", {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}),
    ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}),
    ("qwen3_moe", {"target_modules": [], "target_parameters": [*EXPERTS, "mlp.gate.weight"], "use_rslora": True}),
    ("qwen3_moe", {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    ("qwen3_moe", {"target_modules": "all-linear"}),
    ("qwen3_moe", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    (
        "qwen3_moe",
        {
            "target_modules": ATTENTION,
            "target_parameters": EXPERTS,
            "use_rslora": True,
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 5, "experts.down_proj": 2, "proj": 9},
            "alpha_pattern": {"o_proj": 1, r"^model\.layers\.0\.mlp\.experts\.gate_up_proj": 13},
        },
    ),
    ("qwen2_moe", {"target_modules": [*ATTENTION, "shared_expert_gate", "up_proj"], "target_parameters": EXPERTS}),
    ("mixtral", {"target_modules": ["v_proj"], "target_parameters": EXPERTS}),
    ("olmoe", {"target_modules": [], "target_parameters": EXPERTS}),
    ("deepseek_v3", {"target_modules": ["q_a_proj", "kv_b_proj", "o_proj"], "target_parameters": EXPERTS}),
    ("gpt_oss", {"target_modules": ["k_proj"], "target_parameters": [*EXPERTS, "router.weight"]}),
    ("gpt_oss", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
    ("granitemoe", {"target_modules": ["q_proj"], "target_parameters": [*EXPERTS, "router.weight"]}),
    ("glm4_moe", {"target_modules": ATTENTION, "layers_to_transform": [0]}),
    ("llama", {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"down_proj": 7}}),
    ("llama", {"target_modules": r".*\.1\.mlp\.(up|down)_proj"}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "config"), CASES)
def test_deltas_agree(model_type: str, config: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(model_type)
    catalogue = build_catalogue(model)
    adapter, deltas = save_with_peft(tmp_path, model, **config)
    compare(adapter, deltas, catalogue)


@pytest.mark.parametrize(("parameter", "width"), [("experts.gate_up_proj", 16), ("experts.down_proj", 32)])
def test_square_weights(parameter: str, width: int, tmp_path: Path) -> None:
    model = make_model("qwen3_moe", moe_intermediate_size=width)
    catalogue = build_catalogue(model)
    adapter, deltas = save_with_peft(tmp_path, model, target_modules=[], target_parameters=[parameter])
    compare(adapter, deltas, catalogue)


def test_square_transposed_weights(tmp_path: Path) -> None:
    model = make_model("gpt_oss", intermediate_size=32)
    catalogue = build_catalogue(model)
    adapter, deltas = save_with_peft(tmp_path, model, target_modules=[], target_parameters=["experts.down_proj"])
    compare(adapter, deltas, catalogue)


def test_tied_head_and_embedding(tmp_path: Path) -> None:
    """With tied weights an adapter of the head changes logits only, one of the embedding the input only."""
    model = make_model("qwen3")
    catalogue = build_catalogue(model)
    adapter, deltas = save_with_peft(tmp_path, model, target_modules=["lm_head", "q_proj"])
    assert catalogue.tied_lm_head
    assert "model.embed_tokens" not in adapter.factors
    compare(adapter, deltas, catalogue)


def test_modules_to_save(tmp_path: Path) -> None:
    model = make_model("qwen2_moe")
    catalogue = build_catalogue(model)
    base = {name: tensor.clone() for name, tensor in model.named_parameters()}
    saved = ["gate", "lm_head", "norm", "embed_tokens"]
    adapter, deltas = save_with_peft(tmp_path, model, target_modules=["q_proj"], modules_to_save=saved)
    compare(adapter, deltas, catalogue)
    assert {"lm_head", "model.norm", "model.embed_tokens", "model.layers.1.mlp.gate"} <= set(adapter.replacements)
    for name, weight in adapter.replacements.items():
        assert weight.shape == base[f"{name}.weight"].shape
        assert not torch.equal(weight, base[f"{name}.weight"])


def test_every_plain_initialisation_loads(tmp_path: Path) -> None:
    for init in (True, False, "gaussian", "orthogonal"):
        model = make_model("llama")
        catalogue = build_catalogue(model)
        adapter, deltas = save_with_peft(
            tmp_path / str(init), model, target_modules=["q_proj"], init_lora_weights=init, r=4
        )
        compare(adapter, deltas, catalogue)


def test_rslora_scale_is_not_the_plain_one(tmp_path: Path) -> None:
    adapter, _ = save_with_peft(
        tmp_path, make_model("llama"), target_modules=["q_proj"], r=16, lora_alpha=16, use_rslora=True
    )
    assert {scale for summary in adapter.summaries for scale in summary.scales} == {math.sqrt(16)}
