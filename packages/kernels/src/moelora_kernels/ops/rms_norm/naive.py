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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (normalised, x + residual). See `rms_norm` for the variants and what is rounded when."""
    if residual is not None:
        x = x + residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight_W is None:
        return normed.to(x.dtype), x
    if variant == "model":
        return weight_W * normed.to(x.dtype), x
    if variant == "float":
        return (weight_W.float() * normed).to(x.dtype), x
    return (normed * (1.0 + weight_W.float())).to(x.dtype), x
