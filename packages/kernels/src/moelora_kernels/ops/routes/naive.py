"""Routes in plain torch: what the kernels must reproduce exactly. Synchronises with the host; never on the hot path."""

from __future__ import annotations

import torch


def naive_order(
    expert_ids_TK: torch.Tensor, token_slot_T: torch.Tensor, num_experts: int, num_slots: int, num_live: int
) -> tuple[torch.Tensor, list[int]]:
    """Pair ids `[P]` stably ordered by (expert, slot), pairs without an expert last, and rows per expert."""
    T, K = expert_ids_TK.shape
    ids_P = expert_ids_TK.reshape(-1).long()
    slot_P = token_slot_T.long().repeat_interleave(K)
    token_P = torch.arange(T * K) // max(K, 1)
    alive_P = (ids_P >= 0) & (ids_P < num_experts) & (token_P < num_live) & (slot_P >= -1) & (slot_P < num_slots)
    slot_key_P = torch.where((token_P < num_live) & (slot_P >= -1) & (slot_P < num_slots), slot_P + 1, num_slots + 1)
    expert_P = torch.where(alive_P, ids_P, num_experts)
    order_P = torch.argsort(expert_P * (num_slots + 2) + slot_key_P, stable=True)
    counts = torch.bincount(expert_P, minlength=num_experts + 1)[:num_experts]
    return order_P, counts.tolist()


def naive_tiles(
    order_P: torch.Tensor, token_slot_T: torch.Tensor, counts: list[int], top_k: int, block_m: int
) -> list[tuple[int, int, int, list[int]]]:
    """The tile list: (expert, first row, rows, adapter slots present in ascending order)."""
    tiles = []
    start = 0
    for expert, count in enumerate(counts):
        for first in range(start, start + count, block_m):
            rows = min(block_m, start + count - first)
            slots = token_slot_T[order_P[first : first + rows] // top_k].unique().tolist()
            tiles.append((expert, first, rows, [s for s in slots if s >= 0]))
        start += count
    return tiles
