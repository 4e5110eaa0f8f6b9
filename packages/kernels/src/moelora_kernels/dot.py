"""The one matrix product that all kernels use: fp32 accumulation, IEEE products for fp32 (never tf32)."""

from __future__ import annotations

import triton
import triton.language as tl

from moelora_kernels.launch import interpreted

# The interpreter keeps bfloat16 as 16-bit integers and would multiply those; in fp32 the same products are exact.
_UPCAST = tl.constexpr(interpreted())


@triton.jit
def dot(b_a, b_b, b_acc):
    """b_acc [M, N] + b_a [M, K] b_b [K, N], K in ascending order."""
    if _UPCAST:
        b_a = b_a.to(tl.float32)
        b_b = b_b.to(tl.float32)
    return tl.dot(b_a, b_b, b_acc, input_precision="ieee")
