"""The metadata of csgmv: rows in the order of their slots. The products are measured in bench_dense_lora.

Both run once per batch and outside graphs, so the host's share counts and nothing is replayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from dense_timing import floor_ms, report, require

from moelora.batching.packing import pack_ids
from moelora.capacity import csgmv_chunk_rows
from moelora_kernels.metadata import RowBuffers, RowSizes, plan_sorted
from moelora_kernels.ops.csgmv import naive_chunks, order_rows
from moelora_kernels.ops.dense_lora import make_tile_list


def wall_ms(run: Callable[[], object], repeats: int = 20) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / repeats


def main() -> None:
    for tokens, length in ((512, 16), (8192, 64), (16384, 64)):
        rows = csgmv_chunk_rows(tokens)
        lengths = [length] * (tokens // length)
        slots = torch.randint(-1, 8, (len(lengths),)).tolist()
        flat = [slot for slot in slots for _ in range(length)]
        perm, _ = naive_chunks(flat, rows)
        sizes = RowSizes(tokens=tokens, tiles=tokens, tile_rows=rows, permuted=True, entries=tokens)
        buffers = RowBuffers(sizes, sizes.allocate(torch.device("cuda")))

        batch = pack_ids([[0] * length for length in lengths], slots, torch.device("cuda"))

        def packed(buffers=buffers, batch=batch, rows=rows) -> None:
            buffers.refresh(plan_sorted(batch, rows), batch)

        slot_N = torch.tensor(flat, dtype=torch.int32, device="cuda")
        chunks, perm_N = make_tile_list(tokens, slot_N.device), torch.empty_like(slot_N)

        def loose(slot_N=slot_N, chunks=chunks, perm_N=perm_N, rows=rows) -> None:
            order_rows(slot_N, rows, chunks, perm_N)

        packed()
        loose()
        require(buffers.tiles.perm_T.tolist() == perm == perm_N.tolist(), "csgmv")
        report(f"{len(lengths)} packed requests, {tokens} rows", wall_ms(packed), floor_ms(moved_bytes=8 * tokens))
        report(f"{tokens} loose rows", wall_ms(loose), floor_ms(moved_bytes=8 * tokens))


if __name__ == "__main__":
    main()
