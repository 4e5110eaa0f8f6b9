"""Tile lists: which rows one tile of a dense LoRA kernel takes, and of which slot. Built on the device, without a sync.

C: tiles that a list can hold. N: rows that were cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TileList:
    """Tiles of at most `tile_rows` consecutive rows of one adapter slot. Base rows are in no tile.

    count_1: int32 `[1]`, live tiles. start_C, rows_C, slot_C: int32 `[C + 1]`, first row, number of rows, slot. Unused
    tiles have 0 rows and slot -1. The last entry collects the rows that belong to no tile and is read by nobody.
    """

    count_1: torch.Tensor
    start_C: torch.Tensor
    rows_C: torch.Tensor
    slot_C: torch.Tensor

    @property
    def capacity(self) -> int:
        """C."""
        return self.slot_C.shape[0] - 1

    def view(self, capacity: int) -> TileList:
        """The same buffers, cut to a smaller capacity."""
        assert capacity <= self.capacity
        cut = slice(0, capacity + 1)
        return TileList(self.count_1, self.start_C[cut], self.rows_C[cut], self.slot_C[cut])


def make_tile_list(capacity: int, device: torch.device) -> TileList:
    """Allocates an empty list for `capacity` tiles."""
    start_C, rows_C = torch.zeros((2, capacity + 1), dtype=torch.int32, device=device)
    slot_C = torch.full((capacity + 1,), -1, dtype=torch.int32, device=device)
    return TileList(torch.zeros(1, dtype=torch.int32, device=device), start_C, rows_C, slot_C)


def cut_tiles(slot_N: torch.Tensor, tile_rows: int, tiles: TileList) -> None:
    """Cuts the runs of equal slots in `slot_N` (int32 `[N]`, -1 = base) into tiles, in place and in row order.

    Neighbouring requests of one slot form one run. Every entry of `tiles` is rewritten, so that nothing of an earlier
    batch survives. The caller guarantees that the tiles fit: `PrefillCapacity.dense_tiles` for packed requests,
    `csgmv_segments` for sorted rows, N for loose ones.
    """
    tiles.start_C.zero_()
    tiles.rows_C.zero_()
    tiles.slot_C.fill_(-1)
    rows = slot_N.shape[0]
    if rows == 0:
        tiles.count_1.zero_()
        return
    index_N = torch.arange(rows, device=slot_N.device)
    first_N = torch.ones(rows, dtype=torch.bool, device=slot_N.device)
    torch.ne(slot_N[1:], slot_N[:-1], out=first_N[1:])
    run_start_N = torch.where(first_N, index_N, 0).cummax(0).values
    adapted_N = slot_N >= 0
    head_N = ((index_N - run_start_N) % tile_rows == 0) & adapted_N
    tile_N = head_N.cumsum(0)
    tiles.count_1.copy_(tile_N[-1:])
    # Rows without a tile, and rows that head none, go to the entry behind the last.
    nowhere = tiles.capacity
    tiles.rows_C.scatter_add_(0, torch.where(adapted_N, tile_N - 1, nowhere), torch.ones_like(slot_N))
    head_to_N = torch.where(head_N, tile_N - 1, nowhere)
    tiles.start_C.scatter_(0, head_to_N, index_N.to(torch.int32))
    tiles.slot_C.scatter_(0, head_to_N, slot_N)


def pick_tile_rows(tokens: int) -> int:
    """Rows of a tile, a multiple of 16 that depends on the bucket alone.

    Memory traffic is the cost, so a tile should be large enough to reuse its factors (64 rows of 128 columns move
    32 KB for 4 KB of B at rank 16) and small enough to fill the device. The order of accumulation does not depend on
    it.
    """
    for rows, least in ((64, 4096), (32, 512)):
        if tokens >= least:
            return rows
    return 16
