"""Checks of adapters without memory for their values: they refuse what a load refuses, in its words and in time."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_writers import PREFIX, AdapterWriter, catalogue_of, check_adapter, write_adapter
from moelora import AdapterError, EngineOptions, PrefillEngine, Request
from moelora.adapters import peaks
from moelora.adapters.base import Adapter, Catalogue, Target, TargetKind
from moelora.adapters.files import Headers, TensorReader, parse_headers, read_headers
from moelora.adapters.host import HostAdapters
from moelora.adapters.loader import load_adapter
from moelora.adapters.peaks import read_peaks, value_runs
from tiny_models import peft_adapter, save_model

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WEIGHTS = "adapter_model.safetensors"
LAYER = "model.layers.0"


# Peaks.


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Saves tensors alone and reads their peaks."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    return peaks_of(read_headers(folder))


def peaks_of(headers: Headers) -> dict[str, float]:
    infos = parse_headers(headers)
    found = read_peaks(headers.folder, headers.stamps, value_runs(infos.values()), len(infos))
    return dict(zip(infos, found.tolist(), strict=True))


@pytest.mark.parametrize("buffer", [64, 4096, 1 << 20])
@pytest.mark.parametrize("seed", range(6))
def test_peaks_are_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, buffer: int) -> None:
    monkeypatch.setattr(peaks, "_BUFFER", buffer)
    rng, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    tensors = {}
    for i in range(60):
        shape = [draw.choice((1, 2, 7, 33, 200)) for _ in range(draw.randrange(3))]
        dtype = draw.choice(DTYPES) if seed % 2 else DTYPES[seed // 2]
        tensors[f"t{i}.weight"] = (torch.randn(shape, generator=rng) * 10 ** draw.uniform(-3, 3)).to(dtype)
    tensors["experts.0.w3.weight"] = torch.empty(0, 4)
    tensors["zero.weight"] = torch.tensor([0.0, -0.0])
    want = {name: float(t.double().abs().max()) if t.numel() else 0.0 for name, t in tensors.items()}
    assert save(tmp_path / "a", tensors) == want
    for bad in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        name = draw.choice([name for name, t in tensors.items() if t.numel()])
        broken = tensors[name].clone()
        broken.view(-1)[draw.randrange(broken.numel())] = bad
        assert save(tmp_path / "a", {**tensors, name: broken}) == {**want, name: float("inf")}


def test_peaks_of_a_file_that_changed_or_went(tmp_path: Path) -> None:
    save(tmp_path / "a", {"a.weight": torch.ones(9)})
    headers = read_headers(tmp_path / "a")
    save(tmp_path / "a", {"a.weight": torch.ones(99)})
    with pytest.raises(AdapterError, match=f"{WEIGHTS}: changed while it was read"):
        peaks_of(headers)
    (tmp_path / "a" / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=f"{WEIGHTS}: cannot be read: No such file"):
        peaks_of(headers)


# Checks against loads.


def verdict(look: Callable[[], Adapter]) -> str:
    try:
        look()
    except AdapterError as error:
        return str(error)
    return "fine"


def written(folder: Path, catalogue: Catalogue, dtype: torch.dtype, alpha: float) -> dict[str, torch.Tensor]:
    writer = AdapterWriter(catalogue, alpha=alpha, dtype=dtype, seed=random.randrange(1 << 30))
    writer.dense(f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.o_proj").per_expert(f"{LAYER}.mlp.experts")
    return load_file(writer.write(folder) / WEIGHTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("alpha", [0.003, 3, 3000])
def test_a_check_says_what_a_load_says(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype, alpha: float) -> None:
    """Values of one tensor, from those that vanish in a dtype to those that overflow in it, rounding included."""
    catalogue = catalogue_of("qwen3_moe")
    tensors = written(tmp_path / "a", catalogue, stored, alpha)
    how: dict[str, Any] = {"name": "a", "catalogue": catalogue, "dtype": dtype}
    seen = set()
    largest, scale = torch.finfo(dtype).max, alpha / 3
    sizes = [largest / scale * f for f in (0.4, 0.6, 0.999, 1.0001, 1.01, 3)]
    sizes += [largest * f for f in (0.4, 0.6, 0.9999, 1.0001, 1.01)]
    sizes += [2.0**-24 / scale * f for f in (0.4, 0.6, 0.9, 1.1, 3)] + [2.0**-24 * f for f in (0.4, 0.6, 1.1, 3)]
    for size in [0.0, float("nan"), float("-inf"), *sizes]:
        name = random.choice([*tensors])
        values = (torch.rand(tensors[name].shape) * -size).double()
        values.view(-1)[-1] = size
        save_file({**tensors, name: values.to(stored)}, tmp_path / "a" / WEIGHTS)
        loaded = verdict(lambda: load_adapter(tmp_path / "a", **how))
        assert verdict(lambda: check_adapter(tmp_path / "a", **how)) == loaded
        seen.add("fine" if loaded == "fine" else "refused")
    assert seen == {"fine", "refused"}


def test_a_check_gives_the_outline_and_reads_nothing_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = catalogue_of("qwen3_moe")
    tensors = written(tmp_path / "a", catalogue, torch.bfloat16, 6)
    embedding = catalogue.targets["model.embed_tokens"].shape
    tensors["base_model.model.model.embed_tokens.weight"] = torch.randn(embedding).bfloat16()
    save_file(tensors, tmp_path / "a" / WEIGHTS)
    how: dict[str, Any] = {"name": "a", "catalogue": catalogue, "dtype": torch.bfloat16}
    loaded = load_adapter(tmp_path / "a", **how)
    monkeypatch.setattr(TensorReader, "read", None)
    monkeypatch.setattr(TensorReader, "stack", None)
    checked = check_adapter(tmp_path / "a", **how)
    assert (checked.summaries, checked.notes, checked.path) == (loaded.summaries, loaded.notes, loaded.path)
    assert checked.nbytes == loaded.nbytes
    for name, factors in loaded.factors.items():
        pairs = ((factors.a, checked.factors[name].a), (factors.b, checked.factors[name].b))
        assert all(found.is_meta and found.shape == t.shape and found.dtype == t.dtype for t, found in pairs)
    replaced = checked.replacements["model.embed_tokens"]
    assert replaced.is_meta
    assert (replaced.shape, replaced.dtype) == (embedding, torch.bfloat16)


# The start of a run.


def test_the_start_takes_next_to_no_memory_for_what_is_read_later(tmp_path: Path) -> None:
    target = Target(
        name="q", kind=TargetKind.LINEAR, in_features=1 << 18, out_features=1 << 18, shape=(1 << 18, 1 << 18)
    )
    catalogue = Catalogue(model_type="x", targets={"q": target}, num_layers=1, tied_lm_head=False)
    a, b = torch.randn(8, 1 << 18).bfloat16(), torch.randn(1 << 18, 8).bfloat16()
    write_adapter(tmp_path, {f"{PREFIX}q.lora_A.weight": a, f"{PREFIX}q.lora_B.weight": b}, r=8)
    how: dict[str, Any] = {"catalogue": catalogue, "dtype": torch.bfloat16}
    sources: dict[str, Path | Adapter] = {f"a{i}": tmp_path for i in range(50)}
    check_adapter(tmp_path, name="first", **how)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    host = HostAdapters(
        sources,
        lambda name, path, allocate: load_adapter(path, name=name, allocate=allocate, **how),
        lambda name, path: check_adapter(path, name=name, **how),
    )
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    pages = sum(adapter.nbytes for adapter in host.values()) // resource.getpagesize()
    assert host.kept == 50
    assert faults < pages / 4


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("fifty")
    model = save_model(folder / "model", "qwen3_moe", seed=random.randrange(1 << 30))
    for i in range(3):
        peft_adapter(folder / f"a{i}", model, i, rank=2, target_modules=["q_proj", "o_proj"])
    return folder / "model", folder


def fifty(folder: Path, world: tuple[Path, Path]) -> dict[str, Path]:
    adapters = {}
    for i in range(50):
        adapters[f"a{i}"] = folder / f"a{i}"
        adapters[f"a{i}"].mkdir()
        for file in (world[1] / f"a{i % 3}").iterdir():
            (adapters[f"a{i}"] / file.name).hardlink_to(file)
    return adapters


@pytest.mark.parametrize(
    ("dtype", "factor", "said"),
    [
        ("float32", float("nan"), r"not finite .NaN or infinity. in \d+ of \d+ values"),
        ("bfloat16", 2e38, "too large for bfloat16"),
        ("float16", 1e-9, "become zero in float16"),
    ],
)
@pytest.mark.parametrize("number", [2, 37])
def test_one_bad_adapter_of_fifty_is_refused_before_the_base_is_loaded(
    tmp_path: Path,
    world: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    dtype: str,
    factor: float,
    said: str,
) -> None:
    adapters = fifty(tmp_path, world)
    bad = adapters[f"a{number}"]
    tensors = load_file(bad / WEIGHTS)
    name = sorted(tensors)[1]
    tensors[name] = tensors[name].sign() * factor
    (bad / WEIGHTS).unlink()
    save_file(tensors, bad / WEIGHTS)
    monkeypatch.setattr("moelora.engine.load_base", None)
    options = EngineOptions(device="cpu", dtype=dtype, slots=4)
    with pytest.raises(AdapterError, match=said) as caught:
        PrefillEngine(world[0], adapters=adapters, options=options)
    with pytest.raises(AdapterError) as alone:
        PrefillEngine(world[0], adapters={"alone": bad}, options=options)
    assert str(caught.value) == str(alone.value)
    assert str(caught.value).startswith(str(bad))


@pytest.mark.parametrize("host_bytes", [None, 0])
def test_fifty_adapters_on_four_slots_score_as_each_does_alone(
    tmp_path: Path, world: tuple[Path, Path], host_bytes: int | None
) -> None:
    adapters = fifty(tmp_path, world)
    options = EngineOptions(device="cpu", slots=4, max_tokens=64, max_requests=1, host_bytes=host_bytes)
    ids = [random.randrange(3, 120) for _ in range(20)]
    engine = PrefillEngine(world[0], adapters=adapters, options=options)
    names = random.sample([*adapters], len(adapters))
    got = engine.score([Request(token_ids=ids, adapter=name) for name in names])
    assert engine.report()["adapter_loads"] == 50
    assert engine.report()["adapters_kept_on_host"] == (50 if host_bytes is None else 0)
    few = PrefillEngine(world[0], adapters={f"a{i}": adapters[f"a{i}"] for i in range(3)}, options=options)
    want = few.score([Request(token_ids=ids, adapter=f"a{int(name[1:]) % 3}") for name in names])
    assert [result.token_logprobs for result in got] == [result.token_logprobs for result in want]
    assert len({result.logprob_sum for result in got}) == 3
