"""Dense LoRA on q, k, v, o of Qwen3-30B-A3B (H 2048, q 4096, k and v 512), 8 adapters of rank 16, bf16.

    python benchmarks/bench_dense_lora.py [--sweep]

Measured: both LoRA launches of the attention block alone, from a cold L2; then the four bare projections and the same
with LoRA, from a warm one, as they run in a model. `--sweep` tries other blocks.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from dense_timing import close, floor_ms, measure_ms, report, require
from torch.nn.functional import linear

from moelora.backends.base import DenseSlots
from moelora_kernels.ops.csgmv import csgmv_chunk_rows, order_rows
from moelora_kernels.ops.dense_lora import (
    RowTiles,
    cut_tiles,
    dense_lora,
    make_tile_list,
    naive_dense_lora,
    pick_config,
    pick_tile_rows,
    scratch_numel,
)

HIDDEN, QUERY, KEY, SLOTS, RANK = 2048, 4096, 512, 8, 16
DTYPE = torch.bfloat16


def bank(width_in: int, width_out: int) -> DenseSlots:
    return DenseSlots(
        a_LRI=torch.randn(SLOTS, RANK, width_in, device="cuda", dtype=DTYPE) / width_in**0.5,
        b_LOR=torch.randn(SLOTS, width_out, RANK, device="cuda", dtype=DTYPE),
        ranks_L=torch.full((SLOTS,), RANK, dtype=torch.int32, device="cuda"),
    )


def run_rows(slot_T: torch.Tensor, tile_rows: int) -> RowTiles:
    tiles = make_tile_list(slot_T.shape[0], slot_T.device)
    cut_tiles(slot_T, tile_rows, tiles)
    return RowTiles(tiles, tile_rows)


def sorted_rows(slot_T: torch.Tensor, chunk_rows: int) -> RowTiles:
    chunks = make_tile_list(slot_T.shape[0], slot_T.device)
    perm_T = torch.empty_like(slot_T)
    order_rows(slot_T, chunk_rows, chunks, perm_T)
    return RowTiles(chunks, chunk_rows, perm_T)


class Block:
    """The four projections of one attention block for `tokens` tokens in requests of `length`, adapters in turn."""

    def __init__(self, tokens: int, *, length: int = 250) -> None:
        self.tokens = tokens
        self.x_TH = torch.randn(tokens, HIDDEN, device="cuda", dtype=DTYPE)
        self.attended_TQ = torch.randn(tokens, QUERY, device="cuda", dtype=DTYPE)
        # One behind the other, as the engine lays them.
        whole = torch.randn(QUERY + 2 * KEY, HIDDEN, device="cuda", dtype=DTYPE) / 45
        self.weights = list(whole.split((QUERY, KEY, KEY)))
        self.out_weight = torch.randn(HIDDEN, QUERY, device="cuda", dtype=DTYPE) / 64
        self.banks = [bank(HIDDEN, n) for n in (QUERY, KEY, KEY)]
        self.out_bank = bank(QUERY, HIDDEN)
        self.slot_T = (torch.arange(tokens, device="cuda") // length % SLOTS).to(torch.int32)
        self.scratch = torch.empty(scratch_numel(tokens, RANK), device="cuda", dtype=DTYPE)
        self.outs = [torch.randn(tokens, n, device="cuda", dtype=DTYPE) for n in (QUERY, KEY, KEY)]
        self.out_TH = torch.randn(tokens, HIDDEN, device="cuda", dtype=DTYPE)

    def lora(self, rows: RowTiles, config=None) -> None:
        dense_lora(self.x_TH, self.outs, self.banks, rows, scratch=self.scratch, config=config)
        dense_lora(self.attended_TQ, [self.out_TH], [self.out_bank], rows, scratch=self.scratch, config=config)

    def base(self, rows: RowTiles | None = None) -> None:
        outs = [linear(self.x_TH, w) for w in self.weights]
        if rows is not None:
            dense_lora(self.x_TH, outs, self.banks, rows, scratch=self.scratch)
        out = linear(self.attended_TQ, self.out_weight)
        if rows is not None:
            dense_lora(self.attended_TQ, [out], [self.out_bank], rows, scratch=self.scratch)

    def check(self, rows: RowTiles, config=None) -> bool:
        before = [out.clone() for out in (*self.outs, self.out_TH)]
        self.lora(rows, config)
        right = True
        pairs = zip(before, (*self.outs, self.out_TH), (*self.banks, self.out_bank), strict=True)
        for want, got, one in pairs:
            naive_dense_lora(self.attended_TQ if one is self.out_bank else self.x_TH, want, one, self.slot_T)
            right &= close(got, want, 4e-3)
        return right

    def floor(self) -> float:
        widths = HIDDEN + QUERY + 2 * (QUERY + 2 * KEY + HIDDEN)
        factors = SLOTS * RANK * (2 * HIDDEN + 2 * QUERY + HIDDEN * 2 + 2 * KEY)
        return floor_ms(moved_bytes=2 * (self.tokens * widths + factors))


SWEEP = [
    (tile_rows, change)
    for tile_rows in (64, 128)
    for change in (
        {}, {"block_n": 128}, {"expand_stages": 2}, {"expand_stages": 4}, {"expand_group": 8}, {"expand_group": 32},
        {"expand_programs": 4}, {"expand_programs": 6}, {"shrink_stages": 3},
        {"shrink_programs": 1, "shrink_stages": 6},{"expand_warps": 8}, {"block_n": 128, "expand_warps": 8},
    )
]  # fmt: skip


def sweep(block: Block) -> None:
    for tile_rows, change in SWEEP:
        rows = run_rows(block.slot_T, tile_rows)
        config = replace(pick_config(DTYPE, tile_rows, RANK), **change)
        try:
            measured = measure_ms(lambda c=config, r=rows: block.lora(r, c), repeats=10)
        except Exception as error:
            print(f"  tiles of {tile_rows}, {change}: {type(error).__name__} {str(error)[:80]}", flush=True)
            continue
        report(f"  tiles of {tile_rows}, {change}", measured, block.floor())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    for tokens in (512, 8192, 16384):
        block = Block(tokens)
        orders = {
            "triton": run_rows(block.slot_T, pick_tile_rows(tokens)),
            "csgmv": sorted_rows(block.slot_T, csgmv_chunk_rows(tokens)),
        }
        for name, rows in orders.items():
            require(block.check(rows), f"dense_lora ({name})")
            report(
                f"q,k,v,o LoRA alone, {tokens} tokens, {name}",
                measure_ms(lambda b=block, r=rows: b.lora(r)),
                block.floor(),
            )
        bare = measure_ms(block.base, cold=False)
        for name, rows in orders.items():
            adapted = measure_ms(lambda b=block, r=rows: b.base(r), cold=False)
            print(
                f"  projections {bare:.4f} ms, with LoRA {adapted:.4f} ms ({name}): +{100 * (adapted / bare - 1):.1f} %"
            )
        if options.sweep and tokens == 16384:
            sweep(block)


if __name__ == "__main__":
    main()
