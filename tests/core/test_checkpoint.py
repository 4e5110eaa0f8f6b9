"""Broken base checkpoints are refused by name; whole ones load from folders, indices, symlinks and the cache."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from arch_world import make, runnable
from moelora.errors import CheckpointError, ConfigError
from moelora.models.base_model import load_base, open_base
from moelora.models.checkpoint import INDEX, SINGLE, check_checkpoint, find_model_folder
from tiny_models import reference_logprobs, save_model

CPU = torch.device("cpu")
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, save_model(folder, "qwen3_moe")


@pytest.fixture
def folder(original, tmp_path):
    """A copy to break."""
    return shutil.copytree(original[0], tmp_path / "copy")


@pytest.fixture
def sharded(original, tmp_path):
    original[1].save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    index = json.loads((tmp_path / "sharded" / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 3
    return tmp_path / "sharded", index["weight_map"]


def load(folder):
    return load_base(open_base(folder), device=CPU)


def rewrite(path, change):
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_sharded_checkpoint_equals_the_single_file(original, sharded):
    one, many = load(original[0]).causal_lm.state_dict(), load(sharded[0]).causal_lm.state_dict()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_the_index_wins_over_a_stray_single_file(original, sharded):
    shutil.copy(original[0] / SINGLE, sharded[0] / SINGLE)
    rewrite(sharded[0] / SINGLE, lambda t: [v.mul_(0) for v in t.values()])
    loaded = load(sharded[0]).causal_lm
    torch.testing.assert_close(reference_logprobs_eager(loaded), reference_logprobs(original[1], PROMPT))


def reference_logprobs_eager(model):
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return reference_logprobs(model, PROMPT)


def test_symlinked_cache_snapshot(original, tmp_path, monkeypatch):
    from huggingface_hub import constants

    repo = tmp_path / "hub" / "models--org--tiny"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for source in original[0].iterdir():
        shutil.copy(source, repo / "blobs" / source.name)
        (snapshot / source.name).symlink_to(repo / "blobs" / source.name)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    import huggingface_hub._snapshot_download as download

    monkeypatch.setattr(download.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert find_model_folder("org/tiny") == snapshot
    assert load("org/tiny").architecture.model_type == "qwen3_moe"


def test_a_missing_shard_is_named(sharded):
    folder, weight_map = sharded
    shard = sorted(set(weight_map.values()))[2]
    (folder / shard).unlink()
    with pytest.raises(CheckpointError, match=shard):
        load(folder)


def test_a_tensor_missing_from_shard_and_index_is_named(sharded):
    folder, weight_map = sharded
    name = next(n for n in weight_map if "q_proj" in n)
    rewrite(folder / weight_map[name], lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=name):
        load(folder)  # the index still names it
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks .*q_proj"):
        load(folder)


@pytest.mark.parametrize(
    "missing", ["experts.3.up_proj", "experts.0.gate_proj", "experts.5.down_proj", "lm_head", "mlp.gate."]
)
def test_a_missing_tensor_is_never_initialised_at_random(folder, missing):
    def drop(tensors):
        for name in [n for n in tensors if missing in n][:1]:
            del tensors[name]

    rewrite(folder / SINGLE, drop)
    with pytest.raises(CheckpointError):
        load(folder)


def test_an_unexpected_copy_is_named(sharded):
    folder, weight_map = sharded
    name = next(n for n in weight_map if "k_proj" in n)
    last = sorted(set(weight_map.values()))[-1]
    rewrite(folder / last, lambda t: t.update({name: torch.zeros(32, 32)}))
    with pytest.raises(CheckpointError, match=f"unexpected copy of tensor {name}"):
        load(folder)


def test_layers_that_the_config_does_not_count_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "max_window_layers": 1}))
    with pytest.raises(CheckpointError, match=r"says 1 layers .* up to number 1"):
        load(folder)
    # A config that announces the layer for multi-token prediction may have it skipped.
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "num_nextn_predict_layers": 1}))
    assert all(name.startswith("model.layers.1.") for name in load(folder).skipped)


def test_an_unknown_tensor_is_named_and_prediction_layers_are_skipped(folder):
    rewrite(
        folder / SINGLE,
        lambda t: t.update({n: torch.zeros(2) for n in ("mtp.fc.weight", "model.layers.2.eh_proj.weight")}),
    )
    assert load(folder).skipped == ("model.layers.2.eh_proj.weight", "mtp.fc.weight")
    rewrite(folder / SINGLE, lambda t: t.update({"model.layers.1.x.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.x\.weight"):
        load(folder)


def test_a_tensor_of_another_shape_is_named(folder):
    rewrite(folder / SINGLE, lambda t: t.update({"model.norm.weight": torch.zeros(31)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*31"):
        load(folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda b: b[:-100], "cut off"),
        (lambda b: b"", "0 bytes"),
        (lambda b: b[:20], "cut off"),
        (lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git-lfs"),
        (lambda b: b + bytes(64), "do not belong"),
        (lambda b: (2**60).to_bytes(8, "little") + b[8:], "header"),
        (lambda b: b[:8] + b"x" * 50 + b[58:], "header"),
    ],
)
def test_damaged_files_are_named_with_the_likely_cause(folder, damage, said):
    path = folder / SINGLE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=said) as caught:
        load(folder)
    assert SINGLE in str(caught.value)


def test_folders_without_a_model(tmp_path):
    with pytest.raises(CheckpointError, match=r"does not exist|neither"):
        find_model_folder(tmp_path / "nowhere")
    (tmp_path / "model-30b").mkdir()
    with pytest.raises(CheckpointError, match=r"does not exist; did you mean '.*/model-30b'\?$"):
        find_model_folder(tmp_path / "model-3b")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        find_model_folder(tmp_path / "file")


def test_only_a_pickle_is_refused(folder):
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        check_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "no_such_thing"}, "not understood"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
    ],
)
def test_configs_that_cannot_run(folder, change, said):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=said):
        load(folder)


def test_invalid_config_json(folder):
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load(folder)


def test_dummy_weights_need_a_config_alone(folder):
    (folder / SINGLE).unlink()
    base = load_base(open_base(folder, load_format="dummy"), device=CPU, dtype="bfloat16")
    assert base.dtype == torch.bfloat16
    assert all(torch.isfinite(p).all() for p in base.causal_lm.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "hy_v4",  # lm_head and more in float32
        "inkling",  # a config of the text part that does not say whether the head is tied
    ],
)
def test_dummy_weights_have_the_dtypes_of_loaded_ones(tmp_path, name):
    model_class, config = runnable(name, torch.bfloat16)
    make(model_class, config, seed=3).save_pretrained(tmp_path)
    dummy = load_base(open_base(tmp_path, load_format="dummy"), device=CPU, dtype="bfloat16").causal_lm
    loaded = load_base(open_base(tmp_path), device=CPU, dtype="bfloat16").causal_lm
    dtypes = {key: x.dtype for key, x in dummy.named_parameters()}
    assert dtypes == {key: x.dtype for key, x in loaded.named_parameters()}
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}


def test_dtypes(folder):
    assert load(folder).dtype == torch.float32
    with pytest.raises(ConfigError, match="bfloat16"):
        load_base(open_base(folder), device=CPU, dtype="bf16")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_memory_that_runs_out_is_no_fault_of_the_config(folder, monkeypatch, error, load_format):
    source = open_base(folder, load_format=load_format)

    def fail(*args, **kwargs):
        raise error

    name = "from_pretrained" if load_format == "auto" else "_from_config"
    whole = source.skeleton()
    monkeypatch.setattr(type(source), "skeleton", lambda self: whole)
    monkeypatch.setattr(source.model_class, name, fail)
    with pytest.raises(CheckpointError, match=r"out of memory on cpu while loading .*: its weights alone take 0.0 GiB"):
        load_base(source, device=torch.device("cpu"))
