"""Layouts of everything but experts, and spellings of names, against deltas worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_writers import PREFIX, AdapterWriter, catalogue_of
from core.layout_checks import EXPERTS, Q_PROJ, check_layout, layouts_of
from moelora.adapters.base import Catalogue
from moelora.adapters.loader import load_adapter

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("rslora", [False, True])
def test_dense_router_head_and_embedding(qwen3: Catalogue, tmp_path: Path, rslora: bool) -> None:
    writer = AdapterWriter(qwen3, rslora=rslora)
    writer.dense(Q_PROJ, "model.layers.1.mlp.gate", "lm_head").embedding()
    adapter = check_layout(writer, tmp_path)
    assert layouts_of(adapter)["model.embed_tokens"] == "E"
    assert adapter.max_rank == 3


def test_router_as_parameter_takes_patterns_of_the_parameter(qwen3: Catalogue, tmp_path: Path) -> None:
    gate = "model.layers.1.mlp.gate"
    writer = AdapterWriter(qwen3, target_parameters=["gate.weight"], alpha_pattern={"gate": 99, "gate.weight": 12})
    writer.alpha = 12
    writer.dense(gate)
    writer.alpha = 6
    adapter = check_layout(writer, tmp_path)
    assert layouts_of(adapter)[gate] == "W2"


@pytest.mark.parametrize("model_type", ["mixtral", "phimoe"])
def test_mixtral_names(model_type: str, tmp_path: Path) -> None:
    catalogue = catalogue_of(model_type)
    router = "model.layers.0.mlp.gate" if model_type == "mixtral" else "model.layers.0.mlp.router"
    writer = AdapterWriter(catalogue)
    writer.per_expert(
        EXPERTS,
        module="model.layers.1.block_sparse_moe.experts",
        leaves={"gate": "w1", "up": "w3", "down": "w2"},
    ).dense(router, module="model.layers.0.block_sparse_moe.gate")
    check_layout(writer, tmp_path)


def test_names_after_an_extra_module(qwen3: Catalogue, tmp_path: Path) -> None:
    check_layout(AdapterWriter(qwen3).per_expert(EXPERTS, module="model.layers.1.mlp.original_moe.experts"), tmp_path)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_language_model_level_in_names(qwen3: Catalogue, tmp_path: Path, prefix: str) -> None:
    writer = AdapterWriter(qwen3)
    writer.per_expert(EXPERTS, module=f"{prefix}layers.1.mlp.experts")
    writer.dense(Q_PROJ, module=f"{prefix}layers.0.self_attn.q_proj")
    check_layout(writer, tmp_path)


@pytest.mark.parametrize("change", ["no prefix", "default"])
def test_other_spellings_of_keys(qwen3: Catalogue, tmp_path: Path, change: str) -> None:
    writer = AdapterWriter(qwen3).dense(Q_PROJ, "lm_head").per_expert(EXPERTS)
    folder = writer.write(tmp_path)
    wanted = load_adapter(folder, name="a", catalogue=qwen3, dtype=torch.float32)
    tensors = load_file(folder / "adapter_model.safetensors")
    if change == "no prefix":
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    else:
        tensors = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    got = load_adapter(folder, name="a", catalogue=qwen3, dtype=torch.float32)
    for name, factors in wanted.factors.items():
        assert torch.equal(factors.a, got.factors[name].a)
        assert torch.equal(factors.b, got.factors[name].b)


def test_fused_attention_and_mlp(tmp_path: Path) -> None:
    catalogue = catalogue_of("llama")
    writer = AdapterWriter(catalogue)
    writer.fused(
        "model.layers.0.self_attn.qkv_proj", [f"model.layers.0.self_attn.{leaf}_proj" for leaf in ("q", "k", "v")]
    )
    writer.fused("model.layers.1.mlp.gate_up_proj", [f"model.layers.1.mlp.{leaf}_proj" for leaf in ("gate", "up")])
    assert set(layouts_of(check_layout(writer, tmp_path)).values()) == {"F"}


@pytest.mark.parametrize("parts", [("in_proj_q", "in_proj_k", "in_proj_v"), ("in_proj_v",), ("in_proj_k",)])
def test_pieces_of_a_fused_projection(parts: tuple[str, ...], tmp_path: Path) -> None:
    target = "model.layers.0.linear_attn.in_proj_qkv"
    writer = AdapterWriter(catalogue_of("qwen3_5_moe_text"))
    check_layout(writer.split(target, {"in_proj_q": 16, "in_proj_k": 16, "in_proj_v": 32}, parts), tmp_path)


def test_fused_beyond_the_model_s_own_fusion(tmp_path: Path) -> None:
    writer = AdapterWriter(catalogue_of("qwen3_5_moe_text"))
    layer = "model.layers.0.linear_attn"
    writer.fused(f"{layer}.in_proj_qkvz", [f"{layer}.in_proj_qkv", f"{layer}.in_proj_z"])
    check_layout(writer, tmp_path)


def test_tinker_names(tmp_path: Path) -> None:
    catalogue = catalogue_of("gpt_oss")
    writer = AdapterWriter(catalogue)
    writer.dense(Q_PROJ, module="model.layers.0.attn.q_proj")
    writer.dense("lm_head", module="model.unembed_tokens")
    writer.stacked(
        EXPERTS, leaves={"gate": "w1", "up": "w3", "down": "w2"}, shared_a=("gate", "up"), shared_b=("down",)
    )
    check_layout(writer, tmp_path)


def test_granitemoe_names_of_transformers_4(tmp_path: Path) -> None:
    catalogue = catalogue_of("granitemoe")
    block = "model.layers.0.block_sparse_moe"
    writer = AdapterWriter(catalogue)
    writer.wrapped(f"{block}.experts", parameters=("gate_up_proj",), module=f"{block}.input_linear", swapped=False)
    writer.wrapped(f"{block}.experts", parameters=("down_proj",), module=f"{block}.output_linear", swapped=False)
    writer.config["target_parameters"] = ["input_linear.weight", "output_linear.weight"]
    writer.dense(f"{block}.router", module=f"{block}.router.layer")
    check_layout(writer, tmp_path)
