"""Damaged and hostile adapter files: refused with the file's name and the likely cause."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from adapter_writers import AdapterWriter, catalogue_of
from moelora.adapters.files import TensorReader, read_headers
from moelora.adapters.loader import load_adapter, read_adapter
from moelora.errors import AdapterError

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return AdapterWriter(catalogue_of("qwen3_moe")).dense("model.layers.0.self_attn.q_proj").write(tmp_path / "bad")


def refusal(folder: Path) -> str:
    """The message of the refusal, checked to name the folder."""
    with pytest.raises(AdapterError) as caught:
        load_adapter(folder, name="bad", catalogue=catalogue_of("qwen3_moe"), dtype=torch.float32)
    assert str(caught.value).startswith(str(folder))
    return str(caught.value)


def write_header(folder: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-100], "100 bytes are missing"),
        (lambda data: b"", "too short"),
        (lambda data: data[:9], "too short"),
        (lambda data: data[:20], "cut off in the header"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs pointer"),
        (lambda data: data + bytes(64), "64 bytes behind its last tensor"),
        (lambda data: struct.pack("<Q", 2**60) + data[8:], "header claims"),
        (lambda data: struct.pack("<Q", 0) + data[8:], "header claims 0"),
        (lambda data: b"<!DOCTYPE html><html>" + data, "web page"),
        (lambda data: data[:8] + b"\xff" + data[9:], "header is damaged"),
    ],
)
def test_damaged(folder: Path, change: Any, said: str) -> None:
    path = folder / WEIGHTS
    path.write_bytes(change(path.read_bytes()))
    assert said in refusal(folder)
    assert WEIGHTS in refusal(folder)


ENTRY = {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({}, "holds no tensors"),
        ({"__metadata__": {"format": "pt"}}, "holds no tensors"),
        ([1], "not a JSON object"),
        ({"a/../b.lora_A.weight": ENTRY}, "not a dotted name"),
        ({"a..b.lora_A.weight": ENTRY}, "not a dotted name"),
        ({"a\u0007.lora_A.weight": ENTRY}, "not a dotted name"),
        ({"": ENTRY}, "not a dotted name"),
        ({"a.lora_A.weight": {**ENTRY, "dtype": "I32"}}, "dtype 'I32'"),
        ({"a.lora_A.weight": {**ENTRY, "dtype": 3}}, "dtype 3"),
        ({"a.lora_A.weight": {**ENTRY, "shape": [0, 4], "data_offsets": [0, 0]}}, "is empty"),
        ({"a.lora_A.weight": {**ENTRY, "shape": [-1, 1]}}, "damaged at tensor"),
        ({"a.lora_A.weight": {**ENTRY, "shape": [True, 1]}}, "damaged at tensor"),
        ({"a.lora_A.weight": {**ENTRY, "shape": [2, 1]}}, "takes 8 bytes"),
        ({"a.lora_A.weight": {**ENTRY, "data_offsets": [0]}}, "damaged at tensor"),
        ({"a.lora_A.weight": {**ENTRY, "data_offsets": [4, 8]}}, "begins at 4"),
        ({"a.lora_A.weight": ENTRY, "a.lora_B.weight": ENTRY}, "begins at 0"),
        ({"a.lora_A.weight": 3}, "damaged at tensor"),
        ({"a.lora_A.weight": {**ENTRY, "shape": [2**62, 2**62]}}, "takes"),
        (b'{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "a": {}}', "given twice"),
        (b'{"a": {}, "a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "given twice"),
        (b'{"a": {"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}', "given twice"),
    ],
)
def test_bad_headers(folder: Path, header: Any, said: str) -> None:
    write_header(folder, header, bytes(4))
    if said in ("holds no tensors", "is empty"):
        write_header(folder, header)
    assert said in refusal(folder)


def test_only_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert "pickle" in refusal(folder)


def test_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert f"{WEIGHTS} not found" in refusal(folder)


def test_no_folder_and_a_file_instead(folder: Path) -> None:
    assert "no such folder" in refusal(folder / "missing")
    assert "is a file" in refusal(folder / WEIGHTS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(folder: Path, value: float) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = next(iter(tensors))
    tensors[name][0, 0] = value
    save_file(tensors, folder / WEIGHTS)
    assert name in refusal(folder)
    assert "not finite" in refusal(folder)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 1e6), (torch.bfloat16, 3.4e38)])
def test_values_too_large_for_the_model_s_dtype(folder: Path, dtype: torch.dtype, value: float) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name][0, 0] = value
    save_file(tensors, folder / WEIGHTS)
    catalogue = catalogue_of("qwen3_moe")
    with pytest.raises(AdapterError, match="too large") as caught:
        load_adapter(folder, name="a", catalogue=catalogue, dtype=dtype)
    assert name in str(caught.value)
    load_adapter(folder, name="a", catalogue=catalogue, dtype=torch.float32)


def test_small_and_large_half_precision_values_survive(folder: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in load_file(folder / WEIGHTS).items()}
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name][0, :2] = torch.tensor([6e4, 1e-7], dtype=torch.float16)
    save_file(tensors, folder / WEIGHTS)
    adapter = load_adapter(folder, name="a", catalogue=catalogue_of("qwen3_moe"), dtype=torch.bfloat16)
    a = adapter.factors["model.layers.0.self_attn.q_proj"].a
    assert torch.equal(a[0, :2], tensors[name][0, :2].to(torch.bfloat16))
    assert bool((a[0, :2] != 0).all())


def test_shards(folder: Path) -> None:
    whole = load_adapter(folder, name="a", catalogue=catalogue_of("qwen3_moe"), dtype=torch.float32)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        weight_map[name] = f"adapter_model-{i}.safetensors"
        save_file({name: tensor}, folder / weight_map[name])
    index = folder / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    sharded = load_adapter(folder, name="a", catalogue=catalogue_of("qwen3_moe"), dtype=torch.float32)
    for name, factors in whole.factors.items():
        assert torch.equal(factors.b, sharded.factors[name].b)
    index.write_text(json.dumps({"weight_map": {**weight_map, "x.lora_A.weight": "adapter_model-0.safetensors"}}))
    assert "x.lora_A.weight" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {"y": "../adapter_model-1.safetensors"}}))
    assert "outside" in refusal(folder)
    (folder / "adapter_model-1.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "adapter_model-1.safetensors" in refusal(folder)


def test_a_file_that_changes_behind_its_header_is_not_read(folder: Path) -> None:
    info = next(iter(read_headers(folder).values()))
    with TensorReader() as reader:
        assert reader.read(info).shape == info.shape
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[::-1])
    with pytest.raises(AdapterError, match="changed while it was read"), TensorReader() as reader:
        reader.read(info)
    (folder / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match="cannot be read"), TensorReader() as reader:
        reader.read(info)


def test_tensors_at_odd_places(folder: Path) -> None:
    """The format aligns nothing: a header of odd length moves all tensors to odd places."""
    expected = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}  # not the mapped file
    raw = (folder / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + length].rstrip()
    header += b" " * (1 - len(header) % 2)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])
    with TensorReader() as reader:
        for name, info in read_headers(folder).items():
            assert info.begin % 2 == 1
            assert torch.equal(reader.read(info), expected[name])


def test_headers_alone(folder: Path) -> None:
    file = read_adapter(folder)
    assert file.nbytes == sum(info.nbytes for info in read_headers(folder).values()) > 0
    assert {info.dtype for info in file.tensors.values()} == {"F32"}


# Hostile input: whatever is in the files, only AdapterError may come out.

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


def try_to_load(folder: Path) -> None:
    said = str(folder)
    try:
        load_adapter(folder, name="fuzz", catalogue=catalogue_of("qwen3_moe"), dtype=torch.float32)
    except AdapterError as error:
        said = str(error)
    assert said.startswith(str(folder))
    assert said.encode()  # it can be printed: no lone surrogates


@FUZZ
@given(data=st.data())
def test_bytes_flipped_or_cut(rich_folder: Path, data: st.DataObject) -> None:
    path = rich_folder / WEIGHTS
    original = path.read_bytes()
    header = 8 + struct.unpack("<Q", original[:8])[0]
    broken = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        end = data.draw(st.sampled_from([8, header, len(original)]))
        broken[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(original)))
    path.write_bytes(bytes(broken[:cut]))
    try:
        try_to_load(rich_folder)
    finally:
        path.write_bytes(original)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@FUZZ
@given(data=st.data())
def test_config_values_replaced(rich_folder: Path, data: st.DataObject) -> None:
    path = rich_folder / "adapter_config.json"
    original = path.read_text()
    config = json.loads(original)
    keys = [*config, "bias", "init_lora_weights", "modules_to_save", "lora_B_layout", "peft_version", "use_rslora"]
    for _ in range(data.draw(st.integers(1, 3))):
        config[data.draw(st.sampled_from(keys))] = data.draw(JUNK)
    path.write_text(json.dumps(config))
    try:
        try_to_load(rich_folder)
    finally:
        path.write_text(original)


@FUZZ
@given(data=st.data())
def test_config_text_broken(rich_folder: Path, data: st.DataObject) -> None:
    path = rich_folder / "adapter_config.json"
    original = path.read_bytes()
    broken = bytearray(original)
    broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(broken[: data.draw(st.none() | st.integers(0, len(broken)))]))
    try:
        try_to_load(rich_folder)
    finally:
        path.write_bytes(original)


@FUZZ
@given(data=st.data())
def test_tensors_renamed_and_reshaped(rich_folder: Path, data: st.DataObject) -> None:
    path = rich_folder / WEIGHTS
    original = path.read_bytes()
    tensors = load_file(path)
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
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    try:
        try_to_load(rich_folder)
    finally:
        path.write_bytes(original)
