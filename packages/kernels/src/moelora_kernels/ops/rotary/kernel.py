"""Triton kernel of rotary position embedding, for queries and keys at once.

H heads, P pairs, D head size. One program turns all heads of one token, a block of heads at a time.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotate_heads(
    p_x, p_out, H, D, P, stride_xh, stride_oh, b_cos, b_sin,
    LAYOUT: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    o_p = tl.arange(0, BLOCK_P)
    m_p = o_p < P
    if LAYOUT == 0:
        o_first = o_p
        o_second = o_p + P
    else:
        o_first = 2 * o_p
        o_second = 2 * o_p + 1
    if LAYOUT == 1:
        o_to_first = o_first
        o_to_second = o_second
    else:
        o_to_first = o_p
        o_to_second = o_p + P
    for i_h in range(0, H, BLOCK_H):
        o_h = i_h + tl.arange(0, BLOCK_H)
        m_hp = (o_h < H)[:, None] & m_p[None, :]
        p_x_h = p_x + o_h[:, None] * stride_xh
        p_out_h = p_out + o_h[:, None] * stride_oh
        b_first = tl.load(p_x_h + o_first[None, :], mask=m_hp, other=0.0)
        b_second = tl.load(p_x_h + o_second[None, :], mask=m_hp, other=0.0)
        dtype = b_first.dtype
        b_first = b_first.to(tl.float32)
        b_second = b_second.to(tl.float32)
        b_fc = b_first * b_cos
        b_ss = b_second * b_sin
        b_sc = b_second * b_cos
        b_fs = b_first * b_sin
        if not WIDE:
            # Each product is a tensor of its own in the module, and so rounded before the sum.
            b_fc = b_fc.to(dtype).to(tl.float32)
            b_ss = b_ss.to(dtype).to(tl.float32)
            b_sc = b_sc.to(dtype).to(tl.float32)
            b_fs = b_fs.to(dtype).to(tl.float32)
        if REST:
            o_d = 2 * P + tl.arange(0, BLOCK_D)
            m_hd = (o_h < H)[:, None] & (o_d < D)[None, :]
            tl.store(p_out_h + o_d[None, :], tl.load(p_x_h + o_d[None, :], mask=m_hd), mask=m_hd)
        # In place, every read of these heads must come before any write: pairs may move to other columns.
        tl.debug_barrier()
        tl.store(p_out_h + o_to_first[None, :], (b_fc - b_ss).to(dtype), mask=m_hp)
        tl.store(p_out_h + o_to_second[None, :], (b_sc + b_fs).to(dtype), mask=m_hp)


@triton.jit
def rotary_kernel(
    p_q, p_k, p_q_out, p_k_out, p_cos, p_sin,
    HQ, HK, D, P,
    stride_qt, stride_qh, stride_kt, stride_kh,
    stride_qot, stride_qoh, stride_kot, stride_koh,
    stride_cos_t, stride_cos_p, stride_sin_t, stride_sin_p,
    LAYOUT: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """LAYOUT indexes `LAYOUTS`. REST: elements behind the rotated ones are copied (0 in place)."""
    i_t = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BLOCK_P)
    m_p = o_p < P
    b_cos = tl.load(p_cos + i_t * stride_cos_t + o_p * stride_cos_p, mask=m_p, other=0.0).to(tl.float32)[None, :]
    b_sin = tl.load(p_sin + i_t * stride_sin_t + o_p * stride_sin_p, mask=m_p, other=0.0).to(tl.float32)[None, :]
    _rotate_heads(
        p_q + i_t * stride_qt, p_q_out + i_t * stride_qot, HQ, D, P, stride_qh, stride_qoh, b_cos, b_sin,
        LAYOUT, WIDE, REST, BLOCK_H, BLOCK_P, BLOCK_D,
    )  # fmt: skip
    _rotate_heads(
        p_k + i_t * stride_kt, p_k_out + i_t * stride_kot, HK, D, P, stride_kh, stride_koh, b_cos, b_sin,
        LAYOUT, WIDE, REST, BLOCK_H, BLOCK_P, BLOCK_D,
    )  # fmt: skip
