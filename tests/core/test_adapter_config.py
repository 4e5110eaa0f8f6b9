"""adapter_config.json: scales, patterns, which fields are ignored and which are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from moelora.adapters.config import parse_config, read_config
from moelora.errors import AdapterError

GOOD: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def test_plain_config() -> None:
    config = parse_config(GOOD)
    assert (config.r, config.lora_alpha, config.refusals, config.notes) == (4, 8.0, (), ())
    assert config.scale_of("anything") == 2.0


@pytest.mark.parametrize(("r", "alpha", "scale"), [(16, 16, 4.0), (1, 16, 16.0), (3, 6, 6 / math.sqrt(3))])
def test_rslora(r: int, alpha: float, scale: float) -> None:
    config = parse_config({**GOOD, "r": r, "lora_alpha": alpha, "use_rslora": True})
    assert config.scale_of("x") == pytest.approx(scale, abs=1e-12)


@pytest.mark.parametrize(
    ("pattern", "name", "hit"),
    [
        ("layers.1.self_attn.q_proj", "model.layers.1.self_attn.q_proj", True),
        ("layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj", False),
        ("layers.1.self_attn.q_proj", "model.layers.21.self_attn.q_proj", False),
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("proj", "model.layers.0.self_attn.q_proj", False),
        ("^model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.down_proj", True),
        (r".*\.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj", True),
        ("gate", "model.layers.0.mlp.gate.weight", False),
        ("mlp", "model.layers.0.mlp.gate", False),
        (r"experts\.(1|2)\.\w+", "model.layers.0.mlp.experts.2.up_proj", True),
        ("q_proj|v_proj", "model.layers.0.self_attn.v_proj", True),
    ],
)
def test_patterns_match_as_in_peft(pattern: str, name: str, hit: bool) -> None:
    config = parse_config({**GOOD, "rank_pattern": {pattern: 2}, "alpha_pattern": {pattern: 1}})
    assert config.rank_of(name) == (2 if hit else 4)
    assert config.scale_of(name) == (0.5 if hit else 2.0)


@pytest.mark.parametrize("pattern", ["(a+)+$", r"([a-z_.0-9]+)+!", r"(\w|\w\w|\.)*!", "(?:a?){30}", ".*" * 14 + "!"])
def test_patterns_that_might_never_finish_are_refused(pattern: str) -> None:
    for field in ("rank_pattern", "alpha_pattern"):
        config = parse_config({"peft_type": "LORA", "r": 4, "lora_alpha": 8, field: {pattern: 4}})
        assert "might never finish" in config.refusals[0]


def test_patterns_with_a_few_repeats_are_taken() -> None:
    for pattern in (
        r".*layers\.\d+\..*experts\.\d+\..*proj",
        r"layers\.(1|2)\..*q_proj",
        r"(?:layers\.)?\d+",
        "x.[0-9]+.w1",
    ):
        assert not parse_config({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {pattern: 4}}).refusals


def test_the_first_pattern_wins() -> None:
    config = parse_config({**GOOD, "rank_pattern": {"q_proj": 2, "self_attn.q_proj": 8}})
    assert config.rank_of("model.layers.0.self_attn.q_proj") == 2


def test_wrapped_parameters_are_known_by_suffix_or_equality() -> None:
    config = parse_config({**GOOD, "target_parameters": ["gate.weight", "model.layers.0.mlp.experts.down_proj"]})
    assert config.wraps_parameter("model.layers.3.mlp.gate.weight")
    assert not config.wraps_parameter("model.layers.3.mlp.shared_expert_gate.weight")
    assert config.wraps_parameter("model.layers.0.mlp.experts.down_proj")
    assert not config.wraps_parameter("model.layers.1.mlp.experts.down_proj")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", -4), ("r", 0), ("r", True), ("r", 8.0), ("r", "8"), ("r", None),
        ("lora_alpha", None), ("lora_alpha", True), ("lora_alpha", "16"), ("lora_alpha", 1e999),
        ("lora_alpha", 10**400),
        ("rank_pattern", {"q_proj": 0}), ("rank_pattern", {"q_proj": True}), ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj(": 2}), ("alpha_pattern", {"*": 2}), ("alpha_pattern", {"q_proj": None}),
        ("use_rslora", "yes"), ("target_parameters", "gate.weight"), ("modules_to_save", {"a": 1}),
        ("peft_type", "IA3"), ("peft_type", "lora"), ("bias", "all"), ("bias", "lora_only"), ("bias", 3),
        ("use_dora", True), ("lora_bias", True), ("use_qalora", True), ("use_bdlora", {"nblocks": 2}),
        ("layer_replication", [[0, 4]]), ("alora_invocation_tokens", [5, 6]), ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1}), ("monteclora_config", {"n": 1}), ("trainable_token_indices", [1, 2]),
        ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_16"), ("init_lora_weights", "PiSSA"),
        ("init_lora_weights", "olora"), ("init_lora_weights", "corda"), ("init_lora_weights", "loftq"),
        ("init_lora_weights", "brand_new"), ("init_lora_weights", 7),
        ("lora_B_layout", "columns"), ("brand_new_option", 5), ("brand_new_option", 0), ("peft_version", 21),
    ],
)  # fmt: skip
def test_refused(field: str, value: Any) -> None:
    config = parse_config({**GOOD, field: value})
    assert len(config.refusals) == 1
    assert field in config.refusals[0]


@pytest.mark.parametrize("field", ["r", "lora_alpha"])
def test_missing(field: str) -> None:
    config = parse_config({key: value for key, value in GOOD.items() if key != field})
    assert [f"{field} is missing" in reason for reason in config.refusals] == [True]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("brand_new_option", None), ("brand_new_option", False), ("brand_new_option", {}), ("brand_new_option", ""),
        ("eva_config", None), ("eva_config", {"rho": 2.0}), ("loftq_config", {"loftq_bits": 4}), ("bias", None),
        ("target_modules", "all-linear"), ("target_modules", ["q_proj"]), ("exclude_modules", ["k_proj"]),
        ("layers_to_transform", [1]), ("layers_pattern", "layers"), ("lora_dropout", 0.1), ("inference_mode", True),
        ("task_type", "CAUSAL_LM"), ("auto_mapping", {"a": 1}), ("revision", "main"),
        ("megatron_core", "megatron.core"),
        ("qalora_group_size", 16), ("velora_config", {"x": 1}), ("ensure_weight_tying", True), ("use_dora", False),
        ("use_dora", None), ("modules_to_save", None), ("trainable_token_indices", None), ("use_bdlora", None),
        ("init_lora_weights", True), ("init_lora_weights", False), ("init_lora_weights", "gaussian"),
        ("init_lora_weights", "orthogonal"), ("init_lora_weights", "eva"), ("init_lora_weights", "mica"),
        ("init_lora_weights", "lora_ga"), ("init_lora_weights", None), ("rank_pattern", None), ("fan_in_fan_out", True),
        ("lora_B_layout", "rank_major"), ("peft_version", "0.18.1"), ("lora_alpha", 0.5), ("target_parameters", None),
    ],
)  # fmt: skip
def test_accepted(field: str, value: Any) -> None:
    assert parse_config({**GOOD, field: value}).refusals == ()


def test_all_refusals_are_collected() -> None:
    config = parse_config({**GOOD, "r": 0, "use_dora": True, "bias": "all", "x": [1]})
    assert len(config.refusals) == 4


def write(folder: Path, text: str | bytes) -> Path:
    (folder / "adapter_config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD).encode())).r == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"r": 4,\n "lora_alpha" 8}', "line 2 column 15"),
        ('{"r": 4, "r": 8, "lora_alpha": 8}', "'r' is given twice"),
        ("[1, 2]", "JSON object"),
        ("null", "JSON object"),
        ("", "line 1 column 1"),
        (b'{"r": "\xff"}', "UTF-8"),
        ('{"r": ' + "9" * 5000 + "}", "JSON"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_unreadable_text(text: str | bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=said) as caught:
        read_config(write(tmp_path, text))
    assert str(caught.value).startswith(str(tmp_path))
    assert "adapter_config.json" in str(caught.value)


def test_missing_file_names_subfolders_that_have_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-100").mkdir()
    write(tmp_path / "checkpoint-100", json.dumps(GOOD))
    with pytest.raises(AdapterError, match="checkpoint-100"):
        read_config(tmp_path)
    for number in range(6):
        (tmp_path / f"a{number}").mkdir()
        write(tmp_path / f"a{number}", json.dumps(GOOD))
    with pytest.raises(AdapterError, match="have one: a0, a1, a2, a3, a4 and 2 more"):
        read_config(tmp_path)
