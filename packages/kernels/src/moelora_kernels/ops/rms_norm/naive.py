"""RMSNorm (arXiv 1910.07467) in plain torch: the truth, with the rounding steps of the transformers modules."""

from __future__ import annotations

import torch

VARIANTS = ("model", "float", "one_plus")


def naive_rms_norm(
    x: torch.Tensor,
    weight_W: torch.Tensor | None,
    eps: float,
    *,
    variant: str = "model",
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x or x + residual, normalised; the sum is left in residual. See `rms_norm` for the variants and the rounding."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight_W is None:
        return normed.to(x.dtype)
    if variant == "model":
        return weight_W * normed.to(x.dtype)
    if variant == "float":
        return (weight_W.float() * normed).to(x.dtype)
    return (normed * (1.0 + weight_W.float())).to(x.dtype)
