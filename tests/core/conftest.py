"""Fixtures that several of these tests share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adapter_writers import catalogue_of
from moelora.adapters.base import Catalogue


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors hold NaN, so that an element which nobody writes shows."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() and tensor.device.type == "cpu" else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def qwen3() -> Catalogue:
    return catalogue_of("qwen3_moe")
