"""The metadata of csgmv: sorting rows by slot and cutting chunks. The products are measured in bench_dense_lora."""

from __future__ import annotations

import torch
from dense_timing import floor_ms, report, require

from moelora_kernels.ops.csgmv import csgmv_chunk_rows, naive_chunks, order_rows
from moelora_kernels.ops.dense_lora import make_tile_list


def main() -> None:
    for tokens in (512, 8192, 16384):
        slot_N = torch.randint(-1, 8, (tokens,), dtype=torch.int32, device="cuda")
        chunks, perm_N = make_tile_list(tokens, slot_N.device), torch.empty_like(slot_N)
        rows = csgmv_chunk_rows(tokens)
        order_rows(slot_N, rows, chunks, perm_N)
        require(perm_N.tolist() == naive_chunks(slot_N.tolist(), rows)[0], "csgmv")
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(20):
            order_rows(slot_N, rows, chunks, perm_N)
        end.record()
        torch.cuda.synchronize()
        # Once per batch and outside graphs, so launches count: not a graph replay.
        report(f"order rows, {tokens}", start.elapsed_time(end) / 20, floor_ms(moved_bytes=8 * tokens))


if __name__ == "__main__":
    main()
