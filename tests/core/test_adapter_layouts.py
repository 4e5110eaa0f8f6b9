"""Every on-disk layout against deltas worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_writers import PREFIX, AdapterWriter, catalogue_of, delta_of
from moelora.adapters.base import Adapter, Catalogue, Target, TargetKind
from moelora.adapters.layouts.base import put_scaled
from moelora.adapters.loader import load_adapter
from moelora.errors import AdapterError

EXPERTS = "model.layers.1.mlp.experts"
Q_PROJ = "model.layers.0.self_attn.q_proj"


def check(writer: AdapterWriter, folder: Path, **options: object) -> Adapter:
    """Loads what the writer wrote and compares every target's delta."""
    adapter = load_adapter(writer.write(folder), name="a", catalogue=writer.catalogue, dtype=torch.float32, **options)  # type: ignore[arg-type]
    assert set(adapter.factors) == set(writer.deltas)
    for name, factors in adapter.factors.items():
        delta = delta_of(factors, writer.catalogue.targets[name])
        torch.testing.assert_close(delta, writer.expected_delta(name), rtol=1e-5, atol=1e-6)
        assert factors.a.is_contiguous()
        assert factors.b.is_contiguous()
    return adapter


def layouts_of(adapter: Adapter) -> dict[str, str]:
    return {summary.target: summary.layout for summary in adapter.summaries}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors hold NaN, so that an element which no layout writes shows."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() and tensor.device.type == "cpu" else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def qwen3() -> Catalogue:
    return catalogue_of("qwen3_moe")


@pytest.mark.parametrize("rslora", [False, True])
def test_dense_router_head_and_embedding(qwen3: Catalogue, tmp_path: Path, rslora: bool) -> None:
    writer = AdapterWriter(qwen3, rslora=rslora)
    writer.dense(Q_PROJ, "model.layers.1.mlp.gate", "lm_head").embedding()
    adapter = check(writer, tmp_path)
    assert layouts_of(adapter)["model.embed_tokens"] == "E"
    assert adapter.max_rank == 3


def test_router_as_parameter_takes_patterns_of_the_parameter(qwen3: Catalogue, tmp_path: Path) -> None:
    gate = "model.layers.1.mlp.gate"
    writer = AdapterWriter(qwen3, target_parameters=["gate.weight"], alpha_pattern={"gate": 99, "gate.weight": 12})
    writer.alpha = 12
    writer.dense(gate)
    writer.alpha = 6
    adapter = check(writer, tmp_path)
    assert layouts_of(adapter)[gate] == "W2"


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "ernie4_5_moe"])
@pytest.mark.parametrize("parts", [("gate", "up", "down"), ("gate",), ("up",), ("down",), ("gate", "up")])
def test_per_expert(model_type: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    adapter = check(AdapterWriter(catalogue_of(model_type)).per_expert(EXPERTS, parts=parts), tmp_path)
    fused = adapter.factors.get(f"{EXPERTS}.gate_up_proj")
    assert fused is None or fused.rank == 3 * sum(part in parts for part in ("gate", "up"))


def test_per_expert_with_rslora_scales_gate_and_up_alike(qwen3: Catalogue, tmp_path: Path) -> None:
    check(AdapterWriter(qwen3, rslora=True).per_expert(EXPERTS), tmp_path)


def test_gate_and_up_keep_their_own_factors(qwen3: Catalogue, tmp_path: Path) -> None:
    """A zero B of one half leaves the other half as it was, and the first half without any change."""
    half = qwen3.targets[f"{EXPERTS}.gate_up_proj"].out_features // 2
    for part, rows in (("gate", slice(half)), ("up", slice(half, None))):
        writer = AdapterWriter(qwen3).per_expert(EXPERTS)
        for name, tensor in writer.tensors.items():
            if f"{part}_proj.lora_B" in name:
                tensor.zero_()
        writer.expected_delta(f"{EXPERTS}.gate_up_proj")[:, rows] = 0
        check(writer, tmp_path / part)


def test_missing_experts_and_unequal_ranks_are_padded(qwen3: Catalogue, tmp_path: Path) -> None:
    pattern = {r"experts\.4\.\w+": 5}
    writer = AdapterWriter(qwen3, rank_pattern=pattern).per_expert(EXPERTS, experts=[1, 4], ranks={4: 5})
    adapter = check(writer, tmp_path)
    assert adapter.factors[f"{EXPERTS}.gate_up_proj"].rank == 10
    assert adapter.summaries[0].ranks == (3, 5)


def test_only_one_expert_changes(qwen3: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(qwen3).per_expert(EXPERTS)
    for name, tensor in writer.tensors.items():
        if "lora_B" in name and ".3." not in name:
            tensor.zero_()
    for delta in writer.deltas.values():
        delta[[0, 1, 2, 4, 5]] = 0
    check(writer, tmp_path)


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
    check(writer, tmp_path)


def test_names_after_an_extra_module(qwen3: Catalogue, tmp_path: Path) -> None:
    check(AdapterWriter(qwen3).per_expert(EXPERTS, module="model.layers.1.mlp.original_moe.experts"), tmp_path)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_language_model_level_in_names(qwen3: Catalogue, tmp_path: Path, prefix: str) -> None:
    writer = AdapterWriter(qwen3)
    writer.per_expert(EXPERTS, module=f"{prefix}layers.1.mlp.experts")
    writer.dense(Q_PROJ, module=f"{prefix}layers.0.self_attn.q_proj")
    check(writer, tmp_path)


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


def test_numbered_last(tmp_path: Path) -> None:
    adapter = check(AdapterWriter(catalogue_of("gpt_oss")).numbered_last(EXPERTS), tmp_path)
    assert set(layouts_of(adapter).values()) == {"G"}


WRAPPED = [("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",)]


@pytest.mark.parametrize("parameters", WRAPPED)
@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_wrapped_parameters(model_type: str, swapped: bool, parameters: tuple[str, ...], tmp_path: Path) -> None:
    """Both orientations in either kind of storage: shapes tell, whatever the version says."""
    check(AdapterWriter(catalogue_of(model_type)).wrapped(EXPERTS, parameters=parameters, swapped=swapped), tmp_path)


def test_wrapped_under_another_module_name(tmp_path: Path) -> None:
    writer = AdapterWriter(catalogue_of("mixtral"))
    check(writer.wrapped(EXPERTS, module="model.layers.1.block_sparse_moe.experts"), tmp_path)


@pytest.mark.parametrize("override", [False, True])
def test_columns_grouped_by_expert(qwen3: Catalogue, tmp_path: Path, override: bool) -> None:
    writer = AdapterWriter(qwen3).wrapped(EXPERTS, grouped=True)
    if override:
        adapter = check(writer, tmp_path, lora_b_layout="grouped_by_expert")
    else:
        writer.config["lora_B_layout"] = "grouped_by_expert"
        adapter = check(writer, tmp_path)
    assert set(layouts_of(adapter).values()) == {"U"}


def test_override_wins_over_the_config(qwen3: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(qwen3, lora_B_layout="grouped_by_expert").wrapped(EXPERTS)
    check(writer, tmp_path, lora_b_layout="rank_major")


def test_target_parameters_without_the_module(qwen3: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(qwen3).wrapped(EXPERTS, parameters=("down_proj",))
    writer.config["target_parameters"] = ["down_proj"]
    check(writer, tmp_path)


def test_without_target_parameters_the_shape_decides(qwen3: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(qwen3).wrapped(EXPERTS, parameters=("down_proj",))
    writer.config["target_parameters"] = None
    check(writer, tmp_path)


# Square weights: hidden = 2 × width for gate_up, hidden = width for down. The shapes cannot tell.
SQUARE = [("gate_up_proj", {"moe_intermediate_size": 16}), ("down_proj", {"moe_intermediate_size": 32})]


@pytest.mark.parametrize(("parameter", "sizes"), SQUARE)
@pytest.mark.parametrize(
    ("version", "swapped"),
    [("0.17.0", False), ("0.18.1", False), ("0.19.0", False), ("0.19.1", True), ("0.21.2", True)],
)
def test_square_weights_follow_the_version(
    parameter: str, sizes: dict[str, int], version: str, swapped: bool, tmp_path: Path
) -> None:
    writer = AdapterWriter(catalogue_of("qwen3_moe", **sizes), peft_version=version)
    check(writer.wrapped(EXPERTS, parameters=(parameter,), swapped=swapped), tmp_path)


@pytest.mark.parametrize(("version", "swapped"), [("0.18.1", False), ("0.19.0", True), ("0.19.1", False)])
def test_square_transposed_weights_follow_the_version(version: str, swapped: bool, tmp_path: Path) -> None:
    catalogue = catalogue_of("gpt_oss", intermediate_size=32)
    writer = AdapterWriter(catalogue, peft_version=version)
    check(writer.wrapped(EXPERTS, parameters=("down_proj",), swapped=swapped), tmp_path)


def test_one_oblong_weight_settles_the_square_ones(tmp_path: Path) -> None:
    """As OLMoE has them. The version would say otherwise: shape goes first."""
    catalogue = catalogue_of("qwen3_moe", moe_intermediate_size=16)
    check(AdapterWriter(catalogue, peft_version="0.21.2").wrapped(EXPERTS, swapped=False), tmp_path)


def test_square_weights_without_a_version_are_refused(tmp_path: Path) -> None:
    catalogue = catalogue_of("qwen3_moe", moe_intermediate_size=32)
    writer = AdapterWriter(catalogue, peft_version=None).wrapped(EXPERTS, parameters=("down_proj",), swapped=False)
    with pytest.raises(AdapterError, match="peft_version"):
        check(writer, tmp_path)
    check(writer, tmp_path, peft_version="0.18.0")


@pytest.mark.parametrize("parts", [("gate", "up", "down"), ("gate_up", "down"), ("up",)])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_stacked(model_type: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    adapter = check(AdapterWriter(catalogue_of(model_type)).stacked(EXPERTS, parts=parts), tmp_path)
    assert set(layouts_of(adapter).values()) == {"S"}


def test_shared_outer(qwen3: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(qwen3).stacked(
        EXPERTS, shared_a=("gate", "up"), shared_b=("down",), leaves={"gate": "w1", "up": "w3", "down": "w2"}
    )
    adapter = check(writer, tmp_path)
    up, down = adapter.factors[f"{EXPERTS}.gate_up_proj"], adapter.factors[f"{EXPERTS}.down_proj"]
    experts = qwen3.targets[f"{EXPERTS}.down_proj"].num_experts
    assert (up.a.shape[0], up.b.shape[0]) == (1, experts)
    assert (down.a.shape[0], down.b.shape[0]) == (experts, 1)
    assert set(layouts_of(adapter).values()) == {"T"}


def test_fully_shared(qwen3: Catalogue, tmp_path: Path) -> None:
    shared = ("gate_up", "down")
    adapter = check(AdapterWriter(qwen3).stacked(EXPERTS, parts=shared, shared_a=shared, shared_b=shared), tmp_path)
    assert adapter.factors[f"{EXPERTS}.down_proj"].b.shape[0] == 1


def test_shared_beside_unshared_is_expanded(qwen3: Catalogue, tmp_path: Path) -> None:
    adapter = check(AdapterWriter(qwen3).stacked(EXPERTS, shared_a=("gate",), shared_b=("up",)), tmp_path)
    assert adapter.factors[f"{EXPERTS}.gate_up_proj"].a.shape[0] == 6


def test_empty_placeholders_are_skipped(qwen3: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(qwen3).stacked(
        EXPERTS, parts=("gate_up", "down"), leaves={"gate_up": "gate_up_proj", "down": "w2"}
    )
    writer.tensors[f"{EXPERTS}.w3.lora_A.weight"] = torch.empty(0)
    writer.tensors[f"{EXPERTS}.w3.lora_B.weight"] = torch.empty(0)
    assert "placeholder" in " ".join(check(writer, tmp_path).notes)


def test_fused_attention_and_mlp(tmp_path: Path) -> None:
    catalogue = catalogue_of("llama")
    writer = AdapterWriter(catalogue)
    writer.fused(
        "model.layers.0.self_attn.qkv_proj", [f"model.layers.0.self_attn.{leaf}_proj" for leaf in ("q", "k", "v")]
    )
    writer.fused("model.layers.1.mlp.gate_up_proj", [f"model.layers.1.mlp.{leaf}_proj" for leaf in ("gate", "up")])
    assert set(layouts_of(check(writer, tmp_path)).values()) == {"F"}


@pytest.mark.parametrize("parts", [("in_proj_q", "in_proj_k", "in_proj_v"), ("in_proj_v",), ("in_proj_k",)])
def test_pieces_of_a_fused_projection(parts: tuple[str, ...], tmp_path: Path) -> None:
    target = "model.layers.0.linear_attn.in_proj_qkv"
    writer = AdapterWriter(catalogue_of("qwen3_5_moe_text"))
    check(writer.split(target, {"in_proj_q": 16, "in_proj_k": 16, "in_proj_v": 32}, parts), tmp_path)


def test_fused_beyond_the_model_s_own_fusion(tmp_path: Path) -> None:
    writer = AdapterWriter(catalogue_of("qwen3_5_moe_text"))
    layer = "model.layers.0.linear_attn"
    writer.fused(f"{layer}.in_proj_qkvz", [f"{layer}.in_proj_qkv", f"{layer}.in_proj_z"])
    check(writer, tmp_path)


def test_tinker_names(tmp_path: Path) -> None:
    catalogue = catalogue_of("gpt_oss")
    writer = AdapterWriter(catalogue)
    writer.dense(Q_PROJ, module="model.layers.0.attn.q_proj")
    writer.dense("lm_head", module="model.unembed_tokens")
    writer.stacked(
        EXPERTS, leaves={"gate": "w1", "up": "w3", "down": "w2"}, shared_a=("gate", "up"), shared_b=("down",)
    )
    check(writer, tmp_path)


def test_granitemoe_names_of_transformers_4(tmp_path: Path) -> None:
    catalogue = catalogue_of("granitemoe")
    block = "model.layers.0.block_sparse_moe"
    writer = AdapterWriter(catalogue)
    writer.wrapped(f"{block}.experts", parameters=("gate_up_proj",), module=f"{block}.input_linear", swapped=False)
    writer.wrapped(f"{block}.experts", parameters=("down_proj",), module=f"{block}.output_linear", swapped=False)
    writer.config["target_parameters"] = ["input_linear.weight", "output_linear.weight"]
    writer.dense(f"{block}.router", module=f"{block}.router.layer")
    check(writer, tmp_path)


def test_shared_and_routed_experts_stay_apart(tmp_path: Path) -> None:
    catalogue = catalogue_of("qwen2_moe")
    shared = [f"model.layers.1.mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")]
    check(AdapterWriter(catalogue).dense(*shared), tmp_path / "shared")
    check(AdapterWriter(catalogue).per_expert(EXPERTS), tmp_path / "routed")
    check(AdapterWriter(catalogue).dense(*shared, "model.layers.0.mlp.up_proj").per_expert(EXPERTS), tmp_path / "both")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scale_is_folded_in_fp32_whatever_is_stored(qwen3: Catalogue, tmp_path: Path, dtype: torch.dtype) -> None:
    writer = (
        AdapterWriter(qwen3, dtype=dtype, alpha=7, rslora=True)
        .dense(Q_PROJ)
        .per_expert(EXPERTS)
        .wrapped("model.layers.0.mlp.experts")
    )
    check(writer, tmp_path)
    adapter = load_adapter(tmp_path, name="a", catalogue=qwen3, dtype=torch.bfloat16)
    stored = writer.tensors[f"{Q_PROJ}.lora_B.weight"].float()
    assert torch.equal(adapter.factors[Q_PROJ].b, (stored * (7 / 3**0.5)).to(torch.bfloat16))


def test_loading_again_gives_the_same_and_leaves_the_file_alone(qwen3: Catalogue, tmp_path: Path) -> None:
    folder = AdapterWriter(qwen3).dense(Q_PROJ).per_expert(EXPERTS).write(tmp_path)
    before = (folder / "adapter_model.safetensors").read_bytes()
    first = load_adapter(folder, name="a", catalogue=qwen3, dtype=torch.float32)
    for _ in range(4):
        again = load_adapter(folder, name="a", catalogue=qwen3, dtype=torch.float32)
        assert all(torch.equal(first.factors[name].b, factors.b) for name, factors in again.factors.items())
    for factors in first.factors.values():  # what callers do with the factors never reaches the file
        factors.a.fill_(9)
    assert (folder / "adapter_model.safetensors").read_bytes() == before


def test_square_llama4_weights_are_stored_transposed_but_not_flagged(tmp_path: Path) -> None:
    catalogue = catalogue_of("llama4_text", intermediate_size=32)
    experts = "model.layers.1.feed_forward.experts"
    for version, swapped in (("0.19.0", False), ("0.21.2", True)):
        writer = AdapterWriter(catalogue, peft_version=version)
        check(writer.wrapped(experts, parameters=("down_proj",), swapped=swapped), tmp_path / version)


def test_experts_without_a_gate(tmp_path: Path) -> None:
    catalogue = catalogue_of("nemotron_h")
    experts = "model.layers.1.mixer.experts"
    check(AdapterWriter(catalogue).per_expert(experts, parts=("up", "down")), tmp_path / "per_expert")
    check(AdapterWriter(catalogue).stacked(experts, parts=("up", "down")), tmp_path / "stacked")
    check(AdapterWriter(catalogue).wrapped(experts, parameters=("up_proj", "down_proj")), tmp_path / "wrapped")


def test_experts_outside_an_mlp_module(tmp_path: Path) -> None:
    writer = AdapterWriter(catalogue_of("gemma4_text"))
    check(writer.per_expert("model.layers.1.experts").dense("model.layers.1.router.proj"), tmp_path)


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
    adapter = check(writer, tmp_path / "a")
    assert set(adapter.factors) == set(separate)
    renamed = AdapterWriter(writer.catalogue).dense(
        f"{EXPERTS}.1.gate_proj", module="model.language_model.layers.1.mlp.experts.1.w1"
    )
    check(renamed, tmp_path / "b")


class TestScaling:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_every_16_bit_number_is_scaled_in_fp32_and_rounded_once(self, dtype: torch.dtype) -> None:
        values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
        for scale in (2.0, 1 / 3, 0.7071067811865476, 1.7e-3, 123.456, -1.0):
            rows = torch.zeros(2, 65536, dtype=dtype)[1:, :]
            put_scaled(rows, values.unsqueeze(0), scale)
            expected = (values.float() * torch.tensor(scale, dtype=torch.float32)).to(dtype)
            torch.testing.assert_close(rows[0], expected, atol=0, rtol=0, equal_nan=True)

    def test_into_another_dtype(self) -> None:
        values = torch.randn(50, generator=torch.Generator().manual_seed(1))
        rows = torch.zeros(50, dtype=torch.bfloat16)
        put_scaled(rows, values, 1 / 3)
        assert torch.equal(rows, (values * (1 / 3)).to(torch.bfloat16))


def test_threads_change_nothing(qwen3: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = AdapterWriter(qwen3)
    writer.dense(Q_PROJ, "lm_head").embedding()
    for layer in (0, 1):
        writer.per_expert(f"model.layers.{layer}.mlp.experts")
    folder = writer.write(tmp_path)
    alone = load_adapter(folder, name="a", catalogue=qwen3, dtype=torch.bfloat16)
    monkeypatch.setattr("moelora.adapters.values._PARALLEL_NUMEL", 0)
    monkeypatch.setattr("moelora.adapters.values.cpu_count", lambda: 4)
    before = torch.get_num_threads()
    together = load_adapter(folder, name="a", catalogue=qwen3, dtype=torch.bfloat16)
    assert torch.get_num_threads() == before
    assert list(together.factors) == list(alone.factors)
    for name, factors in together.factors.items():
        assert torch.equal(factors.a, alone.factors[name].a)
        assert torch.equal(factors.b, alone.factors[name].b)
