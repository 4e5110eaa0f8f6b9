"""Rotary position embedding (arXiv 2104.09864) in plain torch: the truth, rounded as the transformers functions do."""

from __future__ import annotations

import torch

LAYOUTS = ("half", "interleaved", "interleaved_to_half")
"""Which elements form a pair: (i, i + n/2), or (2i, 2i + 1); the last stores pairs of the second kind as the first."""


def naive_rotary(
    x_THD: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor, *, layout: str = "half", wide: bool = False
) -> torch.Tensor:
    """Rotates the first 2·P of D elements of every head; P angles per token. See `rotary` for the rounding."""
    pairs = cos_TP.shape[-1]
    turned, rest = x_THD[..., : 2 * pairs], x_THD[..., 2 * pairs :]
    first, second = (
        (turned[..., :pairs], turned[..., pairs:]) if layout == "half" else (turned[..., ::2], turned[..., 1::2])
    )
    cos, sin = cos_TP[:, None], sin_TP[:, None]
    if wide:
        first, second, cos, sin = first.float(), second.float(), cos.float(), sin.float()
    rotated = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(rotated, -1).flatten(-2) if layout == "interleaved" else torch.cat(rotated, -1)
    return torch.cat((joined.to(x_THD.dtype), rest), -1)
