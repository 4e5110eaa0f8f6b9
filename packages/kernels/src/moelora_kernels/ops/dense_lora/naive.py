"""Dense LoRA in plain torch: the truth that the kernels are tested against. Any device, any dtype, with host syncs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moelora.backends.base import DenseSlots


def naive_dense_lora(x_TI: torch.Tensor, out_TO: torch.Tensor, slots: DenseSlots, slot_T: torch.Tensor) -> None:
    """out += B A x, each row with its own slot; rows of slot -1 or of a slot of rank 0 are left alone.

    Rounding: A x is accumulated in fp32 and rounded to x's dtype; B (A x) is accumulated in fp32, added to the output
    in fp32 and rounded once.
    """
    for slot, rank, rows in _slot_rows(slots, slot_T):
        y_NR = (x_TI[rows].float() @ slots.a_LRI[slot, :rank].float().T).to(x_TI.dtype)
        _add(out_TO, rows, y_NR, slots.b_LOR[slot, :, :rank])


def naive_embedding_lora(ids_T: torch.Tensor, out_TO: torch.Tensor, slots: DenseSlots, slot_T: torch.Tensor) -> None:
    """out += B A[:, id], as `naive_dense_lora` for a one-hot input. a_LRI is `[L, R, vocabulary]`."""
    for slot, rank, rows in _slot_rows(slots, slot_T):
        _add(out_TO, rows, slots.a_LRI[slot, :rank, ids_T[rows]].T, slots.b_LOR[slot, :, :rank])


def _slot_rows(slots: DenseSlots, slot_T: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Each adapter slot that has rows, with its rank, unless that is 0."""
    ranks = slots.ranks_L.tolist()
    for slot in slot_T.unique().tolist():
        if slot >= 0 and ranks[slot] > 0:
            yield slot, ranks[slot], (slot_T == slot).nonzero()[:, 0]


def _add(out_TO: torch.Tensor, rows: torch.Tensor, y_NR: torch.Tensor, b_OR: torch.Tensor) -> None:
    out_TO[rows] = (out_TO[rows].float() + y_NR.float() @ b_OR.float().T).to(out_TO.dtype)
