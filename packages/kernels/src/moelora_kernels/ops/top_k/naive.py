"""The k largest of each row in plain torch: the ground truth."""

from __future__ import annotations

import torch


def naive_top_k(x_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and int64 indices `[T, k]`, largest first, equals in ascending order of index, NaN above all."""
    order = x_TE.float().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return x_TE.gather(1, order), order


def naive_top_k_softmax(
    logits_TE: torch.Tensor, k: int, *, normed: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row's softmax, and int64 indices, both `[T, k]`; order as in `naive_top_k`."""
    order = naive_top_k(logits_TE, k)[1]
    values = logits_TE.float().softmax(-1).gather(1, order)
    if normed:
        values = values / values.sum(-1, keepdim=True)
    return values.to(dtype), order
