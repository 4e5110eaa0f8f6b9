"""Helpers of the dense kernel tests: devices, poisoned buffers with guard regions, random banks and ragged rows."""

from __future__ import annotations

import torch

from moelora.backends.base import DenseSlots
from moelora_kernels.ops.csgmv import csgmv_chunk_rows, order_rows
from moelora_kernels.ops.dense_lora import RowTiles, cut_tiles, make_tile_list

DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
GUARD = 64
_GUARD_VALUE = 12345.0


class Guarded:
    """A tensor of `shape` inside a larger buffer whose margins hold a known value. Starts as NaN throughout."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        numel = 1
        for size in shape:
            numel *= size
        self._buffer = torch.full((numel + 2 * GUARD,), _GUARD_VALUE, dtype=dtype, device=device)
        self.tensor = self._buffer[GUARD : GUARD + numel].view(shape)
        self.tensor.fill_(float("nan"))
        self._expected = self._buffer[:1].clone()

    def check(self) -> None:
        """Fails if a margin was written to."""
        assert bool((self._buffer[:GUARD] == self._expected).all()), "written before the output"
        assert bool((self._buffer[-GUARD:] == self._expected).all()), "written behind the output"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype).to(device)


def make_bank(
    ranks: list[int], width_in: int, width_out: int, *, seed: int, dtype: torch.dtype, device: str, bank_rank: int = 0
) -> DenseSlots:
    """A bank of slots of these ranks; what lies beyond a slot's rank is zero."""
    bank_rank = max([bank_rank, *ranks])
    a_LRI = randn(len(ranks), bank_rank, width_in, seed=seed) / width_in**0.5
    b_LOR = randn(len(ranks), width_out, bank_rank, seed=seed + 1)
    for slot, rank in enumerate(ranks):
        a_LRI[slot, rank:] = 0
        b_LOR[slot, :, rank:] = 0
    return DenseSlots(
        a_LRI=a_LRI.to(dtype).to(device),
        b_LOR=b_LOR.to(dtype).to(device),
        ranks_L=torch.tensor(ranks, dtype=torch.int32, device=device),
    )


def slot_tensor(slots: list[int], device: str) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=device)


def run_tiles(slots: list[int], tile_rows: int, device: str) -> RowTiles:
    """Tiles over runs of neighbouring rows, as the triton backend cuts them."""
    tiles = make_tile_list(max(1, len(slots)), torch.device(device))
    cut_tiles(slot_tensor(slots, device), tile_rows, tiles)
    return RowTiles(tiles, tile_rows)


def sorted_tiles(slots: list[int], device: str, chunk_rows: int | None = None) -> RowTiles:
    """Chunks over rows sorted by slot, as the csgmv backend cuts them."""
    chunk_rows = chunk_rows or csgmv_chunk_rows(len(slots))
    chunks = make_tile_list(max(1, len(slots)), torch.device(device))
    perm_N = torch.full((len(slots),), -7, dtype=torch.int32, device=device)
    order_rows(slot_tensor(slots, device), chunk_rows, chunks, perm_N)
    return RowTiles(chunks, chunk_rows, perm_N)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖ in fp64; NaN and infinity fail."""
    got, want = got.double().cpu(), want.double().cpu()
    assert bool(torch.isfinite(got).all()), "not finite"
    return float((got - want).norm() / want.norm().clamp_min(1e-30))
