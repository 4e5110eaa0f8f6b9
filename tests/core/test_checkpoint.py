"""Broken base checkpoints are refused by name; whole ones load from folders, indices, symlinks and the cache."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from arch_world import make, runnable
from moelora.errors import CheckpointError, ConfigError
from moelora.models.base_model import load_base, open_base
from moelora.models.checkpoint import INDEX, SINGLE, check_checkpoint, find_model_folder
from moelora.models.tensor_names import check_numbers
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


def renamed(tensors, old, new):
    """Renames every tensor whose name holds `old`, and returns the names that are gone."""
    gone = [name for name in tensors if old in name]
    for name in gone:
        tensors[name.replace(old, new)] = tensors.pop(name)
    return gone


@pytest.mark.parametrize(
    ("old", "new", "lacks"),
    [
        ("experts.3.", "experts.6.", "layers.0.mlp.experts.3.down_proj"),  # as many as the config says, in all layers
        ("layers.1.mlp.experts.3.", "layers.1.mlp.experts.6.", "layers.1.mlp.experts.3.down_proj"),
        ("layers.1.mlp.experts.3.gate_proj", "layers.1.mlp.experts.6.gate_proj", "layers.1.mlp.experts.3.gate_proj"),
        ("layers.1.mlp.experts.0.down_proj", "layers.1.mlp.experts.6.down_proj", "layers.1.mlp.experts.0.down_proj"),
        ("layers.1.mlp.experts.5.up_proj", "layers.1.mlp.experts.05.up_proj", "layers.1.mlp.experts.5.up_proj"),
        ("layers.1.mlp.experts.2.", "layers.1.moe.experts.2.", "layers.1.mlp.experts.2.down_proj"),
    ],
)
def test_experts_whose_numbers_have_a_gap_are_refused(folder, old, new, lacks):
    """They would be stacked in the order of their numbers, each behind the gap in another's place."""
    rewrite(folder / SINGLE, lambda t: renamed(t, old, new))
    with pytest.raises(
        CheckpointError, match=rf"lacks tensors? model\.{re.escape(lacks)}\.weight.* from 0 to 5"
    ) as caught:
        open_base(folder)  # nothing is read for it
    held = re.escape(new if new.count(".") > 2 else f"layers.0.mlp.{new}")
    assert re.search(rf"holds tensors? model\.{held}", str(caught.value)) or "moe" in new


def test_a_tensor_of_one_expert_is_missing_or_of_another_shape(folder, original):
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    rewrite(folder / SINGLE, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=rf"the checkpoint lacks tensor {re.escape(name)}; .* from 0 to 5"):
        load(folder)
    shutil.copy(original[0] / SINGLE, folder / SINGLE)
    rewrite(folder / SINGLE, lambda t: t.update({name: torch.zeros(23, 32)}))
    with pytest.raises(CheckpointError, match=rf"tensor {re.escape(name)} has shape \(23, 32\), .* is \(24, 32\)"):
        load(folder)
    shutil.copy(original[0] / SINGLE, folder / SINGLE)
    rewrite(
        folder / SINGLE,
        lambda t: [t.update({k: v[:, 1:].contiguous()}) for k, v in list(t.items()) if "gate_proj" in k],
    )
    with pytest.raises(CheckpointError, match=r"shapes of its tensors do not go together"):
        load(folder)


def test_an_expert_that_only_one_projection_has_is_too_many(folder):
    extra = "model.layers.1.mlp.experts.6.up_proj.weight"
    rewrite(folder / SINGLE, lambda t: t.update({extra: torch.zeros(24, 32)}))
    with pytest.raises(CheckpointError, match=rf"the checkpoint holds tensor {re.escape(extra)}; .* from 0 to 5"):
        load(folder)


def test_numbers_are_compared_in_each_layer_alone_and_only_where_experts_are_stacked():
    def names(layer, numbers):
        return [f"model.layers.{layer}.mlp.experts.{n}.{p}_proj.weight" for n in numbers for p in ("up", "down")]

    loose = torch.nn.ModuleDict()  # holds each expert under its own number, with a gap

    def stacked():
        return torch.nn.Module()

    check_numbers(CPU, [*names(0, range(4)), *names(1, range(6)), "model.layers.2.mlp.up_proj.weight"], 3, stacked)
    beyond = [*names(3, (0, 2)), "mtp.layers.0.mlp.experts.7.up_proj.weight", "vision_tower.experts.1.weight"]
    check_numbers(CPU, [*names(0, range(4)), *beyond], 3, stacked)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.1\.down_proj"):
        check_numbers(CPU, [*names(0, range(4)), *names(2, (0, 2))], 3, stacked)
    loose.state_dict = lambda: dict.fromkeys(names(2, (0, 2)))
    check_numbers(CPU, [*names(0, range(4)), *names(2, (0, 2))], 3, lambda: loose)


@pytest.mark.filterwarnings("ignore")
def test_projections_may_differ_in_how_many_experts_they_have_where_the_model_does(tmp_path):
    model_class, config = runnable("longcat_flash")
    make(model_class, config, seed=3).save_pretrained(tmp_path)
    stored = {name for name in load_file(tmp_path / SINGLE) if ".experts.8." in name}
    assert any("up_proj" in name for name in stored)
    assert not any("down_proj" in name for name in stored)
    load(tmp_path)
    rewrite(
        tmp_path / SINGLE, lambda t: renamed(t, "layers.0.mlp.experts.8.up_proj", "layers.0.mlp.experts.12.up_proj")
    )
    with pytest.raises(CheckpointError, match=r"lacks tensor .*experts\.8\.up_proj.* and holds tensor .*experts\.12\."):
        open_base(tmp_path)


@pytest.mark.parametrize(
    ("name", "one"),
    [
        *((name, ".experts.1.") for name in ("deepseek_v4", "ernie4_5_vl_moe", "jamba", "kimi_k25", "lfm2_moe")),
        *((name, ".experts.1.") for name in ("minimax_m2", "mistral_large4", "mixtral", "nemotron_h", "phimoe")),
        *(("qwen4_exp", one) for one in (".experts.1.", ".shard_1.")),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_gaps_are_found_whatever_an_architecture_calls_what_it_stacks(tmp_path, name, one):
    model_class, config = runnable(name)
    make(model_class, config, seed=3).save_pretrained(tmp_path)
    open_base(tmp_path)
    first = next(n for n in load_file(tmp_path / SINGLE) if one in n)
    rewrite(tmp_path / SINGLE, lambda t: renamed(t, first, first.replace(one, one.replace("1", "999"))))
    with pytest.raises(CheckpointError, match=rf"lacks tensor {re.escape(first)} and holds .*999"):
        open_base(tmp_path)


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
