"""Block sizes of the experts' kernels, chosen from shapes alone, so that capture and replay use the same ones.

Nothing here may change a row's bits: every choice walks the depth of a product in the same order, with the same matrix
instruction (16-bit tiles have at least 64 rows, which Hopper's warp-group instruction needs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductConfig:
    """Blocks of one product. `group`: tiles that walk through the columns together."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Blocks of one experts layer. `block_m`: rows of a tile, shared by all kernels. `shrink.block_n`: LoRA columns."""

    block_m: int
    up: ProductConfig
    down: ProductConfig
    shrink: ProductConfig


WIDEST_BLOCK_K = 64
"""The largest `block_k` of any product: what the spread-out A x is sized by."""

WIDE_BLOCKS = 2
"""Steps of a product's main loop that LoRA columns may take: 128 of them, eight slots of rank 16 in one tile."""

_SHRINK = ProductConfig(block_n=64, block_k=64, warps=4, stages=4)
_SMALL = MoeConfig(
    block_m=64,
    up=ProductConfig(block_n=128, block_k=64, warps=4, stages=4, group=2),
    down=ProductConfig(block_n=128, block_k=64, warps=4, stages=4, group=2),
    shrink=_SHRINK,
)
_LARGE = MoeConfig(
    block_m=128,
    up=ProductConfig(block_n=256, block_k=64, warps=8, stages=3, group=8),
    down=ProductConfig(block_n=256, block_k=64, warps=8, stages=3, group=8),
    shrink=_SHRINK,
)
_FLOAT32 = MoeConfig(
    block_m=32,
    up=ProductConfig(block_n=64, block_k=32, warps=4, stages=2),
    down=ProductConfig(block_n=64, block_k=32, warps=4, stages=2),
    shrink=ProductConfig(block_n=32, block_k=32, warps=4, stages=2),
)


def smallest_block_m(dtype: torch.dtype) -> int:
    """Rows of the smallest tile that any configuration may have for `dtype`."""
    return 32 if dtype is torch.float32 else 64


def default_config(*, tokens: int, top_k: int, num_experts: int, dtype: torch.dtype) -> MoeConfig:
    """The built-in configuration for a batch: small tiles where an expert has few pairs, else large ones.

    One H200, base products of Qwen3-30B-A3B in ms, small against large: 0.31 and 0.33 at 512 tokens (32 pairs per
    expert), 0.39 and 0.36 at 1,024, 0.59 and 0.44 at 2,048. `moelora tune` may know better (`table.py`).
    """
    if dtype is torch.float32:
        return _FLOAT32
    return _SMALL if tokens * top_k <= 48 * num_experts else _LARGE
