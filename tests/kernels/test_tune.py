"""Tuning the experts' kernels: which configurations are taken, what the table says of them, and who reads it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moelora.errors import ConfigError
from moelora.models.base_model import open_base
from moelora.models.experts import is_experts_module, moe_shapes
from moelora_cli.main import main
from moelora_kernels import tune
from moelora_kernels.ops.experts import table
from moelora_kernels.ops.experts.config import MoeConfig, ProductConfig, default_config
from moelora_kernels.ops.experts.table import ExpertsKey, Tuned, load_table, pick_config, save_table
from tiny_models import tiny_config

CPU = torch.device("cpu")
BLOCKS = ProductConfig(block_n=128, block_k=64, warps=4, stages=3)
CONFIG = MoeConfig(block_m=64, up=BLOCKS, down=BLOCKS, shrink=replace(BLOCKS, block_n=64))


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """An empty folder that tables are read from."""
    monkeypatch.setenv(table.VARIABLE, str(tmp_path))
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    table.read_table.cache_clear()
    yield tmp_path
    table.read_table.cache_clear()


@pytest.fixture(params=["qwen3_moe", "gpt_oss"])
def layer(request, tmp_path):
    """Weights and shape of a tiny experts layer; gpt_oss is transposed, interleaved and has biases."""
    tiny_config(request.param).save_pretrained(tmp_path / "model")
    source = open_base(tmp_path / "model", load_format="dummy")
    module = next(m for m in source.skeleton().modules() if is_experts_module(m))
    (shape,) = moe_shapes(module, source.config, {})
    return tune.layer_weights(module, CPU, torch.float16), shape  # the interpreter has no bfloat16 products


def tuned(tokens: int, rows: int = 64) -> Tuned:
    return Tuned(tokens=tokens, config=replace(CONFIG, block_m=rows), ms=1.0, default_ms=2.0)


class TestTable:
    def test_what_is_saved_is_read(self, layer, own_folder):
        base, shape = layer
        path = table.table_path("cpu")
        save_table(path, {ExpertsKey.of(base, shape.top_k): (tuned(16), tuned(64, 128))})
        assert path.parent == own_folder
        assert load_table(path) == {ExpertsKey.of(base, shape.top_k): (tuned(16), tuned(64, 128))}
        for tokens, entry in ((1, tuned(16)), (16, tuned(16)), (17, tuned(64, 128)), (64, tuned(64, 128))):
            assert pick_config(base, tokens=tokens, top_k=shape.top_k) == entry.config
        beyond = {"tokens": 65, "top_k": shape.top_k}
        built_in = default_config(**beyond, num_experts=shape.num_experts, dtype=torch.float16)
        assert pick_config(base, **beyond) == built_in != tuned(64, 128).config

    def test_other_shapes_and_dtypes_get_the_built_in_one(self, layer, own_folder):
        base, shape = layer
        key = ExpertsKey.of(base, shape.top_k)
        assert (key.hidden, key.inter, key.transposed) == (shape.hidden, shape.inter, base.transposed)
        save_table(table.table_path("cpu"), {replace(key, hidden=key.hidden + 1): (tuned(16),)})
        found = pick_config(base, tokens=8, top_k=shape.top_k)
        assert found == default_config(tokens=8, top_k=shape.top_k, num_experts=key.num_experts, dtype=torch.float16)
        assert pick_config(base, tokens=8, top_k=shape.top_k + 1).up == found.up

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda c: c.update(block_m=32), "block_m 32 is not between 64 and 128"),
            (lambda c: c.update(block_m=256), "block_m 256 is not between 64 and 128"),
            (lambda c: c["up"].update(block_k=32), "block_k of up must be 64"),
            (lambda c: c["down"].pop("warps"), "expected the keys"),
            (lambda c: c.pop("shrink"), "shrink"),
        ],
    )
    def test_configurations_that_could_change_bits_are_refused(self, layer, own_folder, change, said):
        base, shape = layer
        path = table.table_path("cpu")
        save_table(path, {ExpertsKey.of(base, shape.top_k): (tuned(16),)})
        content = json.loads(path.read_text())
        change(content["shapes"][0]["tuned"][0]["config"])
        path.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=said):
            pick_config(base, tokens=8, top_k=shape.top_k)

    def test_no_table_is_no_error(self, layer, own_folder):
        assert table.read_table("some_GPU") == {}

    def test_every_table_of_the_package_can_be_read(self):
        for path in Path(table.__file__).parents[2].glob("tuned/*.json"):
            assert load_table(path)


def timer_for(favourite: ProductConfig, seen: list[MoeConfig]) -> tuple[tune.Timer, object]:
    """A timer by which configurations are faster the more of them equals `favourite`, and the hook that tells which."""
    now = SimpleNamespace(config=None)

    def timer(work: object) -> float:
        seen.append(now.config)
        up, down = now.config.up, now.config.down
        return 10.0 - (up == favourite) - (down == favourite) - (now.config.block_m == 128)

    return timer, now


@pytest.fixture
def few_candidates(monkeypatch):
    monkeypatch.setattr(tune, "_TILES", {64: ((128, 4),), 128: ((128, 8),)})
    monkeypatch.setattr(tune, "_STAGES", (3, 4))
    monkeypatch.setattr(tune, "_GROUPS", (2,))


class TestSearch:
    def run_noting(self, monkeypatch, now, spoil=lambda config, out: out):
        """Runs of the kernel, noting the configuration, and spoiling results where a test wants it."""
        real = tune.experts_lora

        def noted(*args, config, **kwargs):
            now.config = config
            return spoil(config, real(*args, config=config, **kwargs))

        monkeypatch.setattr(tune, "experts_lora", noted)

    def test_the_fastest_is_found(self, layer, few_candidates, monkeypatch):
        base, shape = layer
        favourite = ProductConfig(block_n=128, block_k=64, warps=8, stages=3, group=2)
        seen: list[MoeConfig] = []
        timer, now = timer_for(favourite, seen)
        self.run_noting(monkeypatch, now)
        (found,) = tune.tune_experts(base, shape, tokens=[12], slots=2, rank=4, timer=timer)
        assert (found.tokens, found.config.block_m) == (12, 128)
        assert found.config.up == found.config.down == favourite
        assert found.ms == 2 * 7.0
        assert found.default_ms > found.ms

    def test_other_bits_are_refused_however_fast(self, layer, few_candidates, monkeypatch):
        base, shape = layer
        seen: list[MoeConfig] = []
        timer, now = timer_for(ProductConfig(block_n=128, block_k=64, warps=8, stages=3, group=2), seen)

        def spoil(config: MoeConfig, out: torch.Tensor) -> torch.Tensor:
            return out if config.block_m == 64 else out + out.abs().max() * 2**-7

        self.run_noting(monkeypatch, now, spoil)
        said: list[str] = []
        (found,) = tune.tune_experts(base, shape, tokens=[12], slots=2, rank=4, timer=timer, on_event=said.append)
        assert found.config.block_m == 64
        assert all(config.block_m == 64 for config in seen)
        assert "0 refused" not in said[0]

    def test_a_built_in_configuration_that_is_wrong_stops_it(self, layer, monkeypatch):
        base, shape = layer
        real = tune.experts_lora
        monkeypatch.setattr(tune, "experts_lora", lambda *a, **k: real(*a, **k) * 1.02)
        with pytest.raises(ConfigError, match="wrong on this device"):
            list(tune.tune_experts(base, shape, tokens=[12], slots=2, rank=4, timer=lambda work: 1.0))

    def test_fp32_is_not_tuned(self, layer):
        base, shape = layer
        with pytest.raises(ConfigError, match="16-bit"):
            list(tune.tune_experts(replace(base, up=base.up.float()), shape, timer=lambda work: 1.0))


class TestCommand:
    def test_writes_the_table_and_keeps_other_shapes(self, tmp_path, own_folder, capfd, monkeypatch):
        tiny_config("qwen3_moe").save_pretrained(tmp_path / "model")
        path = table.table_path("cpu")
        other = ExpertsKey(num_experts=1, top_k=1, hidden=2, inter=2, gated=True, transposed=False, dtype="bfloat16")
        save_table(path, {other: (tuned(16),)})
        monkeypatch.setattr("moelora.environment.resolve_device", lambda name: SimpleNamespace(type="cuda"))
        monkeypatch.setattr(table, "device_name", lambda device: "cpu")
        monkeypatch.setattr(tune, "layer_weights", lambda module, device, dtype: layer_on_cpu(module, CPU, dtype))
        monkeypatch.setattr(tune, "tune_experts", lambda base, shape, tokens, on_event: tuple(map(tuned, tokens)))
        with pytest.raises(SystemExit) as left:
            main(["tune", str(tmp_path / "model"), "--tokens", "16,32"])
        out, _ = capfd.readouterr()
        assert not left.value.code
        assert f"written to {path}" in out
        assert out.count("128/4/3/1, 128/4/3/1") == 2
        found = load_table(path)
        assert found.pop(other) == (tuned(16),)
        ((key, entries),) = found.items()
        assert key.num_experts == 6
        assert [one.tokens for one in entries] == [16, 32]

    def test_an_interrupted_run_keeps_what_it_found(self, tmp_path, own_folder, capfd, monkeypatch):
        def interrupted(base, shape, tokens, on_event):
            yield tuned(16)
            raise KeyboardInterrupt

        tiny_config("qwen3_moe").save_pretrained(tmp_path / "model")
        monkeypatch.setattr("moelora.environment.resolve_device", lambda name: SimpleNamespace(type="cuda"))
        monkeypatch.setattr(table, "device_name", lambda device: "cpu")
        monkeypatch.setattr(tune, "layer_weights", lambda module, device, dtype: layer_on_cpu(module, CPU, dtype))
        monkeypatch.setattr(tune, "tune_experts", interrupted)
        with pytest.raises(SystemExit) as left:
            main(["tune", str(tmp_path / "model")])
        assert left.value.code == 130
        ((_, entries),) = load_table(table.table_path("cpu")).items()
        assert entries == (tuned(16),)

    def test_needs_a_gpu_and_experts(self, tmp_path, capfd):
        tiny_config("qwen3_moe").save_pretrained(tmp_path / "model")
        with pytest.raises(SystemExit) as left:
            main(["tune", str(tmp_path / "model"), "--device", "cpu"])
        assert left.value.code == 2
        assert "are tuned on a CUDA device" in capfd.readouterr().err


layer_on_cpu = tune.layer_weights
