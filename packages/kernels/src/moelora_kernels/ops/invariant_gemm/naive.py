"""The batch-invariant product in plain torch: the truth up to rounding. Accumulates in fp64, so it has no order."""

from __future__ import annotations

import torch


def naive_invariant_gemm(x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + bias, rounded once to x's dtype."""
    product = x_MK.double() @ w_NK.double().T
    if bias_N is not None:
        product += bias_N.double()
    return product.to(x_MK.dtype)
