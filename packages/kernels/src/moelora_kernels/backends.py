"""The triton and csgmv backends: two orders of rows. All else is `tiled.py`'s.

`triton` cuts runs of neighbouring rows of one slot into tiles and suits packed prefill, where requests are long.
`csgmv` first orders rows by slot, so that rows of one slot fill whole chunks however they are scattered: many short
requests over few adapters.
"""

from __future__ import annotations

import torch

from moelora.backends.base import Capabilities
from moelora.capacity import PrefillCapacity
from moelora.types import GraphMode
from moelora_kernels.handles import PhaseBuffers
from moelora_kernels.metadata import plan_runs, plan_sorted
from moelora_kernels.ops.csgmv import chunk_capacity, csgmv_chunk_rows, order_rows
from moelora_kernels.ops.dense_lora import MAX_RANK, RowTiles, cut_tiles, make_tile_list, pick_tile_rows
from moelora_kernels.tiled import DEVICE_TYPES, GRAPH_MODES, TiledBackend


class TritonBackend(TiledBackend):
    """Tiles over runs of neighbouring rows."""

    capabilities = Capabilities(name="triton", device_types=DEVICE_TYPES, graph_modes=GRAPH_MODES, max_rank=MAX_RANK)
    _permuted = False
    _tile_rows = staticmethod(pick_tile_rows)
    _plan = staticmethod(plan_runs)

    @staticmethod
    def _most_tiles(capacity: PrefillCapacity, mode: GraphMode) -> int:
        return capacity.dense_tiles(capacity.max_tokens, mode)

    @staticmethod
    def _bucket_tiles(own: PhaseBuffers, bucket: int) -> int:
        return own.capacity.dense_tiles(bucket, own.mode)

    def _cut(self, slot_N: torch.Tensor) -> RowTiles:
        tiles, tile_rows = make_tile_list(slot_N.shape[0], slot_N.device), self._tile_rows(slot_N.shape[0])
        cut_tiles(slot_N, tile_rows, tiles)
        return RowTiles(tiles, tile_rows)


class CsgmvBackend(TiledBackend):
    """Chunks over rows ordered by slot."""

    capabilities = Capabilities(name="csgmv", device_types=DEVICE_TYPES, graph_modes=GRAPH_MODES, max_rank=MAX_RANK)
    _permuted = True
    _tile_rows = staticmethod(csgmv_chunk_rows)
    _plan = staticmethod(plan_sorted)

    @staticmethod
    def _most_tiles(capacity: PrefillCapacity, mode: GraphMode) -> int:
        return chunk_capacity(capacity)

    @staticmethod
    def _bucket_tiles(own: PhaseBuffers, bucket: int) -> int:
        return own.capacity.csgmv_segments(bucket)

    def _cut(self, slot_N: torch.Tensor) -> RowTiles:
        chunks, chunk_rows = make_tile_list(slot_N.shape[0], slot_N.device), self._tile_rows(slot_N.shape[0])
        perm_N = torch.empty_like(slot_N)
        order_rows(slot_N, chunk_rows, chunks, perm_N)
        return RowTiles(chunks, chunk_rows, perm_N)
