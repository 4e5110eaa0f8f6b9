"""Rows ordered by slot: the metadata of the csgmv backend. The products are those of `dense_lora` over sorted rows.

Rows of one slot may be scattered over the whole batch. They are put in order through a permutation (stable, so that the
order within a slot is that of the batch) and cut into chunks of 16 to 128 rows; shrink gathers its rows and expand
scatters the sums back. Nothing is copied: only the indices are sorted.
"""

from __future__ import annotations

import torch

from moelora.capacity import PrefillCapacity, csgmv_chunk_rows
from moelora_kernels.ops.csgmv.kernel import sort_by_slot
from moelora_kernels.ops.csgmv.naive import naive_chunks
from moelora_kernels.ops.dense_lora.tiles import TileList, cut_tiles

__all__ = ["chunk_capacity", "csgmv_chunk_rows", "naive_chunks", "order_rows", "sort_by_slot"]


def chunk_capacity(capacity: PrefillCapacity) -> int:
    """The most chunks of any batch of `capacity`: `csgmv_segments` is not monotone, because chunks grow with the batch.

    Where the chunk size steps up, the count of chunks drops by half; so the largest count is at the largest batch or
    just below a step.
    """
    steps = [rows * 16 - 1 for rows in (32, 64, 128) if rows * 16 - 1 <= capacity.max_tokens]
    return max(capacity.csgmv_segments(tokens) for tokens in (capacity.max_tokens, *steps))


def order_rows(slot_N: torch.Tensor, chunk_rows: int, chunks: TileList, perm_N: torch.Tensor) -> None:
    """Refreshes `chunks` and `perm_N` (int32 `[N]`) in place for rows of slots `slot_N` (int32 `[N]`, -1 = base).

    Base rows come last and are in no chunk. No host synchronisation.
    """
    assert perm_N.shape == slot_N.shape, f"{tuple(perm_N.shape)} for {tuple(slot_N.shape)} rows"
    cut_tiles(sort_by_slot(slot_N, perm_N), chunk_rows, chunks)
