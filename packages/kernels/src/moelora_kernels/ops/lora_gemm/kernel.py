"""Triton kernel of several projections of one input with LoRA in their accumulators, over one persistent grid.

M rows, N output width of a projection, K input width, R rank. The weights lie behind one another as one matrix, so that
one launch fills the device where a narrow projection alone would not. Sums and their order are `invariant_gemm`'s.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from moelora_kernels.dot import dot
from moelora_kernels.ops.dense_lora.kernel import pick
from moelora_kernels.ops.invariant_gemm.kernel import add_lora, slot_list
from moelora_kernels.overlap import wait_for_last
from moelora_kernels.tile_order import place


@triton.jit
def projections_kernel(
    d_x, d_w, p_bias, d_o0, d_o1, d_o2, d_o3,
    M, K, N0, N1, N2, N3,
    p_y, p_b0, p_b1, p_b2, p_b3, p_rank0, p_rank1, p_rank2, p_rank3, R, padded, stride_y,
    p_token_slot, p_block_first, p_block_slot,
    NUM: tl.constexpr, BIAS: tl.constexpr, ONE_BLOCK: tl.constexpr, LIST_ROWS: tl.constexpr, OVERLAP: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """o_i[M, N_i] = x[M, K] W_i[N_i, K]ᵀ (+ bias_i) + LoRA_i for NUM projections; d_: tensor descriptors.

    d_w and p_bias: all W_i and all biases one behind the other. p_y `[M, NUM·padded]`: A x by token, projection i from
    column i·padded on. b `[L, N_i, R]`: one R for all, so that the compiler sees how rows are aligned.
    """
    blocks0 = tl.cdiv(N0, BLOCK_N)
    blocks1 = blocks0 + (tl.cdiv(N1, BLOCK_N) if NUM > 1 else 0)
    blocks2 = blocks1 + (tl.cdiv(N2, BLOCK_N) if NUM > 2 else 0)
    blocks_n = blocks2 + (tl.cdiv(N3, BLOCK_N) if NUM > 3 else 0)
    for i_work in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * blocks_n, tl.num_programs(0)):
        i_m, i_n = place(i_work, tl.cdiv(M, BLOCK_M), blocks_n, GROUP_M)
        i_p = (i_n >= blocks0).to(tl.int32) + (i_n >= blocks1).to(tl.int32) + (i_n >= blocks2).to(tl.int32)
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        first_n = (i_n - pick(i_p, 0, blocks0, blocks1, blocks2, NUM)) * BLOCK_N
        first_w = first_n + pick(i_p, 0, N0, N0 + N1, N0 + N1 + N2, NUM)
        width = pick(i_p, N0, N1, N2, N3, NUM)
        o_n = first_n + tl.arange(0, BLOCK_N)
        p_rank = pick(i_p, p_rank0, p_rank1, p_rank2, p_rank3, NUM)
        b_slot, first, end, b_own, b_written = slot_list(
            p_rank, p_token_slot, p_block_first, p_block_slot, o_m, i_m * BLOCK_M // LIST_ROWS, M
        )
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for i_k in range(0, K, BLOCK_K):
            # Columns behind a projection's own are the next one's: computed, and not stored by its descriptor.
            b_x = d_x.load([i_m * BLOCK_M, i_k])
            b_w = d_w.load([first_w, i_k])
            b_acc = dot(b_x, tl.trans(b_w), b_acc)
        wait_for_last(OVERLAP)
        b_acc = add_lora(
            b_acc, b_slot, first, end, b_own, b_written, p_y + i_p * padded, pick(i_p, p_b0, p_b1, p_b2, p_b3, NUM),
            p_rank, p_block_slot, o_m, o_n, width, R, stride_y, ONE_BLOCK, BLOCK_R,
        )  # fmt: skip
        if BIAS:
            b_acc += tl.load(p_bias + first_w - first_n + o_n, mask=o_n < width, other=0.0).to(tl.float32)[None, :]
        b_out = b_acc.to(d_o0.dtype)
        if NUM == 1:
            d_o0.store([i_m * BLOCK_M, first_n], b_out)
        else:
            if i_p == 0:
                d_o0.store([i_m * BLOCK_M, first_n], b_out)
            elif i_p == 1:
                d_o1.store([i_m * BLOCK_M, first_n], b_out)
            elif i_p == 2:
                d_o2.store([i_m * BLOCK_M, first_n], b_out)
            else:
                d_o3.store([i_m * BLOCK_M, first_n], b_out)
