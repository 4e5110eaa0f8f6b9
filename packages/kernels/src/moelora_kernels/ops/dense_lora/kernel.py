"""Triton kernels of dense LoRA: shrink (y = A x), gather (y = A[:, id]) and expand (out += B y).

Every kernel is persistent: a fixed grid walks over the live tiles, whose number it reads from the device. So a graph
captured for many request slots pays nothing for those that a batch leaves empty, and no grid axis can overflow.

A row's bits depend on the row, its slot's factors and the widths alone: each product runs over K in blocks of one size
in ascending order, whatever the tile; there are no atomics and K is never split across programs.

M rows of a tile, K input width, N output width, R rank. Prefixes: p_ pointer, i_ index, o_ offsets, m_ mask, b_ block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from moelora_kernels.dot import dot
from moelora_kernels.overlap import let_next_start, wait_for_last


@triton.jit
def _tile_rows(p_start, p_rows, p_perm, i_tile, i_part, GATHER: tl.constexpr, BLOCK_M: tl.constexpr):
    """Scratch rows, token rows (both int64 [M]) and their mask. With GATHER, tiles count rows of the sorted order."""
    o_m = i_part * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < tl.load(p_rows + i_tile)
    o_y = (tl.load(p_start + i_tile) + o_m).to(tl.int64)
    if GATHER:
        o_t = tl.load(p_perm + o_y, mask=m_m, other=0).to(tl.int64)
    else:
        o_t = o_y
    return o_y, o_t, m_m


@triton.jit
def _load_a(p_a, o_r, o_k, m_k, R, K, DTYPE: tl.constexpr):
    """[R, K] block of one slot's A, transposed to [K, R]."""
    b_a = tl.load(p_a + o_r[:, None] * K + o_k[None, :], mask=(o_r < R)[:, None] & m_k[None, :], other=0.0)
    return tl.trans(b_a.to(DTYPE))


@triton.jit
def _store_y(p_y, o_y, m_m, o_r, b_acc, rank, stride_y, width):
    """Stores [M, R] of y; columns beyond the slot's own rank become zero, whatever the bank holds there."""
    b_y = tl.where((o_r < rank)[None, :], b_acc, 0.0)
    tl.store(
        p_y + o_y[:, None] * stride_y + o_r[None, :],
        b_y.to(p_y.dtype.element_ty),
        mask=m_m[:, None] & (o_r < width)[None, :],
    )


@triton.jit
def shrink_kernel(
    p_x, p_y,
    p_a0, p_a1, p_a2, p_a3,
    p_rank0, p_rank1, p_rank2, p_rank3,
    R0, R1, R2, R3,
    o_y1, o_y2, o_y3, o_y4,
    p_count, p_start, p_rows, p_slot, p_perm,
    K, stride_x, stride_y,
    NUM: tl.constexpr, GATHER: tl.constexpr, BY_TOKEN: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = A x for up to four projections of one input; x is read once per block of ranks.

    A tile is shared by PARTS pieces of work, which write rows of the sorted order or, BY_TOKEN, of the batch.

    p_a*: [L, R*, K]. p_y: [rows, o_y4], the projections side by side; projection i ends before column o_y{i+1}.
    """
    let_next_start(OVERLAP)
    for i_work in range(tl.program_id(0), tl.load(p_count) * PARTS, tl.num_programs(0)):
        i_tile = i_work // PARTS
        i_slot = tl.load(p_slot + i_tile).to(tl.int64)
        o_y, o_t, m_m = _tile_rows(p_start, p_rows, p_perm, i_tile, i_work % PARTS, GATHER, BLOCK_M)
        if BY_TOKEN:
            o_y = o_t
        rank0 = tl.load(p_rank0 + i_slot)
        rank1 = rank0
        rank2 = rank0
        rank3 = rank0
        most = rank0
        if NUM > 1:
            rank1 = tl.load(p_rank1 + i_slot)
            most = tl.maximum(most, rank1)
        if NUM > 2:
            rank2 = tl.load(p_rank2 + i_slot)
            most = tl.maximum(most, rank2)
        if NUM > 3:
            rank3 = tl.load(p_rank3 + i_slot)
            most = tl.maximum(most, rank3)
        for i_r in range(0, most, BLOCK_R):
            o_r = i_r + tl.arange(0, BLOCK_R)
            acc0 = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
            acc1 = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
            acc2 = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
            acc3 = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
            for i_k in range(0, K, BLOCK_K):
                o_k = i_k + tl.arange(0, BLOCK_K)
                m_k = o_k < K
                b_x = tl.load(p_x + o_t[:, None] * stride_x + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
                b_a = _load_a(p_a0 + i_slot * R0 * K, o_r, o_k, m_k, R0, K, b_x.dtype)
                acc0 = dot(b_x, b_a, acc0)
                if NUM > 1:
                    b_a = _load_a(p_a1 + i_slot * R1 * K, o_r, o_k, m_k, R1, K, b_x.dtype)
                    acc1 = dot(b_x, b_a, acc1)
                if NUM > 2:
                    b_a = _load_a(p_a2 + i_slot * R2 * K, o_r, o_k, m_k, R2, K, b_x.dtype)
                    acc2 = dot(b_x, b_a, acc2)
                if NUM > 3:
                    b_a = _load_a(p_a3 + i_slot * R3 * K, o_r, o_k, m_k, R3, K, b_x.dtype)
                    acc3 = dot(b_x, b_a, acc3)
            _store_y(p_y, o_y, m_m, o_r, acc0, rank0, stride_y, o_y1)
            if NUM > 1:
                _store_y(p_y + o_y1, o_y, m_m, o_r, acc1, rank1, stride_y, o_y2 - o_y1)
            if NUM > 2:
                _store_y(p_y + o_y2, o_y, m_m, o_r, acc2, rank2, stride_y, o_y3 - o_y2)
            if NUM > 3:
                _store_y(p_y + o_y3, o_y, m_m, o_r, acc3, rank3, stride_y, o_y4 - o_y3)


@triton.jit
def pick(i, v0, v1, v2, v3, NUM: tl.constexpr):
    """Value number i of up to four."""
    picked = v0
    if NUM > 1:
        picked = tl.where(i == 1, v1, picked)
    if NUM > 2:
        picked = tl.where(i == 2, v2, picked)
    if NUM > 3:
        picked = tl.where(i == 3, v3, picked)
    return picked


@triton.jit
def shrink_narrow_kernel(
    p_x, p_y,
    p_a0, p_a1, p_a2, p_a3,
    p_rank0, p_rank1, p_rank2, p_rank3,
    R0, R1, R2, R3,
    p_count, p_start, p_rows, p_slot, p_perm,
    K, stride_x, stride_y,
    NUM: tl.constexpr, GATHER: tl.constexpr, BY_TOKEN: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`shrink_kernel` for projections of up to 16 ranks each: their columns side by side, in one product a step.

    Column c of y belongs to projection c // 16 and its rank index c % 16. BLOCK_C ≥ 16·NUM.
    """
    let_next_start(OVERLAP)
    o_c = tl.arange(0, BLOCK_C)
    i_p = o_c // 16
    o_r = o_c % 16
    b_most = tl.where(o_c < 16 * NUM, pick(i_p, R0, R1, R2, R3, NUM), 0)
    for i_work in range(tl.program_id(0), tl.load(p_count) * PARTS, tl.num_programs(0)):
        i_tile = i_work // PARTS
        i_slot = tl.load(p_slot + i_tile).to(tl.int64)
        o_y, o_t, m_m = _tile_rows(p_start, p_rows, p_perm, i_tile, i_work % PARTS, GATHER, BLOCK_M)
        if BY_TOKEN:
            o_y = o_t
        b_rank = tl.load(pick(i_p, p_rank0, p_rank1, p_rank2, p_rank3, NUM) + i_slot, mask=o_c < 16 * NUM, other=0)
        p_a = pick(i_p, p_a0, p_a1, p_a2, p_a3, NUM) + (i_slot * b_most + tl.minimum(o_r, b_most - 1)) * K
        acc = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
        for i_k in range(0, K, BLOCK_K):
            o_k = i_k + tl.arange(0, BLOCK_K)
            m_k = o_k < K
            b_x = tl.load(p_x + o_t[:, None] * stride_x + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_a = tl.load(p_a[:, None] + o_k[None, :], mask=(o_r < b_most)[:, None] & m_k[None, :], other=0.0)
            acc = dot(b_x, tl.trans(b_a.to(b_x.dtype)), acc)
        # As many groups of 16 as a slot's rank fills; a projection that its adapter leaves alone gets none.
        m_y = m_m[:, None] & (b_rank > 0)[None, :]
        b_y = tl.where((o_r < b_rank)[None, :], acc, 0.0)
        tl.store(p_y + o_y[:, None] * stride_y + o_c[None, :], b_y.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit
def gather_kernel(
    p_ids, p_y, p_a, p_rank, R, V, width,
    p_count, p_start, p_rows, p_slot, p_perm,
    stride_y,
    GATHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """y = A[:, id] for an embedding. p_a: [L, R, V], p_ids: int64 [T]. An id outside [0, V) gives zero."""
    for i_tile in range(tl.program_id(0), tl.load(p_count), tl.num_programs(0)):
        i_slot = tl.load(p_slot + i_tile).to(tl.int64)
        o_y, o_t, m_m = _tile_rows(p_start, p_rows, p_perm, i_tile, 0, GATHER, BLOCK_M)
        b_id = tl.load(p_ids + o_t, mask=m_m, other=0).to(tl.int64)
        m_id = m_m & (b_id >= 0) & (b_id < V)
        rank = tl.load(p_rank + i_slot)
        for i_r in range(0, rank, BLOCK_R):
            o_r = i_r + tl.arange(0, BLOCK_R)
            o_a = (i_slot * R + o_r[None, :]) * V + b_id[:, None]
            b_a = tl.load(p_a + o_a, mask=m_id[:, None] & (o_r < rank)[None, :], other=0.0)
            _store_y(p_y, o_y, m_m, o_r, b_a, rank, stride_y, width)


@triton.jit
def _expand_columns(
    p_y, p_b, p_out, rank, o_y, o_t, m_m, i_slot, i_first, i_last, R, N, stride_y, stride_out,
    EVERY_SLOT: tl.constexpr, ONE_BLOCK: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out[M, N] += y[M, R] B[N, R]ᵀ for the blocks of columns [i_first, i_last) of one projection.

    EVERY_SLOT: y has R columns for every slot, and its rows are those of the batch.

    ONE_BLOCK: the bank's ranks fit into one block. Then y stays in registers, and the loop over columns has no loop
    inside, so that the compiler fetches the next blocks of out and B while it works on this one.
    """
    o_r = tl.arange(0, BLOCK_R)
    if EVERY_SLOT:
        written = rank
        p_y_m = p_y + o_t[:, None] * stride_y + i_slot * R + o_r[None, :]
    else:
        # Shrink writes whole groups of 16 ranks, and no more of them than the slot has.
        written = tl.cdiv(rank, 16) * 16
        p_y_m = p_y + o_y[:, None] * stride_y + o_r[None, :]
    p_b_r = p_b + i_slot * N * R + o_r[None, :]
    p_out_m = p_out + o_t[:, None] * stride_out
    if ONE_BLOCK:
        b_y = tl.load(p_y_m, mask=m_m[:, None] & (o_r < written)[None, :], other=0.0)
        for i_n in tl.range(i_first, i_last, num_stages=STAGES):
            o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
            m_n = o_n < N
            m_o = m_m[:, None] & m_n[None, :]
            b_out = tl.load(p_out_m + o_n[None, :], mask=m_o, other=0.0)
            b_b = tl.load(p_b_r + o_n[:, None] * R, mask=m_n[:, None] & (o_r < R)[None, :], other=0.0)
            b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            b_acc = dot(b_y, tl.trans(b_b.to(b_y.dtype)), b_acc)
            tl.store(p_out_m + o_n[None, :], (b_out.to(tl.float32) + b_acc).to(p_out.dtype.element_ty), mask=m_o)
    else:
        for i_n in range(i_first, i_last):
            o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
            m_n = o_n < N
            m_o = m_m[:, None] & m_n[None, :]
            # Read before the products, so that the trip to memory overlaps them.
            b_out = tl.load(p_out_m + o_n[None, :], mask=m_o, other=0.0)
            b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for i_r in range(0, rank, BLOCK_R):
                b_y = tl.load(p_y_m + i_r, mask=m_m[:, None] & (o_r < written - i_r)[None, :], other=0.0)
                m_b = m_n[:, None] & (o_r < R - i_r)[None, :]
                b_b = tl.load(p_b_r + o_n[:, None] * R + i_r, mask=m_b, other=0.0)
                b_acc = dot(b_y, tl.trans(b_b.to(b_y.dtype)), b_acc)
            tl.store(p_out_m + o_n[None, :], (b_out.to(tl.float32) + b_acc).to(p_out.dtype.element_ty), mask=m_o)


@triton.jit
def expand_kernel(
    p_y,
    p_b0, p_b1, p_b2, p_b3,
    p_out0, p_out1, p_out2, p_out3,
    p_rank0, p_rank1, p_rank2, p_rank3,
    R0, R1, R2, R3,
    N0, N1, N2, N3,
    stride_out0, stride_out1, stride_out2, stride_out3,
    o_y1, o_y2, o_y3,
    p_count, p_start, p_rows, p_slot, p_perm,
    stride_y, group,
    NUM: tl.constexpr, GATHER: tl.constexpr, EVERY_SLOT: tl.constexpr, ONE_BLOCK: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out += B y for up to four projections, in place. p_b*: [L, N*, R*].

    A piece of work is one tile by `group` blocks of columns of one projection.
    """
    wait_for_last(OVERLAP)
    groups0 = tl.cdiv(N0, BLOCK_N * group)
    groups1 = tl.cdiv(N1, BLOCK_N * group)
    groups2 = tl.cdiv(N2, BLOCK_N * group)
    groups = groups0
    if NUM > 1:
        groups += groups1
    if NUM > 2:
        groups += groups2
    if NUM > 3:
        groups += tl.cdiv(N3, BLOCK_N * group)
    for i_work in range(tl.program_id(0), tl.load(p_count) * groups, tl.num_programs(0)):
        i_tile = i_work // groups
        i_g = i_work % groups
        i_slot = tl.load(p_slot + i_tile).to(tl.int64)
        o_y, o_t, m_m = _tile_rows(p_start, p_rows, p_perm, i_tile, 0, GATHER, BLOCK_M)
        if i_g < groups0:
            rank = tl.load(p_rank0 + i_slot)
            if rank > 0:
                _expand_columns(
                    p_y, p_b0, p_out0, rank, o_y, o_t, m_m, i_slot,
                    i_g * group, tl.minimum((i_g + 1) * group, tl.cdiv(N0, BLOCK_N)),
                    R0, N0, stride_y, stride_out0, EVERY_SLOT, ONE_BLOCK, STAGES, BLOCK_M, BLOCK_N, BLOCK_R,
                )  # fmt: skip
        if NUM > 1:
            i_g -= groups0
            if (i_g >= 0) & (i_g < groups1):
                rank = tl.load(p_rank1 + i_slot)
                if rank > 0:
                    _expand_columns(
                        p_y + o_y1, p_b1, p_out1, rank, o_y, o_t, m_m, i_slot,
                        i_g * group, tl.minimum((i_g + 1) * group, tl.cdiv(N1, BLOCK_N)),
                        R1, N1, stride_y, stride_out1, EVERY_SLOT, ONE_BLOCK, STAGES, BLOCK_M, BLOCK_N, BLOCK_R,
                    )  # fmt: skip
        if NUM > 2:
            i_g -= groups1
            if (i_g >= 0) & (i_g < groups2):
                rank = tl.load(p_rank2 + i_slot)
                if rank > 0:
                    _expand_columns(
                        p_y + o_y2, p_b2, p_out2, rank, o_y, o_t, m_m, i_slot,
                        i_g * group, tl.minimum((i_g + 1) * group, tl.cdiv(N2, BLOCK_N)),
                        R2, N2, stride_y, stride_out2, EVERY_SLOT, ONE_BLOCK, STAGES, BLOCK_M, BLOCK_N, BLOCK_R,
                    )  # fmt: skip
        if NUM > 3:
            i_g -= groups2
            if i_g >= 0:
                rank = tl.load(p_rank3 + i_slot)
                if rank > 0:
                    _expand_columns(
                        p_y + o_y3, p_b3, p_out3, rank, o_y, o_t, m_m, i_slot,
                        i_g * group, tl.minimum((i_g + 1) * group, tl.cdiv(N3, BLOCK_N)),
                        R3, N3, stride_y, stride_out3, EVERY_SLOT, ONE_BLOCK, STAGES, BLOCK_M, BLOCK_N, BLOCK_R,
                    )  # fmt: skip
