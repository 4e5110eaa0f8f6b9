"""Damaged adapter files: refused with the file's name and the likely cause."""

from __future__ import annotations

import json
import math
import os
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_writers import AdapterWriter, catalogue_of, check_adapter
from moelora.adapters.files import TensorReader, parse_headers, read_headers
from moelora.adapters.loader import load_adapter
from moelora.adapters.plans import Plans
from moelora.adapters.values import extremes
from moelora.errors import AdapterError

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return AdapterWriter(catalogue_of("qwen3_moe")).dense("model.layers.0.self_attn.q_proj").write(tmp_path / "bad")


def refusal(folder: Path) -> str:
    """The message of the refusal, checked to name the folder, and to be that of a check without memory for values."""
    how = {"name": "bad", "catalogue": catalogue_of("qwen3_moe"), "dtype": torch.float32}
    with pytest.raises(AdapterError) as caught:
        load_adapter(folder, **how)
    with pytest.raises(AdapterError) as checked:
        check_adapter(folder, **how)
    assert str(caught.value) == str(checked.value)
    assert str(caught.value).startswith(str(folder))
    return str(caught.value)


SPELLINGS: dict[str, Any] = {
    "as safetensors writes it": {"separators": (",", ":"), "ensure_ascii": False},
    "with blanks": {},
    "over many lines": {"indent": 1},
}


def write_header(folder: Path, header: dict[str, Any] | bytes, data: bytes = b"", **spelling: Any) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header, **spelling).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-100], f"{WEIGHTS}: it is shorter than its header says: 100 bytes are missing"),
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


@pytest.mark.parametrize("spelling", SPELLINGS)
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
        ({"a.lora_A.weight": {**ENTRY, "shape": [2**63, 0], "data_offsets": [0, 0]}}, "damaged at tensor"),
        ({"a.lora_A.weight": {**ENTRY, "shape": [1.0, 1]}}, "damaged at tensor"),
        ({"a.lora_A.weight": {**ENTRY, "data_offsets": [0, 4.0]}}, "damaged at tensor"),
        ({"a.lora_A.weight": {**ENTRY, "data_offsets": [4, 0]}}, "damaged at tensor"),
        ({"a.lora_A.weight": {**ENTRY, "data_offsets": [0, 2], "shape": [1, 0]}}, "takes 0 bytes"),
        ({"a.lora_A.weight": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}, "2 bytes behind"),
        ({"a.lora_A.weight": {**ENTRY, "shape": [2], "data_offsets": [0, 8]}}, "4 bytes are missing"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[00,4]}}', "header is damaged"),
        (b'{"a":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}', "header is damaged"),
        (b'{"a":{"dtype":"F32","shape":[1,],"data_offsets":[0,4]}}', "header is damaged"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},}', "header is damaged"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}', "header is damaged"),
        (b'{"\xff":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "header is damaged"),
        (b'{"a\n":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "header is damaged"),
        (
            b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":3}',
            "damaged at tensor",
        ),
        (b'{"__metadata__":{format:"pt"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "header is damaged"),
        (
            b'{"__metadata__":{"dtype":"1","dtype":"2"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            "given twice",
        ),
        (b'{"__metadata__":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "holds no tensors"),
        (
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            "given twice",
        ),
        (b'{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "a": {}}', "given twice"),
        (b'{"a": {}, "a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "given twice"),
        (b'{"a": {"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}', "given twice"),
    ],
)
def test_bad_headers(folder: Path, header: Any, said: str, spelling: str) -> None:
    data = b"" if said in ("holds no tensors", "is empty") else bytes(4)
    write_header(folder, header, data, **SPELLINGS[spelling])
    assert said in refusal(folder)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"note": 'a {brace} and a "quote"'}])
def test_a_header_means_the_same_in_any_spelling(folder: Path, metadata: Any) -> None:
    draw = random.Random(str(metadata))
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    place = 0
    for i in range(50):
        dtype, shape = draw.choice(list(sizes)), [draw.randrange(1, 9) for _ in range(draw.randrange(4))]
        end = place + math.prod(shape) * sizes[dtype]
        header[f"layers.{i}.Größe.lora_A.weight"] = {"dtype": dtype, "shape": shape, "data_offsets": [place, end]}
        place = end
    for spelling in SPELLINGS.values():
        write_header(folder, header, bytes(place), **spelling)
        found = parse_headers(read_headers(folder))
        start = (folder / WEIGHTS).stat().st_size - place
        assert list(found) == [name for name in header if name != "__metadata__"]
        for name, info in found.items():
            entry = header[name]
            begin, end = entry["data_offsets"]
            assert (info.name, info.dtype, list(info.shape)) == (name, entry["dtype"], entry["shape"])
            assert (info.begin - start, info.nbytes) == (begin, end - begin)
    backwards = dict(reversed(header.items()))
    write_header(folder, backwards, bytes(place), separators=(",", ":"))
    assert {name: info.shape for name, info in parse_headers(read_headers(folder)).items()} == {
        name: info.shape for name, info in found.items()
    }


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_bad_value_among_many_shows_in_the_extremes(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(2)
    values = torch.randn(600_000, generator=rng).to(dtype)
    assert extremes(values) == (float(values.min()), float(values.max()))
    assert extremes(torch.zeros(5, dtype=dtype)) == (0, 0)
    assert extremes(torch.tensor([-0.0, 0.0], dtype=dtype)) == (0, 0)
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 2
    assert extremes(torch.tensor([largest, -largest], dtype=dtype)) == (-largest, largest)
    assert extremes(torch.tensor([0.0, -least], dtype=dtype)) == (-least, 0)
    for bad in (math.nan, -math.nan, math.inf, -math.inf):
        for signs in (1, -1):
            place = int(torch.randint(len(values), (), generator=rng))
            broken = values.abs() * signs
            broken[place] = bad
            assert not all(map(math.isfinite, extremes(broken))), (bad, signs, place)


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
    headers = read_headers(folder)
    info = next(iter(parse_headers(headers).values()))
    with TensorReader(folder, headers.stamps) as reader:
        assert reader.read(info).shape == info.shape
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[::-1])
    with pytest.raises(AdapterError, match="changed while it was read"), TensorReader(folder, headers.stamps) as reader:
        reader.read(info)
    (folder / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match="cannot be read"), TensorReader(folder, headers.stamps) as reader:
        reader.read(info)


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_file_that_is_cut_off_while_it_is_read_is_named(folder: Path, share: float) -> None:
    """Of a mapped file whose bytes are gone the system says nothing: it ends the process."""
    headers = read_headers(folder)
    infos = list(parse_headers(headers).values())
    with TensorReader(folder, headers.stamps) as reader:
        assert reader.read(infos[0]).shape == infos[0].shape
        os.truncate(folder / WEIGHTS, int(share * headers.stamps[WEIGHTS].size))
        for use in (reader.read, lambda info: reader.stack([info])):
            with pytest.raises(AdapterError, match=rf"^{re.escape(str(folder / WEIGHTS))}: changed while it was read$"):
                use(infos[-1])


def move_to_odd_places(path: Path) -> None:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + length].rstrip()
    header += b" " * (1 - len(header) % 2)
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


def test_tensors_at_odd_places(folder: Path) -> None:
    """The format aligns nothing: a header of odd length moves all tensors to odd places."""
    expected = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}  # not the mapped file
    move_to_odd_places(folder / WEIGHTS)
    headers = read_headers(folder)
    with TensorReader(folder, headers.stamps) as reader:
        for name, info in parse_headers(headers).items():
            assert info.begin % 2 == 1
            assert torch.equal(reader.read(info), expected[name])


@pytest.mark.parametrize("odd", [False, True])
def test_stacks_of_tensors_wherever_they_lie(tmp_path: Path, odd: bool) -> None:
    """In any order, from places of any distance, in one file or several, into memory with gaps."""
    draw = random.Random(1)
    rng = torch.Generator().manual_seed(1)
    tensors = {
        f"x.{i}.lora_A.weight": torch.randn(*((3, 5) if i % 3 else (i % 7 + 1, 2)), generator=rng).to(torch.bfloat16)
        for i in range(40)
    }
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, tensor in tensors.items():
        shards[draw.randrange(2)][name] = tensor
    for number, shard in enumerate(shards):
        save_file(shard, tmp_path / f"{number}.safetensors")
        if odd:
            move_to_odd_places(tmp_path / f"{number}.safetensors")
    index = {name: f"{number}.safetensors" for number, shard in enumerate(shards) for name in shard}
    (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": index}))
    headers = read_headers(tmp_path)
    infos = parse_headers(headers)
    alike = [name for name, tensor in tensors.items() if tensor.shape == (3, 5)]
    draw.shuffle(alike)
    wanted = torch.stack([tensors[name] for name in alike])
    with TensorReader(tmp_path, headers.stamps) as reader:
        chosen = [infos[name] for name in alike]
        assert torch.equal(reader.stack(chosen), wanted)
        room = torch.zeros(len(alike), 9, 5, dtype=torch.bfloat16)
        assert torch.equal(reader.stack(chosen, room[:, 2:5]), wanted)
        assert torch.equal(room[:, 2:5], wanted)
        assert not room[:, :2].any()
        assert not room[:, 5:].any()
        wide = torch.zeros(len(alike), 3, 5, dtype=torch.float32)
        assert reader.stack(chosen, wide) is wide
        assert torch.equal(wide, wanted.float())


def test_headers_alone(folder: Path) -> None:
    file = Plans(catalogue_of("qwen3_moe")).read(folder)
    assert file.nbytes == sum(info.nbytes for info in parse_headers(read_headers(folder)).values()) > 0
    assert {info.dtype for info in file.kind.tensors.values()} == {"F32"}
