"""The scoring head in plain torch: all logits at once, in float64. The ground truth; ties go to the lowest id."""

from __future__ import annotations

import torch

from moelora.backends.base import DenseSlots


def naive_scores(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    slots: DenseSlots | None = None,
    row_slot_N: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    top_k: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(target log-probability, arg-max id, its log-probability, log-sum-exp, top ids, their log-probabilities)."""
    x = hidden_NH.double()
    logits = x @ weight_VH.double().T
    if bias_V is not None:
        logits = logits + bias_V.double()
    if slots is not None and row_slot_N is not None:
        for slot in row_slot_N.unique().tolist():
            rows = row_slot_N == slot
            if slot >= 0:
                logits[rows] += x[rows] @ slots.a_LRI[slot].double().T @ slots.b_LOR[slot].double().T
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    lse_N = torch.logsumexp(logits, -1)
    valid_N = (targets_N >= 0) & (targets_N < weight_VH.shape[0])
    target_N = logits.gather(1, targets_N.long().clamp(0, weight_VH.shape[0] - 1)[:, None])[:, 0]
    target_N = torch.where(valid_N, target_N - lse_N, torch.nan)
    top = logits.sort(dim=-1, descending=True, stable=True)
    best_N = top.values[:, 0] - lse_N
    return target_N, top.indices[:, 0], best_N, lse_N, top.indices[:, :top_k], top.values[:, :top_k] - lse_N[:, None]
