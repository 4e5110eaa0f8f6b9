"""The one matrix product that all kernels use: fp32 accumulation, IEEE products for fp32 (never tf32)."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from moelora_kernels.launch import interpreted

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def dot(b_a, b_b, b_acc):
    """b_acc [M, N] + b_a [M, K] b_b [K, N], K in ascending order."""
    if _INTERPRETED:
        # The interpreter multiplies bfloat16 as the 16-bit integers that it keeps them in, and numpy's product sums in
        # an order that depends on the shape. Spelled out in fp32, products are exact and the order is that of K.
        b_ab = b_a.to(tl.float32)[:, :, None] * b_b.to(tl.float32)[None, :, :]
        b_out = b_acc + tl.sum(b_ab, axis=1)
    else:
        b_out = tl.dot(b_a, b_b, b_acc, input_precision="ieee")
    return b_out
