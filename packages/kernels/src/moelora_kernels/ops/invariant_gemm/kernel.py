"""Triton kernels of a matrix product whose rows do not know how many they are, with LoRA in the accumulator.

M rows, N output width, K input width, R rank. Every element is one sum in one program: over K in blocks of one size,
in ascending order, then over the ranks of the row's own slot. K is never split, and neither the tile nor the place of a
row in it has a say in its bits; a slot that only neighbours use adds exact zeros.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from moelora_kernels.dot import dot
from moelora_kernels.overlap import wait_for_last
from moelora_kernels.tile_order import place


@triton.jit
def slot_pair(p_rank, p_block_slot, i_entry, end):
    """For 32 LoRA columns, those of two slots of a block's list side by side: slot, and how many ranks of y it has."""
    b_entry = i_entry + tl.arange(0, 32) // 16
    b_own = tl.load(p_block_slot + b_entry, mask=b_entry < end, other=0)
    # Shrink writes whole groups of 16 ranks, and no more of them than the slot has.
    return b_own, tl.where(b_entry < end, tl.cdiv(tl.load(p_rank + b_own), 16) * 16, 0)


@triton.jit
def slot_list(p_rank, p_token_slot, p_block_first, p_block_slot, o_m, i_block, M):
    """What `add_lora` needs of a block of rows. Loaded before the product, so that nothing waits for it behind."""
    b_slot = tl.load(p_token_slot + o_m, mask=o_m < M, other=-1)
    first = tl.load(p_block_first + i_block)
    end = tl.load(p_block_first + i_block + 1)
    b_own, b_written = slot_pair(p_rank, p_block_slot, first, end)
    return b_slot, first, end, b_own, b_written


@triton.jit
def add_lora(
    b_acc, b_slot, first, end, b_own, b_written, p_y, p_b, p_rank, p_block_slot, o_m, o_n, N, R, stride_y,
    ONE_BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """b_acc [M, N] + y[M, R] B[N, R]ᵀ, once for each slot that the block of rows meets, with that slot's rows of y."""
    o_r = tl.arange(0, BLOCK_R)
    m_n = (o_n < N)[:, None]
    if BLOCK_R == 16:
        # Two slots a step: most blocks of rows meet no more, and a step waits for memory once. Each slot has its own 16
        # columns of a matrix instruction, so a row's sum is what it would be in a step of its own.
        o_c = tl.arange(0, 32) % 16
        p_y_m = p_y + o_m.to(tl.int64)[:, None] * stride_y + o_c[None, :]
        for i_entry in range(first, end, 2):
            m_c = tl.max_constancy(o_c < b_written, 16)
            b_y = tl.load(p_y_m, mask=(b_slot[:, None] == b_own[None, :]) & m_c[None, :], other=0.0)
            b_at = tl.max_constancy(b_own.to(tl.int64) * N * R, 16) + o_c
            b_b = tl.load(p_b + o_n[:, None] * R + b_at[None, :], mask=m_n & (m_c & (o_c < R))[None, :], other=0.0)
            b_acc = dot(b_y, tl.trans(b_b), b_acc)
            b_own, b_written = slot_pair(p_rank, p_block_slot, i_entry + 2, end)
    else:
        p_y_m = p_y + o_m.to(tl.int64)[:, None] * stride_y + o_r[None, :]
        for i_entry in range(first, end):
            i_slot = tl.load(p_block_slot + i_entry)
            rank = tl.load(p_rank + i_slot)
            written = tl.cdiv(rank, 16) * 16
            m_m = (b_slot == i_slot)[:, None]
            p_b_n = p_b + i_slot.to(tl.int64) * N * R + o_n[:, None] * R + o_r[None, :]
            if ONE_BLOCK:
                b_y = tl.load(p_y_m, mask=m_m & (o_r < written)[None, :], other=0.0)
                b_b = tl.load(p_b_n, mask=m_n & (o_r < R)[None, :], other=0.0)
                b_acc = dot(b_y, tl.trans(b_b), b_acc)
            else:
                for i_r in range(0, rank, BLOCK_R):
                    b_y = tl.load(p_y_m + i_r, mask=m_m & (o_r < written - i_r)[None, :], other=0.0)
                    b_b = tl.load(p_b_n + i_r, mask=m_n & (o_r < R - i_r)[None, :], other=0.0)
                    b_acc = dot(b_y, tl.trans(b_b), b_acc)
    return b_acc


@triton.jit
def pointer_gemm_kernel(
    p_x, p_w, p_bias, p_out,
    M, N, K, stride_x, stride_w, stride_out,
    p_y, p_b, p_rank, p_token_slot, p_block_first, p_block_slot, R, stride_y,
    BIAS: tl.constexpr, LORA: tl.constexpr, ONE_BLOCK: tl.constexpr, LIST_ROWS: tl.constexpr, OVERLAP: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] W[N, K]ᵀ (+ bias) (+ LoRA), for any strides of rows and any widths. One tile a program."""
    i_m, i_n = place(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns over the edge read the last one again: their sums are never stored, and the loop has no mask.
    p_x_m = p_x + tl.minimum(o_m, M - 1).to(tl.int64)[:, None] * stride_x
    p_w_n = p_w + tl.minimum(o_n, N - 1).to(tl.int64)[:, None] * stride_w
    if LORA:
        b_slot, first, end, b_own, b_written = slot_list(
            p_rank, p_token_slot, p_block_first, p_block_slot, o_m, i_m * BLOCK_M // LIST_ROWS, M
        )
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_k in range(0, K, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = (o_k < K)[None, :]
        b_x = tl.load(p_x_m + o_k[None, :], mask=m_k, other=0.0)
        b_w = tl.load(p_w_n + o_k[None, :], mask=m_k, other=0.0)
        b_acc = dot(b_x, tl.trans(b_w), b_acc)
    if LORA:
        wait_for_last(OVERLAP)
        b_acc = add_lora(
            b_acc, b_slot, first, end, b_own, b_written, p_y, p_b, p_rank, p_block_slot, o_m, o_n, N, R, stride_y,
            ONE_BLOCK, BLOCK_R,
        )  # fmt: skip
    if BIAS:
        b_acc += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    p_o = p_out + o_m.to(tl.int64)[:, None] * stride_out + o_n[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=(o_m < M)[:, None] & (o_n < N)[None, :])


@triton.jit
def tma_gemm_kernel(
    d_x, d_w, p_bias, d_out,
    M, N, K,
    p_y, p_b, p_rank, p_token_slot, p_block_first, p_block_slot, R, stride_y,
    BIAS: tl.constexpr, LORA: tl.constexpr, ONE_BLOCK: tl.constexpr, LIST_ROWS: tl.constexpr, FLATTEN: tl.constexpr,
    OVERLAP: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The same through tensor descriptors (d_: bulk copies, zero beyond the edges), over a persistent grid.

    FLATTEN makes one loop of tiles and K, so that a tile's first blocks are fetched while the last one is stored.
    """
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for i_work in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        i_m, i_n = place(i_work, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if LORA:
            b_slot, first, end, b_own, b_written = slot_list(
                p_rank, p_token_slot, p_block_first, p_block_slot, o_m, i_m * BLOCK_M // LIST_ROWS, M
            )
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for i_k in range(0, K, BLOCK_K):
            b_x = d_x.load([i_m * BLOCK_M, i_k])
            b_w = d_w.load([i_n * BLOCK_N, i_k])
            b_acc = dot(b_x, tl.trans(b_w), b_acc)
        if LORA:
            wait_for_last(OVERLAP)
            b_acc = add_lora(
                b_acc, b_slot, first, end, b_own, b_written, p_y, p_b, p_rank, p_block_slot, o_m, o_n, N, R, stride_y,
                ONE_BLOCK, BLOCK_R,
            )  # fmt: skip
        if BIAS:
            b_acc += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
        d_out.store([i_m * BLOCK_M, i_n * BLOCK_N], b_acc.to(d_out.dtype))
