"""Adapters that one loader plans once because they are alike: nothing of one may show in another."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_writers import AdapterWriter, catalogue_of
from moelora.adapters import plans
from moelora.adapters.base import Adapter, Catalogue
from moelora.adapters.given import host_adapters
from moelora.adapters.loader import AdapterLoader
from moelora.errors import AdapterError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
LAYER = "model.layers.0"
Q = f"{LAYER}.self_attn.q_proj"


@pytest.fixture
def catalogue() -> Catalogue:
    return catalogue_of("qwen3_moe")


class Sweep:
    """Writes adapters whose headers are the same, with fresh values each."""

    def __init__(self, folder: Path, catalogue: Catalogue) -> None:
        self.folder = folder
        self.catalogue = catalogue
        self.numbers = count()

    def write(self, name: str = "", **config: Any) -> Path:
        """An adapter of rank 3 on attention and on the experts of both layers."""
        writer = AdapterWriter(self.catalogue, seed=random.randrange(1 << 30))
        writer.dense(Q, f"{LAYER}.self_attn.o_proj").per_expert(f"{LAYER}.mlp.experts")
        writer.wrapped("model.layers.1.mlp.experts")
        writer.config.update(config)
        return writer.write(self.folder / (name or f"{next(self.numbers)}"))


@pytest.fixture
def sweep(tmp_path: Path, catalogue: Catalogue) -> Sweep:
    return Sweep(tmp_path, catalogue)


def loader_of(catalogue: Catalogue, **options: Any) -> AdapterLoader:
    return AdapterLoader(catalogue, dtype=torch.float32, **options)


def change(folder: Path, alter: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Saves the tensors anew after `alter` has changed them in place."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    alter(tensors)
    save_file(tensors, folder / WEIGHTS)
    return folder


def with_nan(folder: Path) -> Path:
    def alter(tensors: dict[str, torch.Tensor]) -> None:
        tensors[random.choice([*tensors])].view(-1)[-1] = float("nan")

    return change(folder, alter)


def reordered(folder: Path, *, values: bool) -> Path:
    """The same tensors in another order of the header; with `values` they lie in that order as well."""
    raw = (folder / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    names = random.sample([*header], len(header))
    moved, pieces, place = {}, [], 0
    for name in names:
        begin, end = header[name]["data_offsets"]
        pieces.append(data[begin:end])
        moved[name] = {**header[name], "data_offsets": [place, place + end - begin] if values else [begin, end]}
        place += end - begin
    text = json.dumps(moved, separators=(",", ":")).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + (b"".join(pieces) if values else data))
    return folder


def sharded(folder: Path, cut: int) -> Path:
    """Two files and an index; tensors from number `cut` on lie in the second one."""
    tensors = load_file(folder / WEIGHTS)
    names = [*tensors]
    places = {"one.safetensors": names[:cut], "two.safetensors": names[cut:]}
    for shard, its in places.items():
        save_file({name: tensors[name] for name in its}, folder / shard)
    (folder / WEIGHTS).unlink()
    weight_map = {name: shard for shard, its in places.items() for name in its}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def outcome(look: Callable[..., Adapter], folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """What a loader says of an adapter, and its tensors by name."""
    try:
        adapter = look(folder, name="a")
    except AdapterError as error:
        return str(error), {}
    tensors = {f"{name} {side}": getattr(f, side) for name, f in adapter.factors.items() for side in "ab"}
    return (adapter.path, adapter.notes, adapter.summaries), {**tensors, **adapter.replacements}


def assert_as_by_a_new_loader(loader: AdapterLoader, catalogue: Catalogue, folder: Path, **options: Any) -> bool:
    """Loads and checks with `loader` and with one that has seen nothing. Returns whether the adapter is refused."""
    said, tensors = outcome(loader.load, folder)
    want, expected = outcome(loader_of(catalogue, **options).load, folder)
    assert said == want
    assert not isinstance(said, str) or said.startswith(str(folder))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert outcome(loader.check, folder)[0] == want
    assert outcome(loader.outline, folder)[1].keys() >= tensors.keys()
    return isinstance(said, str)


# Alike in the header.


def test_adapters_that_differ_in_values_alone_are_planned_once(
    sweep: Sweep, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, parsed = [], []
    plan_adapter, parse_headers = plans.plan_adapter, plans.parse_headers
    monkeypatch.setattr(plans, "plan_adapter", lambda *args: planned.append(1) or plan_adapter(*args))
    monkeypatch.setattr(plans, "parse_headers", lambda headers: parsed.append(1) or parse_headers(headers))
    loader = loader_of(catalogue)
    folders = [sweep.write(base_model_name_or_path=f"base {i}", lora_dropout=i / 10) for i in range(6)]
    loaded = [loader.load(folder, name=folder.name) for folder in folders]
    for folder in folders:
        loader.check(folder, name=folder.name)
    assert (len(parsed), len(planned)) == (1, 1)
    assert [adapter.path for adapter in loaded] == folders
    firsts = [adapter.factors[Q].a for adapter in loaded]
    assert all(not torch.equal(one, other) for one, other in pairwise(firsts))
    for folder in folders:
        assert not assert_as_by_a_new_loader(loader, catalogue, folder)


def test_one_with_nan_among_adapters_of_the_same_header_is_refused_by_its_own_name(
    sweep: Sweep, catalogue: Catalogue
) -> None:
    loader = loader_of(catalogue)
    before, bad, after = sweep.write(), with_nan(sweep.write()), sweep.write()
    assert not assert_as_by_a_new_loader(loader, catalogue, before)
    assert assert_as_by_a_new_loader(loader, catalogue, bad)
    assert "not finite" in outcome(loader.check, bad)[0]
    assert not assert_as_by_a_new_loader(loader, catalogue, after)
    first_bad = loader_of(catalogue)
    assert assert_as_by_a_new_loader(first_bad, catalogue, bad)
    assert not assert_as_by_a_new_loader(first_bad, catalogue, after)


CONFIGS: dict[str, dict[str, Any]] = {
    "the same": {},
    "scale": {"lora_alpha": 7},
    "rsLoRA": {"use_rslora": True},
    "scale of some": {"alpha_pattern": {"q_proj": 5}},
    "scale of an expert": {"alpha_pattern": {r"experts\.1\.gate_proj": 50}},
    "rank of some": {"rank_pattern": {"o_proj": 2}},
    "rank of the wrong default, right by pattern": {"r": 9, "rank_pattern": {".*": 3}},
    "rank": {"r": 4},
    "order of columns": {"lora_B_layout": "grouped_by_expert"},
    "an unknown order of columns": {"lora_B_layout": "sideways"},
    "wrapped parameters": {"target_parameters": ["experts.down_proj"]},
    "a kind that is refused": {"use_dora": True},
    "a field that is noted": {"fan_in_fan_out": True},
    "version": {"peft_version": "0.18.0"},
}


@pytest.mark.parametrize("seed", range(3))
def test_a_configuration_acts_though_the_header_is_known(sweep: Sweep, catalogue: Catalogue, seed: int) -> None:
    loader, draw = loader_of(catalogue), random.Random(seed)
    folders = {what: sweep.write(what.replace(" ", "-"), **config) for what, config in CONFIGS.items()}
    order = draw.choices([*folders], k=12) + draw.sample([*folders], len(folders))
    refused = {what for what in order if assert_as_by_a_new_loader(loader, catalogue, folders[what])}
    assert refused == {"rank of some", "rank", "an unknown order of columns", "a kind that is refused"}
    b = {what: loader.load(folders[what], name=what).summaries[0].scales for what in ("the same", "scale", "rsLoRA")}
    assert len(set(b.values())) == 3


def test_the_overrides_of_a_loader_are_its_own(sweep: Sweep, catalogue: Catalogue) -> None:
    folder = sweep.write()
    found = []
    for override in (None, "grouped_by_expert", "rank_major"):
        options = {"lora_b_layout": override}
        loader = loader_of(catalogue, **options)
        assert not assert_as_by_a_new_loader(loader, catalogue, folder, **options)
        found.append(outcome(loader.load, folder)[1]["model.layers.1.mlp.experts.down_proj b"])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    wrong = loader_of(catalogue, lora_b_layout="sideways")
    for one in (folder, sweep.write()):
        assert "sideways" in outcome(wrong.load, one)[0]


# Nearly alike.


def test_the_same_names_in_another_order_have_their_own_plan(sweep: Sweep, catalogue: Catalogue) -> None:
    loader = loader_of(catalogue)
    folder = sweep.write()
    want = outcome(loader.load, folder)[1]
    for values in (True, False, True):
        found = outcome(loader.load, reordered(folder, values=values))[1]
        assert want.keys() == found.keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in want.items())
        assert not assert_as_by_a_new_loader(loader, catalogue, folder)


@pytest.mark.parametrize("what", ["a shape turned round", "another name", "another dtype", "one tensor less", "longer"])
def test_a_header_that_differs_a_little_is_looked_at_in_full(sweep: Sweep, catalogue: Catalogue, what: str) -> None:
    def alter(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if "q_proj.lora_A" in name)
        if what == "a shape turned round":
            tensors[name] = tensors[name].reshape(tensors[name].shape[::-1])
        elif what == "another name":
            tensors[name.replace("q_proj", "x_proj")] = tensors.pop(name)
        elif what == "another dtype":
            tensors[name] = tensors[name].bfloat16()
        else:
            del tensors[name]

    loader = loader_of(catalogue)
    good, other = sweep.write(), sweep.write()
    assert not assert_as_by_a_new_loader(loader, catalogue, good)
    if what == "longer":  # the header is equal to the last byte
        (other / WEIGHTS).write_bytes((other / WEIGHTS).read_bytes() + bytes(8))
    else:
        change(other, alter)
    assert assert_as_by_a_new_loader(loader, catalogue, other) == (what != "another dtype")
    assert not assert_as_by_a_new_loader(loader, catalogue, good)


def test_shards_count_with_their_index(sweep: Sweep, catalogue: Catalogue) -> None:
    loader = loader_of(catalogue)
    whole = sweep.write()
    alike, elsewhere = sharded(sweep.write(), 5), sharded(sweep.write(), 9)
    for folder in (whole, alike, elsewhere, sharded(sweep.write(), 5), whole):
        assert not assert_as_by_a_new_loader(loader, catalogue, folder)
    index = alike / f"{WEIGHTS}.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map[next(iter(weight_map))] = "two.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert assert_as_by_a_new_loader(loader, catalogue, alike)
    assert "is not listed for this file" in outcome(loader.load, alike)[0]


# Files that change, kinds that are let go, threads.


def test_a_folder_that_is_written_anew_is_read_anew(sweep: Sweep, catalogue: Catalogue) -> None:
    loader = loader_of(catalogue)
    for config in ({}, {}, {"lora_alpha": 3}, {"r": 5}, {}):
        assert_as_by_a_new_loader(loader, catalogue, sweep.write("same", **config))
    assert_as_by_a_new_loader(loader, catalogue, reordered(sweep.folder / "same", values=True))
    (sweep.folder / "same" / WEIGHTS).unlink()
    assert assert_as_by_a_new_loader(loader, catalogue, sweep.folder / "same")


def test_a_file_that_changes_between_its_header_and_its_values_is_refused(
    sweep: Sweep, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(catalogue)
    loader.load(sweep.write(), name="known")
    folder = sweep.write()
    plan = plans.Plans.plan

    def write_then_plan(self: plans.Plans, file: plans.AdapterFile) -> Any:
        with_nan(folder)  # the header stays as it was
        return plan(self, file)

    monkeypatch.setattr(plans.Plans, "plan", write_then_plan)
    for look in (loader.load, loader.check):
        assert outcome(look, folder)[0] == f"{folder / WEIGHTS}: changed while it was read"


def test_few_kinds_are_kept_and_the_others_planned_again(sweep: Sweep, catalogue: Catalogue) -> None:
    loader = loader_of(catalogue)
    folders = [sweep.write(lora_alpha=i + 1) for i in range(2 * plans.KINDS + 1)]
    for folder in (*folders, *folders[:3]):
        assert not assert_as_by_a_new_loader(loader, catalogue, reordered(folder, values=True))
    assert len(loader._plans._kinds._entries) == len(loader._plans._planned._entries) == plans.KINDS


def test_threads_that_check_adapters_of_several_kinds_do_not_mix_them_up(sweep: Sweep, catalogue: Catalogue) -> None:
    folders = []
    for i in range(40):
        folder = sweep.write(lora_alpha=i % 3 + 1)
        folders.append(reordered(folder, values=True) if i % 5 == 0 else with_nan(folder) if i % 11 == 3 else folder)
    loader = loader_of(catalogue)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda folder: outcome(loader.check, folder)[0], folders))
    assert found == [outcome(loader_of(catalogue).check, folder)[0] for folder in folders]
    assert sum(isinstance(one, str) for one in found) == sum(i % 11 == 3 and i % 5 != 0 for i in range(40))


def test_a_run_refuses_the_one_bad_adapter_of_a_sweep(sweep: Sweep, catalogue: Catalogue) -> None:
    folders = {f"a{i}": sweep.write(lora_alpha=i % 2 + 1) for i in range(20)}
    how: dict[str, Any] = {
        "catalogue": catalogue,
        "dtype": torch.float32,
        "base_weight": lambda name: None,
        "lora_b_layout": None,
        "budget": None,
        "say": lambda text: None,
    }
    assert host_adapters(folders, **how).kept == 20
    with_nan(folders["a13"])
    with pytest.raises(AdapterError, match="not finite") as caught:
        host_adapters(folders, **how)
    assert str(caught.value).startswith(str(folders["a13"]))
