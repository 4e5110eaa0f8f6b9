"""What becomes of an adapter's values on their way from the file: scaled once in fp32, the same each time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapter_writers import AdapterWriter
from core.layout_checks import EXPERTS, Q_PROJ, check_layout
from moelora.adapters.base import Catalogue
from moelora.adapters.layouts.base import put_scaled
from moelora.adapters.loader import load_adapter

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scale_is_folded_in_fp32_whatever_is_stored(qwen3: Catalogue, tmp_path: Path, dtype: torch.dtype) -> None:
    writer = (
        AdapterWriter(qwen3, dtype=dtype, alpha=7, rslora=True)
        .dense(Q_PROJ)
        .per_expert(EXPERTS)
        .wrapped("model.layers.0.mlp.experts")
    )
    check_layout(writer, tmp_path)
    adapter = load_adapter(tmp_path, name="a", catalogue=qwen3, dtype=torch.bfloat16)
    stored = writer.tensors[f"{Q_PROJ}.lora_B.weight"].float()
    assert torch.equal(adapter.factors[Q_PROJ].b, (stored * (7 / 3**0.5)).to(torch.bfloat16))


def test_loading_again_gives_the_same_and_leaves_the_file_alone(qwen3: Catalogue, tmp_path: Path) -> None:
    folder = AdapterWriter(qwen3).dense(Q_PROJ).per_expert(EXPERTS).write(tmp_path)
    before = (folder / "adapter_model.safetensors").read_bytes()
    first = load_adapter(folder, name="a", catalogue=qwen3, dtype=torch.float32)
    for _ in range(4):
        again = load_adapter(folder, name="a", catalogue=qwen3, dtype=torch.float32)
        assert all(torch.equal(first.factors[name].b, factors.b) for name, factors in again.factors.items())
    for factors in first.factors.values():  # what callers do with the factors never reaches the file
        factors.a.fill_(9)
    assert (folder / "adapter_model.safetensors").read_bytes() == before


class TestScaling:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_every_16_bit_number_is_scaled_in_fp32_and_rounded_once(self, dtype: torch.dtype) -> None:
        values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
        for scale in (2.0, 1 / 3, 0.7071067811865476, 1.7e-3, 123.456, -1.0):
            rows = torch.zeros(2, 65536, dtype=dtype)[1:, :]
            put_scaled(rows, values.unsqueeze(0), scale)
            expected = (values.float() * torch.tensor(scale, dtype=torch.float32)).to(dtype)
            torch.testing.assert_close(rows[0], expected, atol=0, rtol=0, equal_nan=True)

    def test_into_another_dtype(self) -> None:
        values = torch.randn(50, generator=torch.Generator().manual_seed(1))
        rows = torch.zeros(50, dtype=torch.bfloat16)
        put_scaled(rows, values, 1 / 3)
        assert torch.equal(rows, (values * (1 / 3)).to(torch.bfloat16))


def test_threads_change_nothing(qwen3: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = AdapterWriter(qwen3)
    writer.dense(Q_PROJ, "lm_head").embedding()
    for layer in (0, 1):
        writer.per_expert(f"model.layers.{layer}.mlp.experts")
    folder = writer.write(tmp_path)
    alone = load_adapter(folder, name="a", catalogue=qwen3, dtype=torch.bfloat16)
    monkeypatch.setattr("moelora.adapters.values._PARALLEL_NUMEL", 0)
    monkeypatch.setattr("moelora.adapters.values.cpu_count", lambda: 4)
    before = torch.get_num_threads()
    together = load_adapter(folder, name="a", catalogue=qwen3, dtype=torch.bfloat16)
    assert torch.get_num_threads() == before
    assert list(together.factors) == list(alone.factors)
    for name, factors in together.factors.items():
        assert torch.equal(factors.a, alone.factors[name].a)
        assert torch.equal(factors.b, alone.factors[name].b)
