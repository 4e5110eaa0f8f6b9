"""What the tests of adapter layouts share: targets, and the comparison of every delta with one worked out by hand."""

from __future__ import annotations

from pathlib import Path

import torch

from adapter_writers import AdapterWriter, delta_of
from moelora.adapters.base import Adapter
from moelora.adapters.loader import load_adapter

EXPERTS = "model.layers.1.mlp.experts"
Q_PROJ = "model.layers.0.self_attn.q_proj"


def check_layout(writer: AdapterWriter, folder: Path, **options: object) -> Adapter:
    """Loads what the writer wrote and compares every target's delta."""
    adapter = load_adapter(writer.write(folder), name="a", catalogue=writer.catalogue, dtype=torch.float32, **options)  # type: ignore[arg-type]
    assert set(adapter.factors) == set(writer.deltas)
    for name, factors in adapter.factors.items():
        delta = delta_of(factors, writer.catalogue.targets[name])
        torch.testing.assert_close(delta, writer.expected_delta(name), rtol=1e-5, atol=1e-6)
        assert factors.a.is_contiguous()
        assert factors.b.is_contiguous()
    return adapter


def layouts_of(adapter: Adapter) -> dict[str, str]:
    """The layout of each target."""
    return {summary.target: summary.layout for summary in adapter.summaries}
