"""Row metadata of a packed batch: planned on the host from the requests, sent to the device in one copy.

A batch knows its requests on the host, so nothing has to be sorted or counted on the device, and a refresh is one
asynchronous copy into buffers that graphs may have baked in. Loose rows, whose slots only the device knows, are cut
there instead (`ops/dense_lora/tiles.py`, `ops/csgmv`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moelora.types import BASE_SLOT
from moelora_kernels.ops.dense_lora import RowTiles, TileList
from moelora_kernels.ops.lora_gemm import LIST_ROWS, SlotBlocks, plan_blocks

_ALIGN = 4
"""Elements (16 bytes) that each array starts at a multiple of, so that every size gets the same compiled kernel."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Tiles, and for sorted rows the permutation, of one batch; int32 on the host. See `TileList` and `RowTiles`."""

    start_C: np.ndarray
    rows_C: np.ndarray
    slot_C: np.ndarray
    perm_T: np.ndarray | None = None


def plan_runs(lengths: Sequence[int], slots: Sequence[int], tile_rows: int) -> RowPlan:
    """Cuts runs of neighbouring requests of one slot into tiles. Base rows are in no tile."""
    length_S = np.asarray(lengths, dtype=np.int64)
    slot_S = np.asarray(slots, dtype=np.int64)
    if length_S.size == 0:
        none = np.empty(0, dtype=np.int32)
        return RowPlan(none, none, none)
    first = np.flatnonzero(np.concatenate(([True], slot_S[1:] != slot_S[:-1])))
    run_length = np.add.reduceat(length_S, first)
    run_start = np.cumsum(run_length) - run_length
    adapted = slot_S[first] != BASE_SLOT
    run_length, run_start, run_slot = run_length[adapted], run_start[adapted], slot_S[first][adapted]
    tiles = -(-run_length // tile_rows)
    run_of_tile = np.repeat(np.arange(tiles.size), tiles)
    offset = (np.arange(run_of_tile.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_rows
    return RowPlan(
        (run_start[run_of_tile] + offset).astype(np.int32),
        np.minimum(run_length[run_of_tile] - offset, tile_rows).astype(np.int32),
        run_slot[run_of_tile].astype(np.int32),
    )


def plan_sorted(lengths: Sequence[int], slots: Sequence[int], tile_rows: int) -> RowPlan:
    """Orders rows by slot, stably and base rows last, and cuts them into chunks."""
    length_S = np.asarray(lengths, dtype=np.int64)
    slot_S = np.asarray(slots, dtype=np.int64)
    order = np.argsort(np.where(slot_S == BASE_SLOT, np.iinfo(np.int64).max, slot_S), kind="stable")
    plan = plan_runs(length_S[order].tolist(), slot_S[order].tolist(), tile_rows)
    return RowPlan(plan.start_C, plan.rows_C, plan.slot_C, _rows_in(order, length_S))


def order_by_slot(lengths: Sequence[int], slots: Sequence[int]) -> np.ndarray:
    """Rows ordered by slot, stably and base rows first: int32, what `ops.routes.order_tokens` makes on the device."""
    order = np.argsort(np.asarray(slots, dtype=np.int64), kind="stable")
    return _rows_in(order, np.asarray(lengths, dtype=np.int64))


def _rows_in(order: np.ndarray, length_S: np.ndarray) -> np.ndarray:
    """The rows of packed requests, request by request in another order; int32."""
    start_S = np.cumsum(length_S) - length_S
    length_S, start_S = length_S[order], start_S[order]
    shift_S = start_S - (np.cumsum(length_S) - length_S)
    return (np.repeat(shift_S, length_S) + np.arange(length_S.sum())).astype(np.int32)


class RowBuffers:
    """Device memory for the row metadata of one batch at a time: one flat int32 buffer and views into it.

    token_slot_T: slot of each row, -1 behind the last. num_live_1: rows before the padding. order_T: rows by slot, base
    first, padding last. perm_T: None if tiles do not count sorted rows. `entries`: of the list of slots per block, see
    `most_entries`.
    """

    def __init__(self, *, tiles: int, tokens: int, entries: int, permuted: bool, device: torch.device) -> None:
        self._blocks = -(-tokens // LIST_ROWS)
        sizes = (
            *(1, 1, tiles + 1, tiles + 1, tiles + 1, tokens, tokens, tokens if permuted else 0),
            *(self._blocks + 1, max(1, entries)),
        )
        starts = np.cumsum([0, *(-(-size // _ALIGN) * _ALIGN for size in sizes)]).tolist()
        self._spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._flat = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        count, live, start, rows, slot, token_slot, order, perm, block_first, block_slot = (
            self._flat[span] for span in self._spans
        )
        slot.fill_(BASE_SLOT)
        token_slot.fill_(BASE_SLOT)
        self.tiles = TileList(count, start, rows, slot)
        self.num_live_1 = live
        self.token_slot_T = token_slot
        self.order_T = order
        self.perm_T = perm if permuted else None
        self._block_first, self._block_slot = block_first, block_slot

    def refresh(self, plan: RowPlan, lengths: Sequence[int], slots: Sequence[int]) -> None:
        """Rewrites the whole buffer in place; nothing of an earlier batch survives. Does not wait for the device."""
        count = plan.slot_C.size
        assert count <= self.tiles.capacity, f"{count} tiles do not fit into {self.tiles.capacity}"
        host = torch.zeros(self._flat.shape, dtype=torch.int32, pin_memory=self._flat.is_cuda)
        flat = host.numpy()
        parts = [flat[span] for span in self._spans]
        token_slot = np.repeat(np.asarray(slots, dtype=np.int32), np.asarray(lengths, dtype=np.int64))
        parts[0][:], parts[1][:] = count, token_slot.size
        parts[2][:count], parts[3][:count] = plan.start_C, plan.rows_C
        parts[4][:], parts[5][:] = BASE_SLOT, BASE_SLOT
        parts[4][:count], parts[5][: token_slot.size] = plan.slot_C, token_slot
        parts[6][:] = np.arange(parts[6].size)
        parts[6][: token_slot.size] = order_by_slot(lengths, slots)
        if plan.perm_T is not None:
            parts[7][:] = np.arange(parts[7].size)
            parts[7][: plan.perm_T.size] = plan.perm_T
        first, block_slots = plan_blocks(lengths, slots, self._blocks)
        assert block_slots.size <= parts[9].size, f"{block_slots.size} entries do not fit into {parts[9].size}"
        parts[8][:], parts[9][: block_slots.size] = first, block_slots
        # The allocator keeps the pinned memory back until the stream has passed this copy.
        self._flat.copy_(host, non_blocking=True)

    def blocks(self, tokens: int) -> SlotBlocks:
        """What the fused product takes for a batch of `tokens` rows."""
        return SlotBlocks(self.token_slot_T[:tokens], self._block_first, self._block_slot)

    def rows(self, *, tokens: int, capacity: int, tile_rows: int) -> RowTiles:
        """What the launch functions take for a batch of `tokens` rows and at most `capacity` tiles."""
        perm_T = self.perm_T[:tokens] if self.perm_T is not None else None
        return RowTiles(self.tiles.view(capacity), tile_rows, perm_T)
