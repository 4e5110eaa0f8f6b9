"""Layouts of routed experts, one by one or stacked, against deltas worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adapter_writers import AdapterWriter, catalogue_of
from core.layout_checks import EXPERTS, check_layout, layouts_of
from moelora.adapters.base import Catalogue, Target, TargetKind

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "ernie4_5_moe"])
@pytest.mark.parametrize("parts", [("gate", "up", "down"), ("gate",), ("up",), ("down",), ("gate", "up")])
def test_per_expert(model_type: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    adapter = check_layout(AdapterWriter(catalogue_of(model_type)).per_expert(EXPERTS, parts=parts), tmp_path)
    fused = adapter.factors.get(f"{EXPERTS}.gate_up_proj")
    assert fused is None or fused.rank == 3 * sum(part in parts for part in ("gate", "up"))


def test_per_expert_with_rslora_scales_gate_and_up_alike(qwen3: Catalogue, tmp_path: Path) -> None:
    check_layout(AdapterWriter(qwen3, rslora=True).per_expert(EXPERTS), tmp_path)


def test_gate_and_up_keep_their_own_factors(qwen3: Catalogue, tmp_path: Path) -> None:
    """A zero B of one half leaves the other half as it was, and the first half without any change."""
    half = qwen3.targets[f"{EXPERTS}.gate_up_proj"].out_features // 2
    for part, rows in (("gate", slice(half)), ("up", slice(half, None))):
        writer = AdapterWriter(qwen3).per_expert(EXPERTS)
        for name, tensor in writer.tensors.items():
            if f"{part}_proj.lora_B" in name:
                tensor.zero_()
        writer.expected_delta(f"{EXPERTS}.gate_up_proj")[:, rows] = 0
        check_layout(writer, tmp_path / part)


def test_missing_experts_and_unequal_ranks_are_padded(qwen3: Catalogue, tmp_path: Path) -> None:
    pattern = {r"experts\.4\.\w+": 5}
    writer = AdapterWriter(qwen3, rank_pattern=pattern).per_expert(EXPERTS, experts=[1, 4], ranks={4: 5})
    adapter = check_layout(writer, tmp_path)
    assert adapter.factors[f"{EXPERTS}.gate_up_proj"].rank == 10
    assert adapter.summaries[0].ranks == (3, 5)


def test_only_one_expert_changes(qwen3: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(qwen3).per_expert(EXPERTS)
    for name, tensor in writer.tensors.items():
        if "lora_B" in name and ".3." not in name:
            tensor.zero_()
    for delta in writer.deltas.values():
        delta[[0, 1, 2, 4, 5]] = 0
    check_layout(writer, tmp_path)


def test_numbered_last(tmp_path: Path) -> None:
    adapter = check_layout(AdapterWriter(catalogue_of("gpt_oss")).numbered_last(EXPERTS), tmp_path)
    assert set(layouts_of(adapter).values()) == {"G"}


@pytest.mark.parametrize("parts", [("gate", "up", "down"), ("gate_up", "down"), ("up",)])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_stacked(model_type: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    adapter = check_layout(AdapterWriter(catalogue_of(model_type)).stacked(EXPERTS, parts=parts), tmp_path)
    assert set(layouts_of(adapter).values()) == {"S"}


def test_shared_outer(qwen3: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(qwen3).stacked(
        EXPERTS, shared_a=("gate", "up"), shared_b=("down",), leaves={"gate": "w1", "up": "w3", "down": "w2"}
    )
    adapter = check_layout(writer, tmp_path)
    up, down = adapter.factors[f"{EXPERTS}.gate_up_proj"], adapter.factors[f"{EXPERTS}.down_proj"]
    experts = qwen3.targets[f"{EXPERTS}.down_proj"].num_experts
    assert (up.a.shape[0], up.b.shape[0]) == (1, experts)
    assert (down.a.shape[0], down.b.shape[0]) == (experts, 1)
    assert set(layouts_of(adapter).values()) == {"T"}


def test_fully_shared(qwen3: Catalogue, tmp_path: Path) -> None:
    shared = ("gate_up", "down")
    adapter = check_layout(
        AdapterWriter(qwen3).stacked(EXPERTS, parts=shared, shared_a=shared, shared_b=shared), tmp_path
    )
    assert adapter.factors[f"{EXPERTS}.down_proj"].b.shape[0] == 1


def test_shared_beside_unshared_is_expanded(qwen3: Catalogue, tmp_path: Path) -> None:
    adapter = check_layout(AdapterWriter(qwen3).stacked(EXPERTS, shared_a=("gate",), shared_b=("up",)), tmp_path)
    assert adapter.factors[f"{EXPERTS}.gate_up_proj"].a.shape[0] == 6


def test_empty_placeholders_are_skipped(qwen3: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(qwen3).stacked(
        EXPERTS, parts=("gate_up", "down"), leaves={"gate_up": "gate_up_proj", "down": "w2"}
    )
    writer.tensors[f"{EXPERTS}.w3.lora_A.weight"] = torch.empty(0)
    writer.tensors[f"{EXPERTS}.w3.lora_B.weight"] = torch.empty(0)
    assert "placeholder" in " ".join(check_layout(writer, tmp_path).notes)


def test_shared_and_routed_experts_stay_apart(tmp_path: Path) -> None:
    catalogue = catalogue_of("qwen2_moe")
    shared = [f"model.layers.1.mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")]
    check_layout(AdapterWriter(catalogue).dense(*shared), tmp_path / "shared")
    check_layout(AdapterWriter(catalogue).per_expert(EXPERTS), tmp_path / "routed")
    check_layout(
        AdapterWriter(catalogue).dense(*shared, "model.layers.0.mlp.up_proj").per_expert(EXPERTS), tmp_path / "both"
    )


def test_experts_without_a_gate(tmp_path: Path) -> None:
    catalogue = catalogue_of("nemotron_h")
    experts = "model.layers.1.mixer.experts"
    check_layout(AdapterWriter(catalogue).per_expert(experts, parts=("up", "down")), tmp_path / "per_expert")
    check_layout(AdapterWriter(catalogue).stacked(experts, parts=("up", "down")), tmp_path / "stacked")
    check_layout(AdapterWriter(catalogue).wrapped(experts, parameters=("up_proj", "down_proj")), tmp_path / "wrapped")


def test_experts_outside_an_mlp_module(tmp_path: Path) -> None:
    writer = AdapterWriter(catalogue_of("gemma4_text"))
    check_layout(writer.per_expert("model.layers.1.experts").dense("model.layers.1.router.proj"), tmp_path)


def test_experts_as_separate_linear_layers(tmp_path: Path) -> None:
    """A model whose experts are modules of their own takes per-expert factors one by one."""
    fused = catalogue_of("qwen3_moe")
    shapes = {"gate": (24, 32), "up": (24, 32), "down": (32, 24)}
    separate = {
        name: Target(name=name, kind=TargetKind.LINEAR, in_features=into, out_features=out, shape=(out, into))
        for part, (out, into) in shapes.items()
        for expert in range(2)
        if (name := f"{EXPERTS}.{expert}.{part}_proj")
    }
    writer = AdapterWriter(replace(fused, targets=separate)).dense(*separate)
    adapter = check_layout(writer, tmp_path / "a")
    assert set(adapter.factors) == set(separate)
    renamed = AdapterWriter(writer.catalogue).dense(
        f"{EXPERTS}.1.gate_proj", module="model.language_model.layers.1.mlp.experts.1.w1"
    )
    check_layout(renamed, tmp_path / "b")
