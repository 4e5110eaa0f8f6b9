"""Block sizes of the batch-invariant product: an explicit table. Times are of one H200, bf16."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moelora_kernels.launch import power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """Blocks of the product. `block_k` is part of the result's bits; the others are not.

    bulk: through tensor descriptors over a persistent grid. flatten: with one loop over tiles and K.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    bulk: bool = False
    flatten: bool = True


def pick_config(
    dtype: torch.dtype, rows: int, width: int, *, bulk_copies: bool = False, most_rows: int = 256
) -> GemmConfig:
    """Blocks for `rows` rows of output width `width`; at most `most_rows` rows in a block. `block_k` is by dtype alone.

    `bulk_copies`: the device and the layout of the tensors allow tensor descriptors.
    """
    if dtype == torch.float32:
        block_n = 64 if width > 32 else 16
        return GemmConfig(block_m=64 if rows > 32 else 16, block_n=block_n, block_k=32, warps=4, stages=2)
    if rows <= 128:
        # Few rows: reading W is the cost, so many narrow programs read it side by side.
        block_m = power_of_two(rows, least=16)
        return GemmConfig(block_m=block_m, block_n=32, block_k=64, warps=4, stages=5)
    if rows <= 1024:
        # 512 × 4096 × 2048: 0.021 ms, torch 0.018; 512 × 512 × 2048: 0.014 ms, torch 0.010.
        return GemmConfig(block_m=64, block_n=64 if width <= 512 else 128, block_k=64, warps=4, stages=4)
    if width < 1024:
        # 8192 × 512 × 2048: 0.038 ms, torch 0.029.
        return GemmConfig(block_m=64, block_n=128 if width > 64 else 64, block_k=64, warps=4, stages=4)
    if bulk_copies:
        # 8192 × 4096 × 2048: 0.182 ms, torch 0.180; 8192 × 2048 × 4096: 0.177 ms, torch 0.175.
        return GemmConfig(block_m=128, block_n=256, block_k=64, warps=8, stages=3, bulk=True)
    if most_rows < 256:
        # 8192 × 4096 × 2048: 0.235 ms.
        return GemmConfig(block_m=128, block_n=128, block_k=64, warps=8, stages=4)
    # 8192 × 4096 × 2048: 0.218 ms.
    return GemmConfig(block_m=256, block_n=128, block_k=64, warps=8, stages=3)
