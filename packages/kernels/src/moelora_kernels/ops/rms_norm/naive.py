"""RMSNorm (arXiv 1910.07467) in plain torch: the truth, with the rounding steps of the transformers modules."""

from __future__ import annotations

import torch
from torch.nn import functional


def naive_rms_norm(
    x: torch.Tensor,
    weight_W: torch.Tensor | None,
    eps: float,
    *,
    variant: str = "model",
    residual: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    gate_kind: str = "silu",
) -> torch.Tensor:
    """x or x + residual, normalised; the sum is left in residual. See `rms_norm` for the variants and the rounding."""
    if residual is not None:
        x = residual.add_(x)
    normed = _normed(x, weight_W, eps, variant)
    if gate is not None:
        normed = normed * (functional.silu if gate_kind == "silu" else torch.sigmoid)(gate.float())
    return normed.to(x.dtype)


def _normed(x: torch.Tensor, weight_W: torch.Tensor | None, eps: float, variant: str) -> torch.Tensor:
    """In x's dtype, or in fp32 where it is not rounded by then."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight_W is None:
        return normed.to(x.dtype)
    if variant == "model":
        return weight_W * normed.to(x.dtype)
    if variant == "float":
        return weight_W.float() * normed
    return normed * (1.0 + weight_W.float())
