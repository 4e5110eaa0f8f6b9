"""Triton kernel of the k largest of each row, for rows of at most a few hundred elements: a router's choice.

T rows, E elements of a row. Prefixes: p_ pointer, o_ offsets, m_ mask, b_ block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=["rows"])
def top_k_kernel(
    p_x, p_value, p_index, rows, E, stride_x,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Takes the largest element that is left, K times. Both results are `[T, K]`, contiguous, the index int64.

    SOFTMAX: values are those of the row's softmax, in fp32; NORMED: divided by the sum of the K.

    An element's bits, made to ascend as it does, and its index, made to descend, are one integer: one maximum finds
    the largest and, among equals, the first.
    """
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [T]
    o_e = tl.arange(0, BLOCK_E)  # [E]
    o_k = tl.arange(0, BLOCK_K)  # [K]
    m_t = o_t < rows
    m_x = m_t[:, None] & (o_e < E)[None, :]
    b_x = tl.load(p_x + o_t.to(tl.int64)[:, None] * stride_x + o_e[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_x = tl.where(b_x != b_x, float("nan"), b_x + 0.0)  # one NaN, above infinity, and one zero
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_key = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits).to(tl.int64) << 32
    b_key = tl.where(m_x, b_key | (BLOCK_E - 1 - o_e)[None, :].to(tl.int64), _LOWEST)
    b_most = tl.full((BLOCK_T, BLOCK_K), 0, dtype=tl.int64)
    for i_k in tl.static_range(K):
        b_first = tl.max(b_key, 1)  # [T]
        b_most = tl.where((o_k == i_k)[None, :], b_first[:, None], b_most)
        b_key = tl.where(b_key == b_first[:, None], _LOWEST, b_key)
    b_bits = (b_most >> 32).to(tl.int32)
    b_value = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits).to(tl.float32, bitcast=True)
    if SOFTMAX:
        # The largest comes first.
        b_max = tl.max(tl.where((o_k == 0)[None, :], b_value, float("-inf")), 1)  # [T]
        b_total = tl.sum(tl.where(m_x, tl.exp(b_x - b_max[:, None]), 0.0), 1)
        b_value = tl.div_rn(tl.exp(b_value - b_max[:, None]), b_total[:, None])
        if NORMED:
            b_sum = tl.sum(tl.where((o_k < K)[None, :], b_value, 0.0), 1)
            b_value = tl.div_rn(b_value, b_sum[:, None])
    p_to = o_t.to(tl.int64)[:, None] * K + o_k[None, :]
    m_to = m_t[:, None] & (o_k < K)[None, :]
    tl.store(p_value + p_to, b_value.to(p_value.dtype.element_ty), mask=m_to)
    tl.store(p_index + p_to, BLOCK_E - 1 - (b_most & 0xFFFFFFFF), mask=m_to)
