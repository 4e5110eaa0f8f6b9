"""Dense LoRA in plain torch: the truth that the kernels are tested against. Any device, any dtype, slow."""

from __future__ import annotations

import torch

from moelora.backends.base import DenseSlots


def naive_dense_lora(x_TI: torch.Tensor, out_TO: torch.Tensor, slots: DenseSlots, slot_T: torch.Tensor) -> None:
    """out += B A x, row by row with the row's own slot; rows of slot -1 or of a slot of rank 0 are left alone.

    Rounding: A x is accumulated in fp32 and rounded to x's dtype; B (A x) is accumulated in fp32, added to the output in
    fp32 and rounded once.
    """
    for t, slot in enumerate(slot_T.tolist()):
        if slot < 0:
            continue
        rank = int(slots.ranks_L[slot])
        if rank:
            y_R = (slots.a_LRI[slot, :rank].float() @ x_TI[t].float()).to(x_TI.dtype)
            _add(out_TO, t, slots.b_LOR[slot, :, :rank].float() @ y_R.float())


def naive_embedding_lora(ids_T: torch.Tensor, out_TO: torch.Tensor, slots: DenseSlots, slot_T: torch.Tensor) -> None:
    """out += B A[:, id], as `naive_dense_lora` for a one-hot input. a_LRI is `[L, R, vocabulary]`."""
    for t, slot in enumerate(slot_T.tolist()):
        if slot < 0:
            continue
        rank = int(slots.ranks_L[slot])
        if rank:
            y_R = slots.a_LRI[slot, :rank, int(ids_T[t])]
            _add(out_TO, t, slots.b_LOR[slot, :, :rank].float() @ y_R.float())


def _add(out_TO: torch.Tensor, t: int, delta_O: torch.Tensor) -> None:
    out_TO[t] = (out_TO[t].float() + delta_O).to(out_TO.dtype)
