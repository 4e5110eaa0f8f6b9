"""The fused product in plain torch: the truth."""

from __future__ import annotations

import torch

from moelora.backends.base import DenseSlots


def naive_lora_gemm(
    x_TK: torch.Tensor,
    w_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    slots: DenseSlots | None,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    """x Wᵀ (+ bias) + B A x. A x is rounded to x's dtype, the sum is fp64 and rounded once."""
    out_TN = x_TK.double() @ w_NK.double().T
    if bias_N is not None:
        out_TN += bias_N.double()
    if slots is not None:
        for slot, rank in enumerate(slots.ranks_L.tolist()):
            rows = (slot_T == slot).nonzero()[:, 0]
            y_NR = (x_TK[rows].float() @ slots.a_LRI[slot, :rank].float().T).to(x_TK.dtype)
            out_TN[rows] += y_NR.double() @ slots.b_LOR[slot, :, :rank].double().T
    return out_TN.to(x_TK.dtype)
