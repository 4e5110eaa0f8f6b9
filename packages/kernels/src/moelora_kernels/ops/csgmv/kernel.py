"""The stable order of rows by slot. Sorting is left to torch, whose radix sort is stable and runs on any device."""

from __future__ import annotations

import torch

_BEHIND_ALL_SLOTS = 2**31 - 1


def sort_by_slot(slot_N: torch.Tensor, perm_N: torch.Tensor) -> torch.Tensor:
    """Writes the row behind each sorted position into `perm_N` and returns the sorted slots, base rows (-1) last."""
    key_N, order_N = torch.where(slot_N < 0, _BEHIND_ALL_SLOTS, slot_N).sort(stable=True)
    perm_N.copy_(order_N)
    return torch.where(key_N == _BEHIND_ALL_SLOTS, -1, key_N)
