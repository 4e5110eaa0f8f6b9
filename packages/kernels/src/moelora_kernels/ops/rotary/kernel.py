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
    o_2p = tl.arange(0, 2 * BLOCK_P)
    for i_h in range(0, H, BLOCK_H):
        o_h = i_h + tl.arange(0, BLOCK_H)
        m_hp = (o_h < H)[:, None] & m_p[None, :]
        m_h2p = (o_h < H)[:, None] & (o_2p < 2 * P)[None, :]
        p_x_h = p_x + o_h[:, None] * stride_xh
        p_out_h = p_out + o_h[:, None] * stride_oh
        if LAYOUT == 0:
            b_first = tl.load(p_x_h + o_p[None, :], mask=m_hp, other=0.0)
            b_second = tl.load(p_x_h + o_p[None, :] + P, mask=m_hp, other=0.0)
        else:
            # One wide read, taken apart in registers: every second element alone would break it into single ones.
            b_pairs = tl.load(p_x_h + o_2p[None, :], mask=m_h2p, other=0.0)
            b_first, b_second = tl.split(tl.reshape(b_pairs, (BLOCK_H, BLOCK_P, 2)))
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
        b_first = (b_fc - b_ss).to(dtype)
        b_second = (b_sc + b_fs).to(dtype)
        if REST:
            o_d = 2 * P + tl.arange(0, BLOCK_D)
            m_hd = (o_h < H)[:, None] & (o_d < D)[None, :]
            tl.store(p_out_h + o_d[None, :], tl.load(p_x_h + o_d[None, :], mask=m_hd), mask=m_hd)
        # In place, every read of these heads must come before any write: pairs may move to other columns.
        tl.debug_barrier()
        if LAYOUT == 1:
            b_pairs = tl.reshape(tl.join(b_first, b_second), (BLOCK_H, 2 * BLOCK_P))
            tl.store(p_out_h + o_2p[None, :], b_pairs, mask=m_h2p)
        else:
            tl.store(p_out_h + o_p[None, :], b_first, mask=m_hp)
            tl.store(p_out_h + o_p[None, :] + P, b_second, mask=m_hp)


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
