"""Row metadata of a packed batch: planned on the host from the requests, sent to the device in one copy.

A batch knows its requests on the host, so nothing has to be sorted or counted on the device, and a refresh is one
asynchronous copy into buffers that graphs may have baked in. Loose rows, whose slots only the device knows, are cut
there instead (`ops/dense_lora/tiles.py`, `ops/csgmv`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np
import torch

from moelora.types import BASE_SLOT, PackedBatch
from moelora_kernels.ops.dense_lora import RowTiles, TileList
from moelora_kernels.ops.lora_gemm import LIST_ROWS, SlotBlocks, plan_blocks

_ALIGN = 4
"""Elements (16 bytes) that each array starts at a multiple of, so that every size gets the same compiled kernel."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Tiles of one batch, and its rows in the order of slots; integers on the host. See `TileList`, `RowTiles`.

    order_T: rows by slot, base first. perm_T: for tiles that count sorted rows, the same with the base last.
    """

    start_C: Sequence[int]
    rows_C: Sequence[int]
    slot_C: Sequence[int]
    order_T: np.ndarray
    perm_T: np.ndarray | None = None


def plan_runs(batch: PackedBatch, tile_rows: int) -> RowPlan:
    """Cuts runs of neighbouring requests of one slot into tiles. Base rows are in no tile."""
    return RowPlan(*_cut_runs(batch.lengths, batch.slots, tile_rows), order_by_slot(batch.host.slot_T))


def plan_sorted(batch: PackedBatch, tile_rows: int) -> RowPlan:
    """Orders rows by slot, stably and base rows last, and cuts them into chunks."""
    slot_S = np.asarray(batch.slots, dtype=np.int32)
    length_S = np.asarray(batch.lengths, dtype=np.int64)
    order_S = _base_last(order_by_slot(slot_S), slot_S)
    order_T = order_by_slot(batch.host.slot_T)
    tiles = _cut_runs(length_S[order_S].tolist(), slot_S[order_S].tolist(), tile_rows)
    return RowPlan(*tiles, order_T, _base_last(order_T, batch.host.slot_T))


def order_by_slot(slot_N: np.ndarray) -> np.ndarray:
    """Indices of int32 slots in order, stably, the base first: what `ops.routes.order_tokens` makes on the device."""
    return np.argsort(slot_N, kind="stable")


def _base_last(order_N: np.ndarray, slot_N: np.ndarray) -> np.ndarray:
    """The order by slot with the base behind all slots."""
    return np.roll(order_N, -np.count_nonzero(slot_N == BASE_SLOT))


def _cut_runs(lengths: Sequence[int], slots: Sequence[int], tile_rows: int) -> tuple[list[int], list[int], list[int]]:
    """First row, rows and slot of each tile."""
    start_C: list[int] = []
    rows_C: list[int] = []
    slot_C: list[int] = []
    end = 0
    for slot, run in groupby(zip(slots, lengths, strict=True), key=itemgetter(0)):
        begin, end = end, end + sum(length for _, length in run)
        if slot != BASE_SLOT:
            whole, rest = divmod(end - begin, tile_rows)
            rows = [tile_rows] * whole + [rest] * (rest > 0)
            start_C += range(begin, end, tile_rows)
            rows_C += rows
            slot_C += [slot] * len(rows)
    return start_C, rows_C, slot_C


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """What the row metadata of a batch has room for. tiles: at most, of `tile_rows` rows. permuted: of sorted rows.

    entries: of the list of slots per block, see `most_entries`; None leaves that list out.
    """

    tokens: int
    tiles: int
    tile_rows: int
    permuted: bool
    entries: int | None

    def spans(self) -> list[slice]:
        """Where each array lies in one buffer of int32: see `RowBuffers`."""
        blocks = 0 if self.entries is None else -(-self.tokens // LIST_ROWS)
        sizes = [
            *(1, 1, self.tiles + 1, self.tiles + 1, self.tiles + 1),
            *(self.tokens, self.tokens, self.tokens if self.permuted else 0),
            *(blocks + 1, max(1, self.entries or 0)),
        ]
        starts = accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0)
        return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Memory for it, and for smaller ones."""
        return torch.empty(self.spans()[-1].stop, dtype=torch.int32, device=device)


class RowBuffers:
    """The row metadata of one batch at a time: views into one flat int32 buffer on the device.

    Sizes of several buckets may share a buffer: each has a layout of its own from the buffer's beginning on, so that a
    small bucket is refreshed by a small copy.

    token_slot_T: slot of each row, -1 behind the last. num_live_1: rows before the padding. order_T: rows by slot, base
    first, padding last. tiles, blocks: what the launch functions take; blocks is None where `sizes` has no entries.
    """

    def __init__(self, sizes: RowSizes, memory: torch.Tensor) -> None:
        self._spans = sizes.spans()
        self._flat = memory[: self._spans[-1].stop]
        assert self._flat.numel() == self._spans[-1].stop, f"{sizes} do not fit into {memory.numel()} elements"
        count, live, start, rows, slot, token_slot, order, perm, block_first, block_slot = (
            self._flat[span] for span in self._spans
        )
        self.num_live_1 = live
        self.token_slot_T = token_slot
        self.order_T = order
        self.tiles = RowTiles(TileList(count, start, rows, slot), sizes.tile_rows, perm if sizes.permuted else None)
        self.blocks = None if sizes.entries is None else SlotBlocks(token_slot, block_first, block_slot)

    def refresh(self, plan: RowPlan, batch: PackedBatch) -> None:
        """Rewrites the whole layout in place; nothing of an earlier batch survives. Does not wait for the device.

        plan: of the same batch.
        """
        tiles, room = len(plan.slot_C), self.tiles.tiles.capacity
        assert tiles <= room, f"{tiles} tiles do not fit into {room}"
        host = torch.zeros(self._flat.shape, dtype=torch.int32, pin_memory=self._flat.is_cuda)
        flat = host.numpy()
        count, num_live, start, rows, slot, token_slot, order, perm, block_first, block_slot = (
            flat[span] for span in self._spans
        )
        live = batch.num_tokens
        count[:], num_live[:] = tiles, live
        start[:tiles], rows[:tiles] = plan.start_C, plan.rows_C
        slot[:tiles], slot[tiles:] = plan.slot_C, BASE_SLOT
        token_slot[:live], token_slot[live:] = batch.host.slot_T, BASE_SLOT
        order[:live], order[live:] = plan.order_T, np.arange(live, order.size)
        if plan.perm_T is not None:
            perm[:live], perm[live:] = plan.perm_T, np.arange(live, perm.size)
        if self.blocks is not None:
            first, entries = plan_blocks(batch.lengths, batch.slots, block_first.size - 1)
            assert entries.size <= block_slot.size, f"{entries.size} entries do not fit into {block_slot.size}"
            block_first[:], block_slot[: entries.size] = first, entries
        # The allocator keeps the pinned memory back until the stream has passed this copy.
        self._flat.copy_(host, non_blocking=True)
