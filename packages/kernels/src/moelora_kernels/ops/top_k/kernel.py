"""Triton kernel of the k largest of each row, for rows of at most a few hundred elements: a router's choice.

T rows, E elements of a row. Prefixes: p_ pointer, o_ offsets, m_ mask, b_ block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

_NOBODY = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["rows"])
def top_k_kernel(
    p_x, p_value, p_index, rows, E, stride_x,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Takes the largest element that is left, K times. Both results are `[T, K]`, contiguous, the index int64."""
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [T]
    o_e = tl.arange(0, BLOCK_E)  # [E]
    o_k = tl.arange(0, BLOCK_K)  # [K]
    m_t = o_t < rows
    m_x = m_t[:, None] & (o_e < E)[None, :]
    b_x = tl.load(p_x + o_t.to(tl.int64)[:, None] * stride_x + o_e[None, :], mask=m_x, other=0.0)
    b_key = b_x.to(tl.float32)
    b_key = tl.where(b_key != b_key, float("inf"), b_key)
    m_left = m_x
    b_value = tl.zeros((BLOCK_T, BLOCK_K), dtype=b_x.dtype)
    b_index = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.int32)
    for i_k in tl.static_range(K):
        b_most = tl.max(tl.where(m_left, b_key, float("-inf")), 1)  # [T]
        b_first = tl.min(tl.where(m_left & (b_key == b_most[:, None]), o_e[None, :], _NOBODY), 1)
        m_taken = o_e[None, :] == b_first[:, None]
        # One term of this sum is the element itself, be it NaN.
        b_taken = tl.sum(tl.where(m_taken, b_x, 0.0), 1)
        b_value = tl.where((o_k == i_k)[None, :], b_taken[:, None], b_value)
        b_index = tl.where((o_k == i_k)[None, :], b_first[:, None], b_index)
        m_left = m_left & (m_taken == 0)
    p_to = o_t.to(tl.int64)[:, None] * K + o_k[None, :]
    m_to = m_t[:, None] & (o_k < K)[None, :]
    tl.store(p_value + p_to, b_value, mask=m_to)
    tl.store(p_index + p_to, b_index.to(tl.int64), mask=m_to)
