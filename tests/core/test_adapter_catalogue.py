"""The targets of tiny models of many architectures."""

from __future__ import annotations

import pytest
import torch

from adapter_writers import catalogue_of
from moelora.adapters.base import TargetKind
from moelora.models.catalogue import build_catalogue
from tiny_models import make_model

LAYER = "model.layers.1"


def kinds(model_type: str, prefix: str = f"{LAYER}.") -> dict[str, str]:
    """Kind by name below one layer."""
    return {t.name.removeprefix(prefix): t.kind.value for t in catalogue_of(model_type) if t.name.startswith(prefix)}


@pytest.mark.parametrize(
    ("model_type", "router", "experts"),
    [
        ("qwen3_moe", "mlp.gate", "mlp.experts"),
        ("qwen2_moe", "mlp.gate", "mlp.experts"),
        ("mixtral", "mlp.gate", "mlp.experts"),
        ("olmoe", "mlp.gate", "mlp.experts"),
        ("deepseek_v2", "mlp.gate", "mlp.experts"),
        ("deepseek_v3", "mlp.gate", "mlp.experts"),
        ("glm4_moe", "mlp.gate", "mlp.experts"),
        ("gpt_oss", "mlp.router", "mlp.experts"),
        ("granitemoe", "block_sparse_moe.router", "block_sparse_moe.experts"),
        ("ernie4_5_moe", "mlp.gate", "mlp.experts"),
        ("phimoe", "mlp.router", "mlp.experts"),
        ("qwen3_next", "mlp.gate", "mlp.experts"),
        ("qwen3_5_moe_text", "mlp.gate", "mlp.experts"),
        ("llama4_text", "feed_forward.router", "feed_forward.experts"),
    ],
)
def test_routers_and_experts(model_type: str, router: str, experts: str) -> None:
    catalogue = catalogue_of(model_type)
    found = kinds(model_type)
    assert found[router] == "router"
    assert [name for name, kind in found.items() if kind == "experts"] == [
        f"{experts}.gate_up_proj",
        f"{experts}.down_proj",
    ]
    gate_up = catalogue.targets[f"{LAYER}.{experts}.gate_up_proj"]
    down = catalogue.targets[f"{LAYER}.{experts}.down_proj"]
    hidden, width = gate_up.in_features, down.in_features
    assert gate_up.gated
    assert not down.gated
    assert (gate_up.out_features, down.out_features) == (2 * width, hidden)
    assert gate_up.transposed == down.transposed == (model_type in ("gpt_oss", "llama4_text"))
    assert gate_up.interleaved == (model_type == "gpt_oss")
    assert not down.interleaved
    stored = (hidden, 2 * width) if gate_up.transposed else (2 * width, hidden)
    assert gate_up.shape == (gate_up.num_experts, *stored)
    assert catalogue.targets[f"{LAYER}.{router}"].out_features == gate_up.num_experts
    assert catalogue.targets["model.embed_tokens"].kind is TargetKind.EMBEDDING
    assert catalogue.targets["model.norm"].kind is TargetKind.WHOLE
    assert catalogue.targets["lm_head"].kind is TargetKind.LINEAR
    assert catalogue.num_layers == 2


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("qwen2_moe", ["mlp.shared_expert.gate_proj", "mlp.shared_expert_gate", "self_attn.q_proj"]),
        ("deepseek_v3", ["self_attn.kv_b_proj", "self_attn.kv_a_proj_with_mqa", "mlp.shared_experts.up_proj"]),
        ("ernie4_5_moe", ["mlp.shared_experts.down_proj"]),
        ("gemma4_text", ["router.proj", "mlp.gate_proj"]),
        ("llama4_text", ["feed_forward.shared_expert.up_proj"]),
        ("nemotron_h", ["mixer.shared_experts.up_proj"]),
        ("llama", ["mlp.gate_proj", "self_attn.o_proj"]),
    ],
)  # fmt: skip
def test_linear_layers(model_type: str, names: list[str]) -> None:
    found = kinds(model_type)
    assert [found[name] for name in names] == ["linear"] * len(names)


def test_linear_attention() -> None:
    found = kinds("qwen3_5_moe_text", "model.layers.0.linear_attn.")
    assert {name for name, kind in found.items() if kind == "linear"} == {
        "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"
    }  # fmt: skip
    assert "conv1d" not in found


def test_experts_without_a_gate() -> None:
    up = catalogue_of("nemotron_h").targets["model.layers.1.mixer.experts.up_proj"]
    assert not up.gated
    assert up.out_features == 24


def test_gemma4_experts_lie_beside_the_mlp() -> None:
    assert kinds("gemma4_text")["experts.gate_up_proj"] == "experts"


@pytest.mark.parametrize(("model_type", "tied"), [("qwen3", True), ("llama", False), ("gemma4_text", True)])
def test_tied_head(model_type: str, tied: bool) -> None:
    assert catalogue_of(model_type).tied_lm_head == tied


def test_a_real_model_gives_what_its_meta_model_gives() -> None:
    for model_type in ("qwen3", "gpt_oss"):
        model = make_model(model_type)
        real = build_catalogue(model)
        assert real == catalogue_of(model_type)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for target in real:
            name = target.name if target.kind is TargetKind.EXPERTS else f"{target.name}.weight"
            assert isinstance(parameters[name], torch.Tensor)
            assert tuple(parameters[name].shape) == target.shape
