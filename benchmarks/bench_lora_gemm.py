"""q, k, v, o of Qwen3-30B-A3B with LoRA in the base product, 8 adapters of rank 16, bf16, against bare projections.

Measured in turn, as the products run in a model: the library's bare projections, ours without LoRA (what
`--batch-invariant` costs), and ours with it: one launch for q, k, v, one for o. One after the other, a card that warms
up would add 5 to 8 % to what comes last.
"""

from __future__ import annotations

import torch
from bench_dense_lora import HIDDEN, KEY, QUERY, Block, run_rows
from dense_timing import close, floor_ms, report, require
from graph_time import graph_times

from moelora_kernels.ops.dense_lora import pick_tile_rows
from moelora_kernels.ops.invariant_gemm import LIST_ROWS, invariant_gemm
from moelora_kernels.ops.lora_gemm import SlotBlocks, lora_gemm, naive_lora_gemm, plan_blocks


def main() -> None:
    torch.manual_seed(0)
    length = 250
    for tokens in (512, 2048, 8192, 16384):
        block = Block(tokens, length=length)
        rows = run_rows(block.slot_T, pick_tile_rows(tokens))
        lengths = [min(length, tokens - start) for start in range(0, tokens, length)]
        first, slot = plan_blocks(lengths, [i % 8 for i in range(len(lengths))], -(-tokens // LIST_ROWS))
        blocks = SlotBlocks(block.slot_T, torch.from_numpy(first).cuda(), torch.from_numpy(slot).cuda())

        def ours(block=block, rows=rows, blocks=blocks) -> list[torch.Tensor]:
            outs = lora_gemm(block.x_TH, block.weights, [None] * 3, block.banks, rows, blocks, scratch=block.scratch)
            return outs + lora_gemm(
                block.attended_TQ, [block.out_weight], [None], [block.out_bank], rows, blocks, scratch=block.scratch
            )

        def without(block=block) -> None:
            for weight in block.weights:
                invariant_gemm(block.x_TH, weight)
            invariant_gemm(block.attended_TQ, block.out_weight)

        got = ours()
        for i, one in enumerate((*block.banks, block.out_bank)):
            x, weight = (block.x_TH, block.weights[i]) if i < 3 else (block.attended_TQ, block.out_weight)
            require(close(got[i], naive_lora_gemm(x, weight, None, one, block.slot_T), 4e-3), "lora_gemm")
        floor = floor_ms(moved_bytes=0, flops=2.0 * tokens * HIDDEN * (2 * QUERY + 2 * KEY))
        bare, *times = graph_times([block.base, without, ours])
        report(f"{tokens} tokens, the library's projections", bare, floor)
        for name, measured in zip(("ours without LoRA", "ours with LoRA"), times, strict=True):
            report(
                f"{tokens} tokens, {name}", measured, floor, f"{100 * (measured / bare - 1):+.1f} % over the library"
            )


if __name__ == "__main__":
    main()
