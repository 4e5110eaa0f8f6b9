"""Several projections of few rows: one product of torch's for all of it, A x included where it can be.

With few rows it is launches and half-filled devices that cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moelora.backends.base import DenseSlots
from moelora_kernels.ops.dense_lora import MAX_FUSED, RowTiles, dense_lora, expand_every_slot

MOST_FACTORS = 0.25
"""Share of a projection's columns up to which factors A of all slots are computed along with it."""


def joined_projections(
    x_TK: torch.Tensor,
    weights_NK: Sequence[torch.Tensor],
    biases_N: Sequence[torch.Tensor | None],
    slots: Sequence[DenseSlots],
    rows: RowTiles | None,
    *,
    scratch: torch.Tensor | None = None,
) -> list[torch.Tensor] | None:
    """x Wᵀ (+ bias) + B A x for several projections of one input, `[T, N_i]` each, as columns of one result.

    rows: None leaves LoRA out. The rest as for `dense_lora`. Where they are few beside W's, the factors A of all slots
    are further rows of W: a row's A x is made for slots that it does not have too, which takes less time than a kernel
    of its own. None unless weights and biases, or weights and factors, lie one behind the other.
    """
    num, widths = len(weights_NK), [weight.shape[0] for weight in weights_NK]
    if rows is not None and num <= MAX_FUSED and not any(bias is not None for bias in biases_N):
        factors = [one.a_LRI.flatten(0, 1) for one in slots]
        columns = sum(a.shape[0] for a in factors)
        whole_NK = joined([*weights_NK, *factors]) if columns <= MOST_FACTORS * sum(widths) else None
        if whole_NK is not None:
            *outs, y_TC = torch.nn.functional.linear(x_TK, whole_NK).split([*widths, columns], dim=1)
            expand_every_slot(y_TC, outs, slots, rows)
            return outs
    weight_NK, bias_N = joined(weights_NK), joined(biases_N)
    if num < 2 or weight_NK is None or (bias_N is None and any(bias is not None for bias in biases_N)):
        return None
    outs = list(torch.nn.functional.linear(x_TK, weight_NK, bias_N).split(widths, dim=1))
    if rows is not None:
        dense_lora(x_TK, outs, slots, rows, scratch=scratch)
    return outs


def joined(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The tensors as one, `[Σ N_i, …]`, without a copy; None unless they lie one behind the other in one storage."""
    first = tensors[0]
    if first is None:
        return None
    # Storages can be neighbours by chance, and no view reaches from one into the next.
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        if tensor is None or tensor.untyped_storage().data_ptr() != storage or tensor.data_ptr() != end:
            return None
        if not tensor.is_contiguous() or tensor.dtype is not first.dtype:
            return None
        end += tensor.numel() * tensor.element_size()
    rows = sum(tensor.shape[0] for tensor in tensors if tensor is not None)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
