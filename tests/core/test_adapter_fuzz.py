"""Hostile adapter files: whatever is in them, only AdapterError may come out."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from adapter_writers import AdapterWriter, catalogue_of
from moelora.adapters.loader import AdapterLoader
from moelora.errors import AdapterError

WEIGHTS = "adapter_model.safetensors"

FUZZ = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def rich_folder(tmp_path: Path) -> Path:
    writer = AdapterWriter(catalogue_of("qwen3_moe"), use_dora=False, rank_pattern={"x": 2}, alpha_pattern={"x": 2})
    writer.dense("model.layers.0.self_attn.q_proj", "lm_head").embedding()
    writer.per_expert("model.layers.1.mlp.experts", experts=[0, 2]).wrapped("model.layers.0.mlp.experts")
    return writer.write(tmp_path / "fuzz")


def try_to_load(path: Path, broken: bytes) -> None:
    """Loads an adapter with `broken` in the place of one of its files, which is then what it was."""
    original, folder = path.read_bytes(), path.parent
    path.write_bytes(broken)
    try:
        said = verdict(folder, AdapterLoader(catalogue_of("qwen3_moe"), dtype=torch.float32))
        assert said.startswith(str(folder))
        assert said.encode()  # it can be printed: no lone surrogates
        assert verdict(folder, KNOWING) == said
    finally:
        path.write_bytes(original)


KNOWING = AdapterLoader(catalogue_of("qwen3_moe"), dtype=torch.float32)
"""Has met adapters like the one that is broken, whole and broken."""


def verdict(folder: Path, loader: AdapterLoader) -> str:
    try:
        loader.load(folder, name="fuzz")
    except AdapterError as error:
        return str(error)
    return str(folder)


@FUZZ
@given(data=st.data())
def test_bytes_flipped_or_cut(rich_folder: Path, data: st.DataObject) -> None:
    path = rich_folder / WEIGHTS
    broken = bytearray(path.read_bytes())
    header = 8 + struct.unpack("<Q", broken[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        end = data.draw(st.sampled_from([8, header, len(broken)]))
        broken[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(broken)))
    try_to_load(path, bytes(broken[:cut]))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@FUZZ
@given(data=st.data())
def test_config_values_replaced(rich_folder: Path, data: st.DataObject) -> None:
    path = rich_folder / "adapter_config.json"
    config = json.loads(path.read_bytes())
    keys = [*config, "bias", "init_lora_weights", "modules_to_save", "lora_B_layout", "peft_version", "use_rslora"]
    for _ in range(data.draw(st.integers(1, 3))):
        config[data.draw(st.sampled_from(keys))] = data.draw(JUNK)
    try_to_load(path, json.dumps(config).encode())


@FUZZ
@given(data=st.data())
def test_config_text_broken(rich_folder: Path, data: st.DataObject) -> None:
    path = rich_folder / "adapter_config.json"
    broken = bytearray(path.read_bytes())
    broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    try_to_load(path, bytes(broken[: data.draw(st.none() | st.integers(0, len(broken)))]))


@FUZZ
@given(data=st.data())
def test_tensors_renamed_and_reshaped(rich_folder: Path, data: st.DataObject) -> None:
    path = rich_folder / WEIGHTS
    tensors = load(path.read_bytes())
    names = sorted(tensors)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(names))
        tensor = tensors.pop(name, torch.ones(3, 4))
        parts = name.split(".")
        parts[data.draw(st.integers(0, len(parts) - 1))] = data.draw(
            st.sampled_from(["experts", "base_layer", "lora_A", "lora_B", "weight", "bias", "0", "7", "q_proj", "w1"])
        )
        new_name = ".".join(parts) if data.draw(st.booleans()) else name
        shape = data.draw(st.sampled_from([tuple(tensor.shape), (1,), (3, 4), (4, 3), (2, 3, 4), (6, 3, 32), ()]))
        tensors[new_name] = tensor if shape == tuple(tensor.shape) else torch.ones(shape)
    try_to_load(path, save(tensors))
