"""Adapters that must not load: nothing is dropped in silence. Also tensors stored in full, and descriptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapter_writers import PREFIX, AdapterWriter, catalogue_of, check_adapter, write_adapter
from moelora.adapters.base import Adapter, Catalogue
from moelora.adapters.describe import describe
from moelora.adapters.loader import load_adapter
from moelora.adapters.names import Resolver
from moelora.errors import AdapterError
from moelora.models.catalogue import build_catalogue
from tiny_models import make_model

LAYER = "model.layers.0"
Q = f"{LAYER}.self_attn.q_proj"
Q1 = "model.layers.1.self_attn.q_proj"
EXPERTS = f"{LAYER}.mlp.experts"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def catalogue() -> Catalogue:
    return catalogue_of("qwen3_moe")


def load(folder: Path, catalogue: Catalogue, **options: Any) -> Adapter:
    return load_adapter(folder, name="a", catalogue=catalogue, dtype=torch.float32, **options)


def refusal(folder: Path, catalogue: Catalogue, **options: Any) -> str:
    """The message, checked to name the folder, and to be that of a check without memory for the values."""
    with pytest.raises(AdapterError) as caught:
        load(folder, catalogue, **options)
    with pytest.raises(AdapterError) as checked:
        check_adapter(folder, name="a", catalogue=catalogue, dtype=torch.float32, **options)
    assert str(caught.value) == str(checked.value)
    assert str(caught.value).startswith(str(folder))
    return str(caught.value)


def good_tensors(catalogue: Catalogue) -> Tensors:
    writer = AdapterWriter(catalogue, r=4, alpha=8).dense(Q, Q1)
    return {PREFIX + name: tensor for name, tensor in writer.tensors.items()}


def key(module: str, factor: str) -> str:
    return f"{PREFIX}{module}.lora_{factor}.weight"


def test_the_unbroken_adapter_loads(catalogue: Catalogue, tmp_path: Path) -> None:
    assert set(load(write_adapter(tmp_path, good_tensors(catalogue)), catalogue).factors) == {Q, Q1}


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if old in name:
                tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def both(module: str, a: tuple[int, ...], b: tuple[int, ...]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({key(module, "A"): torch.ones(a), key(module, "B"): torch.ones(b)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop(key(Q1, "B")), [Q1, "lora_A without lora_B"]),
        (drop(key(Q1, "A")), [Q1, "lora_B without lora_A"]),
        (put(key(Q, "B"), 64, 3), [Q, "lora_A has rank 4", "lora_B has rank 3"]),
        (put(key(Q, "B"), 32, 4), [key(Q, "B"), "32 outputs", "has 64"]),
        (put(key(Q, "A"), 4, 128), [key(Q, "A"), "128 inputs", "has 32"]),
        (put(key(Q, "A"), 4, 2, 16), [key(Q, "A"), "2 dimensions"]),
        (rename("q_proj", "wqkv_proj"), ["0 of 4 adapter tensors used", "wqkv_proj", "model.layers.0"]),
        (rename("layers.1.", "layers.7."), ["only 2 of 4", "layers.7", "2 layers (0..1)"]),
        (put(f"{PREFIX}{Q}.lora_magnitude_vector", 64), ["lora_magnitude_vector"]),
        (put(f"{PREFIX}{Q}.lora_B.bias", 64), ["lora_B.bias"]),
        (put(f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta", 3, 32), ["trainable_tokens_delta"]),
        (put(f"{PREFIX}{Q}.lora_diag", 4), ["lora_diag"]),
        (put(f"{PREFIX}{Q}.base_layer.bias", 64), [f"{Q}.base_layer.bias"]),
        (put(f"{PREFIX}{LAYER}.mlp.gate.e_score_correction_bias", 6), ["e_score_correction_bias"]),
        (put(f"{PREFIX}score.weight", 2, 32), ["score.weight"]),
        (put("unused", 2), ["only 4 of 5", "'unused'"]),
        (put(f"{PREFIX}{EXPERTS}.down_proj", 6, 32, 24), [f"{EXPERTS}.down_proj", "routed experts as a whole"]),
        (put(f"{PREFIX}{Q}.weight", 64, 32), [Q, "given twice"]),
        (put(f"{PREFIX}lm_head.weight", 133, 32), ["lm_head.weight", "[133, 32]", "[128, 32]", "vocabulary"]),
        (put(f"{PREFIX}model.embed_tokens.base_layer.weight", 133, 32), ["[133, 32]", "[128, 32]"]),
        (both("model.norm", (4, 32), (32, 4)), ["model.norm", "is a norm"]),
        (both("model.embed_tokens", (4, 32), (128, 4)), ["model.embed_tokens", "lora_embedding_A"]),
        (both(f"{EXPERTS}.6.down_proj", (4, 24), (32, 4)), ["expert 6 does not exist", "(0..5)"]),
        (both(f"{EXPERTS}.0.gate_proj", (4, 32), (48, 4)), [f"{EXPERTS}.0.gate_proj", "48 outputs", "has 24"]),
        (both(f"{EXPERTS}.0.gate_up_down_proj", (4, 32), (48, 4)), ["gate_up_down_proj"]),
        (both(f"{EXPERTS}.down_proj", (24, 24), (32, 24)), [f"{EXPERTS}.down_proj", "3 dimensions"]),
        (both(f"{EXPERTS}.down_proj", (5, 4, 24), (5, 32, 4)), ["5 experts", "has 6"]),
        (both(EXPERTS, (23, 24), (32, 23)), [EXPERTS, "multiple of the base model's 6 experts"]),
        (both(EXPERTS, (24, 24), (32, 18)), [EXPERTS, "24 rows", "18 columns"]),
        (both(EXPERTS, (24, 7), (9, 24)), [EXPERTS, "fits neither"]),
        (both(f"{EXPERTS}.base_layer", (24, 32), (48, 24)), [EXPERTS, "missing though a wrapper inside has them"]),
        (both(f"{LAYER}.block_sparse_moe.gate", (4, 32), (6, 4)), []),
        (both(f"{LAYER}.self_attn.qkv_proj", (4, 32), (100, 4)), ["qkv_proj", "100 outputs", "have 128"]),
    ],
)  # fmt: skip
def test_tensors(catalogue: Catalogue, tmp_path: Path, change: Callable[[Tensors], None], said: list[str]) -> None:
    tensors = good_tensors(catalogue)
    change(tensors)
    folder = write_adapter(tmp_path / "bad", tensors)
    if not said:  # another spelling of the router: loads
        load(folder, catalogue)
        return
    message = refusal(folder, catalogue)
    assert [part for part in said if part not in message] == []
    only_known_with_the_base = "base_layer.bias" in message or "which is not supported" in message
    assert only_known_with_the_base or said[0] in " ".join(describe(folder, catalogue).refusals)


def test_config_rank_against_tensors(catalogue: Catalogue, tmp_path: Path) -> None:
    message = refusal(write_adapter(tmp_path, good_tensors(catalogue), r=8), catalogue)
    assert Q in message
    assert "rank 4" in message
    assert "says 8" in message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_dora": True}, "use_dora=true"),
        ({"r": -4}, "r=-4"),
        ({"peft_type": "IA3"}, 'peft_type="IA3"'),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"bias": "lora_only"}, 'bias="lora_only"'),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens=[5, 6]"),
        ({"brand_new_option": 5}, "brand_new_option=5"),
    ],
)
def test_config_fields(catalogue: Catalogue, tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    folder = write_adapter(tmp_path, good_tensors(catalogue), **fields)
    assert said in refusal(folder, catalogue)
    for description in (describe(folder, catalogue), describe(folder)):
        assert said in " ".join(description.refusals)


def test_missing_alpha_and_config(catalogue: Catalogue, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, good_tensors(catalogue))
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    del config["lora_alpha"]
    path.write_text(json.dumps(config))
    assert "lora_alpha is missing" in refusal(folder, catalogue)
    path.unlink()
    assert "adapter_config.json not found" in refusal(folder, catalogue)


def test_a_null_field_of_a_newer_trainer_is_ignored(catalogue: Catalogue, tmp_path: Path) -> None:
    load(write_adapter(tmp_path, good_tensors(catalogue), brand_new_option=None, eva_config=None), catalogue)


def test_one_projection_in_two_layouts(catalogue: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(catalogue, r=4, alpha=8).per_expert(EXPERTS, parts=("down",))
    writer.wrapped(EXPERTS, parameters=("down_proj",))
    assert f"{EXPERTS}.down_proj is given twice" in refusal(writer.write(tmp_path), catalogue)


def test_one_module_in_two_spellings(catalogue: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(catalogue, r=4, alpha=8).dense(Q)
    writer.dense(Q, module=Q.replace("model.", "model.language_model."))
    assert "given twice" in refusal(writer.write(tmp_path / "a"), catalogue)
    twice = AdapterWriter(catalogue).per_expert(EXPERTS, experts=[1])
    twice.per_expert(EXPERTS, experts=[1], leaves={"gate": "w1", "up": "w3", "down": "w2"})
    assert "given twice" in refusal(twice.write(tmp_path / "b"), catalogue)


def test_same_factor_with_and_without_the_adapter_s_name(catalogue: Catalogue, tmp_path: Path) -> None:
    tensors = good_tensors(catalogue)
    tensors[key(Q, "A").replace(".weight", ".default.weight")] = torch.ones(4, 32)
    assert "are the same factor" in refusal(write_adapter(tmp_path, tensors), catalogue)


def test_wrapped_bias(tmp_path: Path) -> None:
    catalogue = catalogue_of("gpt_oss")
    writer = AdapterWriter(catalogue).wrapped(EXPERTS)
    writer.config["target_parameters"].append("experts.gate_up_proj_bias")
    assert "gate_up_proj_bias" in refusal(writer.write(tmp_path), catalogue)


def test_lone_wrapper_that_fits_both_parameters(tmp_path: Path) -> None:
    """2·I = H and A on either side: only target_parameters can tell."""
    catalogue = catalogue_of("qwen3_moe", moe_intermediate_size=32)
    tensors = {key(EXPERTS, "A"): torch.ones(24, 32), key(EXPERTS, "B"): torch.ones(32, 24)}
    load(write_adapter(tmp_path / "a", tensors), catalogue)  # gate_up is 64 wide: down alone fits
    catalogue = catalogue_of("gpt_oss", intermediate_size=16)
    tensors = {key(EXPERTS, "A"): torch.ones(16, 32), key(EXPERTS, "B"): torch.ones(16, 16)}
    load(write_adapter(tmp_path / "b", tensors), catalogue)


def test_ambiguous_aliases_are_no_aliases() -> None:
    """Two targets that an alias would confuse are only found by their exact names."""
    catalogue = catalogue_of("qwen3_moe")
    target = catalogue.targets[Q]
    other = replace(target, name=f"model.language_model.{Q.removeprefix('model.')}")
    resolver = Resolver(replace(catalogue, targets={Q: target, other.name: other}))
    assert resolver.target(Q) is target
    assert resolver.target(other.name) is other
    assert resolver.target(Q.removeprefix("model.")) is None


def test_unknown_b_layout(catalogue: Catalogue, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, good_tensors(catalogue))
    assert "grouped_by_expert" in refusal(folder, catalogue, lora_b_layout="grouped")


# Tensors stored in full.


def test_copies_of_the_base(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    catalogue = build_catalogue(model)
    base = dict(model.named_parameters())
    tensors = good_tensors(catalogue)
    name = f"{PREFIX}lm_head.base_layer.weight"
    tensors[name] = base["lm_head.weight"].detach().clone()
    folder = write_adapter(tmp_path / "same", tensors)
    assert "equals the base" in " ".join(load(folder, catalogue, base_weight=base.get).notes)
    assert "not compared" in " ".join(load(folder, catalogue).notes)
    tensors[name] = tensors[name] + 0.01
    folder = write_adapter(tmp_path / "other", tensors)
    assert name in refusal(folder, catalogue, base_weight=base.get)
    # A half-precision base: equal as far as the base can hold it.
    half = {key: value.to(torch.bfloat16) for key, value in base.items()}
    load(write_adapter(tmp_path / "half", {name: base["lm_head.weight"].detach().clone(), **good_tensors(catalogue)}),
         catalogue, base_weight=half.get)  # fmt: skip


def test_full_weights_replace(catalogue: Catalogue, tmp_path: Path) -> None:
    tensors = good_tensors(catalogue)
    whole = {"lm_head": (128, 32), "model.embed_tokens": (128, 32), f"{LAYER}.mlp.gate": (6, 32), "model.norm": (32,)}
    for name, shape in whole.items():
        tensors[f"{PREFIX}{name}.weight"] = torch.randn(shape)
    adapter = load(write_adapter(tmp_path, tensors, modules_to_save=["lm_head", "gate"]), catalogue)
    assert set(adapter.replacements) == set(whole)
    for name in whole:
        assert torch.equal(adapter.replacements[name], tensors[f"{PREFIX}{name}.weight"])
    assert {s.target for s in adapter.summaries if s.layout == "whole"} == set(whole)
    assert set(adapter.factors) == {Q, Q1}


def test_full_weights_that_equal_the_base_are_ignored(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    catalogue = build_catalogue(model)
    base = dict(model.named_parameters())
    tensors = good_tensors(catalogue)
    tensors[f"{PREFIX}model.embed_tokens.weight"] = base["model.embed_tokens.weight"].detach().clone()
    adapter = load(write_adapter(tmp_path, tensors), catalogue, base_weight=base.get)
    assert adapter.replacements == {}


def test_full_embedding_takes_a_tied_head_along_unless_it_was_trained_as_a_copy(tmp_path: Path) -> None:
    catalogue = catalogue_of("qwen3")
    tensors = {f"{PREFIX}model.embed_tokens.weight": torch.randn(128, 32)}
    adapter = load(write_adapter(tmp_path / "a", tensors), catalogue)
    assert set(adapter.replacements) == {"model.embed_tokens", "lm_head"}
    adapter = load(write_adapter(tmp_path / "b", tensors, modules_to_save=["embed_tokens"]), catalogue)
    assert set(adapter.replacements) == {"model.embed_tokens"}
    tensors[f"{PREFIX}lm_head.weight"] = torch.randn(128, 32)
    adapter = load(write_adapter(tmp_path / "c", tensors), catalogue)
    assert torch.equal(adapter.replacements["lm_head"], tensors[f"{PREFIX}lm_head.weight"])


# Descriptions.


def test_description_with_and_without_a_model(catalogue: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(catalogue, rslora=True, rank_pattern={"lm_head": 3})
    writer.dense(Q, "lm_head").embedding().per_expert(EXPERTS).wrapped("model.layers.1.mlp.experts")
    folder = writer.write(tmp_path)
    adapter = load(folder, catalogue)
    described = describe(folder, catalogue, dtype=torch.float32)
    assert described.refusals == ()
    assert described.layouts == ("D", "E", "P", "W")
    assert described.bytes_per_slot == adapter.nbytes
    assert {target.target for target in described.targets} == set(adapter.factors)
    assert described.max_rank == 3
    assert described.dtypes == ("F32",)
    alone = describe(folder)
    assert alone.refusals == ()
    assert alone.layouts == described.layouts
    assert f"{EXPERTS}.*.gate_proj" in {target.target for target in alone.targets}
    assert {scale for target in alone.targets for scale in target.scales} == {writer.scale(3)}
    assert alone.num_tensors == len(load_file(folder / "adapter_model.safetensors"))


def test_description_without_a_model_names_what_it_can(tmp_path: Path) -> None:
    for i, (parameters, label) in enumerate(
        [(("gate_up_proj",), f"{EXPERTS}.gate_up_proj"), (("down_proj",), f"{EXPERTS}.down_proj")]
    ):
        folder = AdapterWriter(catalogue_of("gpt_oss")).wrapped(EXPERTS, parameters=parameters).write(tmp_path / str(i))
        (target,) = describe(folder).targets
        assert (target.target, target.layout, target.ranks) == (label, "W", (3,))
    writer = AdapterWriter(catalogue_of("qwen3_moe"), lora_B_layout="grouped_by_expert").wrapped(EXPERTS, grouped=True)
    assert describe(writer.write(tmp_path / "u")).layouts == ("U",)
    writer = AdapterWriter(catalogue_of("qwen3_moe")).stacked(EXPERTS, shared_a=("gate",))
    assert describe(writer.write(tmp_path / "t")).layouts == ("S", "T")


def test_description_of_what_cannot_be_read(catalogue: Catalogue, tmp_path: Path) -> None:
    assert "no such folder" in describe(tmp_path / "missing").refusals[0]
    (tmp_path / "empty").mkdir()
    assert len(describe(tmp_path / "empty", catalogue).refusals) == 2
    tensors = good_tensors(catalogue)
    tensors[key(Q, "A")][0, 0] = float("nan")
    folder = write_adapter(tmp_path / "nan", tensors)
    assert key(Q, "A") in describe(folder).refusals[0]
    assert describe(folder, catalogue, check_values=False).refusals == ()
    mismatched = write_adapter(tmp_path / "rank", good_tensors(catalogue), r=8)
    assert len(describe(mismatched).refusals) == 2
