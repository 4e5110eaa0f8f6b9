"""Triton kernel of a causal depthwise convolution over a packed row. T tokens, C channels, K taps."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def causal_conv_kernel(
    p_x, p_weight, p_bias, p_positions, p_out,
    T, C, blocks, stride_xt, stride_xc, stride_wc, stride_wk,
    K: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A tap reaches back to tokens of the same request alone, which the position of a token tells.

    One program takes BLOCK_T tokens of BLOCK_C channels: it reads them once from memory and K − 1 times out of L1. What
    it costs beside that is instructions: with products and sums apart, selections and an exact division they were fifty
    for an element, and took longer than memory.
    """
    i_work = tl.program_id(0).to(tl.int64)
    o_t = i_work // blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    o_c = (i_work % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_t = o_t < T
    m_c = o_c < C
    b_position = tl.load(p_positions + o_t, mask=m_t, other=0)
    b_sum = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    p_xc = p_x + o_c[None, :] * stride_xc
    for back in tl.static_range(K):
        m_tc = (m_t & (b_position >= back) & (o_t >= back))[:, None] & m_c[None, :]
        b_x = tl.load(p_xc + (o_t - back)[:, None] * stride_xt, mask=m_tc, other=0.0).to(tl.float32)
        b_w = tl.load(p_weight + o_c * stride_wc + (K - 1 - back) * stride_wk, mask=m_c, other=0.0).to(tl.float32)
        b_sum += b_x * b_w[None, :]
    if BIAS:
        b_sum += tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_out = b_sum.to(p_out.dtype.element_ty)
    if SILU:
        b_wide = b_out.to(tl.float32)
        b_out = (b_wide / (1.0 + tl.exp(-b_wide))).to(p_out.dtype.element_ty)
    tl.store(p_out + o_t[:, None] * C + o_c[None, :], b_out, mask=m_t[:, None] & m_c[None, :])
