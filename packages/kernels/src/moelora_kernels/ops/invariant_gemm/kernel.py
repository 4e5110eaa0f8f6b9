"""Triton kernel of a matrix product whose rows do not know how many they are.

M rows, N output width, K input width. Every element is one sum over K in blocks of one size, in ascending order, in one
program: K is never split, and neither the tile nor the place of a row in it has a say in its bits.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from moelora_kernels.dot import dot


@triton.jit
def invariant_gemm_kernel(
    p_x, p_w, p_bias, p_out,
    M, N, K, stride_x, stride_w, stride_out,
    BIAS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] W[N, K]ᵀ (+ bias)."""
    # Programs that run together take a block of GROUP_M tiles of rows, so that both operands are read from L2.
    i_work = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    per_group = GROUP_M * tiles_n
    first_m = i_work // per_group * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    i_m = first_m + i_work % per_group % height
    i_n = i_work % per_group // height
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns over the edge read the last one again: their sums are never stored, and the loop has no mask.
    p_x_m = p_x + tl.minimum(o_m, M - 1).to(tl.int64)[:, None] * stride_x
    p_w_n = p_w + tl.minimum(o_n, N - 1).to(tl.int64)[:, None] * stride_w
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_k in range(0, K, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = (o_k < K)[None, :]
        b_x = tl.load(p_x_m + o_k[None, :], mask=m_k, other=0.0)
        b_w = tl.load(p_w_n + o_k[None, :], mask=m_k, other=0.0)
        b_acc = dot(b_x, tl.trans(b_w), b_acc)
    if BIAS:
        b_acc += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    p_o = p_out + o_m.to(tl.int64)[:, None] * stride_out + o_n[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=(o_m < M)[:, None] & (o_n < N)[None, :])
