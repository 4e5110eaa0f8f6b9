"""Batch invariance: every dense product of a forward through one GEMM whose order of accumulation never changes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from moelora.backends.fused_ops import FusedOps


class InvariantProducts(TorchFunctionMode):
    """Sends `F.linear` to the backend's own GEMM: libraries choose their algorithm by the row count, it does not.

    Seen from here are attention projections, routers, shared experts and lm_head of any architecture.
    """

    def __init__(self, ops: FusedOps) -> None:
        self._ops = ops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows_MK = input.reshape(-1, input.shape[-1])
        return self._ops.linear(rows_MK, weight, bias).view(*input.shape[:-1], weight.shape[0])
