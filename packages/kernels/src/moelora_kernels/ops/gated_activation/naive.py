"""Gated activations (arXiv 2002.05202) in plain torch: the truth, rounded as the transformers modules do."""

from __future__ import annotations

import torch
from torch.nn import functional

KINDS = ("silu", "gelu_tanh", "gelu", "gpt_oss")


def naive_gated_activation(
    gate_PI: torch.Tensor,
    up_PI: torch.Tensor,
    *,
    kind: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
) -> torch.Tensor:
    """act(gate) · up; for "gpt_oss" the clamped gate · sigmoid(alpha · gate) · (up + 1)."""
    if kind == "gpt_oss":
        gate = gate_PI.clamp(max=limit)
        up = up_PI.clamp(min=-limit, max=limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    if kind == "silu":
        return functional.silu(gate_PI) * up_PI
    return functional.gelu(gate_PI, approximate="tanh" if kind == "gelu_tanh" else "none") * up_PI
