"""Packed causal attention in plain torch, one sequence at a time, in float64: the ground truth."""

from __future__ import annotations

from itertools import pairwise

import torch


def naive_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    boundaries: list[int],
    *,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """`[T, H, Dv]`; rows behind the last boundary are zero."""
    T, H, _ = q_THD.shape
    repeat = H // k_TGD.shape[1]
    out = torch.zeros(T, H, v_TGD.shape[2], dtype=torch.float64, device=q_THD.device)
    for begin, end in pairwise(boundaries):
        q = q_THD[begin:end].double().transpose(0, 1)
        k = k_TGD[begin:end].double().repeat_interleave(repeat, 1).transpose(0, 1)
        v = v_TGD[begin:end].double().repeat_interleave(repeat, 1).transpose(0, 1)
        scores = q @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(end - begin, device=q.device)
        behind = at[:, None] - at[None, :]
        hidden = (behind < 0) | (behind >= (window if window is not None else end - begin))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks_H is not None:
            sink = sinks_H.double()[:, None, None].expand(H, end - begin, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[:, :, : end - begin]
        out[begin:end] = (weights @ v).transpose(0, 1)
    return out
