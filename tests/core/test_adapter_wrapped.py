"""Layouts of wrapped expert parameters, in either orientation, against deltas worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapter_writers import AdapterWriter, catalogue_of
from core.layout_checks import EXPERTS, check_layout, layouts_of
from moelora.adapters.base import Catalogue
from moelora.errors import AdapterError

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WRAPPED = [("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",)]

# Square weights: hidden = 2 × width for gate_up, hidden = width for down. The shapes cannot tell.
SQUARE = [("gate_up_proj", {"moe_intermediate_size": 16}), ("down_proj", {"moe_intermediate_size": 32})]


@pytest.mark.parametrize("parameters", WRAPPED)
@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_wrapped_parameters(model_type: str, swapped: bool, parameters: tuple[str, ...], tmp_path: Path) -> None:
    """Both orientations in either kind of storage: shapes tell, whatever the version says."""
    check_layout(
        AdapterWriter(catalogue_of(model_type)).wrapped(EXPERTS, parameters=parameters, swapped=swapped), tmp_path
    )


def test_wrapped_under_another_module_name(tmp_path: Path) -> None:
    writer = AdapterWriter(catalogue_of("mixtral"))
    check_layout(writer.wrapped(EXPERTS, module="model.layers.1.block_sparse_moe.experts"), tmp_path)


@pytest.mark.parametrize("override", [False, True])
def test_columns_grouped_by_expert(qwen3: Catalogue, tmp_path: Path, override: bool) -> None:
    writer = AdapterWriter(qwen3).wrapped(EXPERTS, grouped=True)
    if override:
        adapter = check_layout(writer, tmp_path, lora_b_layout="grouped_by_expert")
    else:
        writer.config["lora_B_layout"] = "grouped_by_expert"
        adapter = check_layout(writer, tmp_path)
    assert set(layouts_of(adapter).values()) == {"U"}


def test_override_wins_over_the_config(qwen3: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(qwen3, lora_B_layout="grouped_by_expert").wrapped(EXPERTS)
    check_layout(writer, tmp_path, lora_b_layout="rank_major")


def test_target_parameters_without_the_module(qwen3: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(qwen3).wrapped(EXPERTS, parameters=("down_proj",))
    writer.config["target_parameters"] = ["down_proj"]
    check_layout(writer, tmp_path)


def test_without_target_parameters_the_shape_decides(qwen3: Catalogue, tmp_path: Path) -> None:
    writer = AdapterWriter(qwen3).wrapped(EXPERTS, parameters=("down_proj",))
    writer.config["target_parameters"] = None
    check_layout(writer, tmp_path)


@pytest.mark.parametrize(("parameter", "sizes"), SQUARE)
@pytest.mark.parametrize(
    ("version", "swapped"),
    [("0.17.0", False), ("0.18.1", False), ("0.19.0", False), ("0.19.1", True), ("0.21.2", True)],
)
def test_square_weights_follow_the_version(
    parameter: str, sizes: dict[str, int], version: str, swapped: bool, tmp_path: Path
) -> None:
    writer = AdapterWriter(catalogue_of("qwen3_moe", **sizes), peft_version=version)
    check_layout(writer.wrapped(EXPERTS, parameters=(parameter,), swapped=swapped), tmp_path)


@pytest.mark.parametrize(("version", "swapped"), [("0.18.1", False), ("0.19.0", True), ("0.19.1", False)])
def test_square_transposed_weights_follow_the_version(version: str, swapped: bool, tmp_path: Path) -> None:
    catalogue = catalogue_of("gpt_oss", intermediate_size=32)
    writer = AdapterWriter(catalogue, peft_version=version)
    check_layout(writer.wrapped(EXPERTS, parameters=("down_proj",), swapped=swapped), tmp_path)


def test_one_oblong_weight_settles_the_square_ones(tmp_path: Path) -> None:
    """As OLMoE has them. The version would say otherwise: shape goes first."""
    catalogue = catalogue_of("qwen3_moe", moe_intermediate_size=16)
    check_layout(AdapterWriter(catalogue, peft_version="0.21.2").wrapped(EXPERTS, swapped=False), tmp_path)


def test_square_weights_without_a_version_are_refused(tmp_path: Path) -> None:
    catalogue = catalogue_of("qwen3_moe", moe_intermediate_size=32)
    writer = AdapterWriter(catalogue, peft_version=None).wrapped(EXPERTS, parameters=("down_proj",), swapped=False)
    with pytest.raises(AdapterError, match="peft_version"):
        check_layout(writer, tmp_path)
    check_layout(writer, tmp_path, peft_version="0.18.0")


def test_square_llama4_weights_are_stored_transposed_but_not_flagged(tmp_path: Path) -> None:
    catalogue = catalogue_of("llama4_text", intermediate_size=32)
    experts = "model.layers.1.feed_forward.experts"
    for version, swapped in (("0.19.0", False), ("0.21.2", True)):
        writer = AdapterWriter(catalogue, peft_version=version)
        check_layout(writer.wrapped(experts, parameters=("down_proj",), swapped=swapped), tmp_path / version)
