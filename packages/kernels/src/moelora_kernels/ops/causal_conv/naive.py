"""Causal depthwise convolution in plain torch, each request from zeros: the truth, rounded as transformers' is."""

from __future__ import annotations

import torch
from torch.nn import functional

ACTIVATIONS = ("none", "silu")


def naive_causal_conv(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    positions_T: torch.Tensor,
    *,
    activation: str = "none",
) -> torch.Tensor:
    """act(bias + Σ weight[:, K − 1 − i] · x[t − i]) over the tokens t − i of t's own request."""
    tokens, width = weight_CK.shape[1], x_TC.shape[1]
    wide = torch.zeros(x_TC.shape[0], width, device=x_TC.device)
    for back in range(tokens):
        earlier = functional.pad(x_TC.float(), (0, 0, back, 0))[: x_TC.shape[0]]
        wide += torch.where(positions_T[:, None] >= back, earlier * weight_CK[:, tokens - 1 - back].float(), 0.0)
    if bias_C is not None:
        wide += bias_C.float()
    out = wide.to(x_TC.dtype)
    return functional.silu(out) if activation == "silu" else out
