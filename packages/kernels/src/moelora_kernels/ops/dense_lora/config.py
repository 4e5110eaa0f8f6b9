"""Block sizes of the dense LoRA kernels: an explicit table, so that nothing is tuned while a graph is captured.

Only `block_k` has a say in the order of accumulation, and it depends on the dtype alone. Everything else moves work
between programs without changing a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moelora_kernels.launch import power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """Blocks of shrink and expand. `*_programs`: programs per multiprocessor of the persistent grids.

    `expand_group`: blocks of columns that one piece of expand's work walks over, at most.
    """

    block_m: int
    block_k: int
    shrink_block_r: int
    expand_block_r: int
    block_n: int
    shrink_warps: int = 4
    shrink_stages: int = 3
    shrink_programs: int = 2
    expand_warps: int = 4
    expand_stages: int = 3
    expand_programs: int = 4
    expand_group: int = 16


def pick_config(dtype: torch.dtype, tile_rows: int, max_rank: int) -> DenseConfig:
    """Blocks for tiles of `tile_rows` rows and a bank whose largest rank is `max_rank`."""
    block_m = power_of_two(tile_rows, least=16)
    rank = power_of_two(max_rank, least=16)
    # 128 rows over 4 warps would spill.
    warps = 8 if block_m >= 128 else 4
    wide = 8 if block_m >= 64 else 4
    if dtype == torch.float32:
        # IEEE products run on the scalar units: small blocks keep the operands in registers.
        return DenseConfig(
            block_m=block_m,
            block_k=32,
            shrink_block_r=min(rank, 32),
            expand_block_r=16,
            block_n=64,
            shrink_stages=2,
            expand_warps=warps,
        )
    return DenseConfig(
        block_m=block_m,
        block_k=128,
        shrink_block_r=min(rank, 64),
        expand_block_r=min(rank, 64),
        # On one H200, 16,384 rows: 0.201 ms with 128 columns over 8 warps, 0.221 with 64 over 4.
        block_n=128,
        # Small tiles carry few bytes: more of them under way hide the latency of memory.
        shrink_stages=6 if block_m <= 32 and rank <= 32 else 4 if rank <= 32 else 3,
        expand_warps=wide,
        expand_programs=3,
        expand_group=8,
    )
