"""Triton kernel of rotary position embedding, for queries and keys at once, with an optional norm of heads before it.

H heads, P pairs, D head size. One program turns all heads of one token, a block of heads at a time.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from moelora_kernels.ops.rms_norm.kernel import rms_scale, weigh


@triton.jit
def _turn(b_x, b_y, b_cos, b_sin, dtype: tl.constexpr, WIDE: tl.constexpr):
    """x·cos + y·sin in fp32; a minus is a sign of y, which rounds alike."""
    b_xc = b_x * b_cos
    b_ys = b_y * b_sin
    if not WIDE:
        # Each product is a tensor of its own in the module, and so rounded before the sum.
        b_xc = b_xc.to(dtype).to(tl.float32)
        b_ys = b_ys.to(dtype).to(tl.float32)
    return (b_xc + b_ys).to(dtype)


@triton.jit
def _rotate_halves(
    p_x, p_out, b_cos, b_sin, p_weight, H, D, P, eps, stride_xh, stride_oh,
    WIDE: tl.constexpr, NORM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Pairs (i, i + P): whole heads are read twice, the second time with the halves exchanged, out of L1.

    Both blocks have one layout, so nothing is moved between threads; and the sum of squares of a head has the bits that
    the norm's own kernel gives it. b_cos, b_sin `[W]`: of each element, sin with the sign that its partner takes; 1 and
    0 behind the pairs.
    """
    o_w = tl.arange(0, BLOCK_W)
    m_w = o_w < D
    turned = o_w < 2 * P
    o_y = tl.where(o_w < P, o_w + P, tl.where(turned, o_w - P, o_w))  # [W] the other element of the pair
    if NORM > 0:
        b_x_weight = tl.load(p_weight + o_w, mask=m_w, other=0.0).to(tl.float32)[None, :]
        b_y_weight = tl.load(p_weight + o_y, mask=m_w, other=0.0).to(tl.float32)[None, :]
    for i_h in range(0, H, BLOCK_H):
        o_h = i_h + tl.arange(0, BLOCK_H)
        m_hw = (o_h < H)[:, None] & m_w[None, :]
        p_xh = p_x + o_h[:, None] * stride_xh
        b_x = tl.load(p_xh + o_w[None, :], mask=m_hw, other=0.0)
        dtype = b_x.dtype
        b_x = b_x.to(tl.float32)
        b_y = tl.load(p_xh + o_y[None, :], mask=m_hw, other=0.0).to(tl.float32)
        if NORM > 0:
            b_scale = rms_scale(b_x, D, eps)[:, None]
            b_x = weigh(b_x * b_scale, b_x_weight, dtype, NORM).to(dtype).to(tl.float32)
            b_y = weigh(b_y * b_scale, b_y_weight, dtype, NORM).to(dtype).to(tl.float32)
        b_out = tl.where(turned[None, :], _turn(b_x, b_y, b_cos[None, :], b_sin[None, :], dtype, WIDE), b_x.to(dtype))
        # In place, every read of these heads must come before any write.
        tl.debug_barrier()
        tl.store(p_out + o_h[:, None] * stride_oh + o_w[None, :], b_out, mask=m_hw)


@triton.jit
def _rotate_neighbours(
    p_x, p_out, p_cos, p_sin, H, D, P, stride_xh, stride_oh, stride_cos, stride_sin,
    APART: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Pairs (2i, 2i + 1). APART: written as (i, i + P)."""
    o_p = tl.arange(0, BLOCK_P)
    m_p = o_p < P
    o_2p = tl.arange(0, 2 * BLOCK_P)
    o_d = 2 * P + tl.arange(0, BLOCK_D)
    b_cos = tl.load(p_cos + o_p * stride_cos, mask=m_p, other=0.0).to(tl.float32)[None, :]
    b_sin = tl.load(p_sin + o_p * stride_sin, mask=m_p, other=0.0).to(tl.float32)[None, :]
    for i_h in range(0, H, BLOCK_H):
        o_h = i_h + tl.arange(0, BLOCK_H)
        m_h2p = (o_h < H)[:, None] & (o_2p < 2 * P)[None, :]
        m_hd = (o_h < H)[:, None] & (o_d < D)[None, :]
        p_xh = p_x + o_h[:, None] * stride_xh
        p_oh = p_out + o_h[:, None] * stride_oh
        # One wide read, taken apart in registers: every second element alone would break it into single ones.
        b_pairs = tl.load(p_xh + o_2p[None, :], mask=m_h2p, other=0.0)
        dtype = b_pairs.dtype
        b_first, b_second = tl.split(tl.reshape(b_pairs.to(tl.float32), (BLOCK_H, BLOCK_P, 2)))
        if REST:
            b_rest = tl.load(p_xh + o_d[None, :], mask=m_hd)
        b_turned = _turn(b_first, -b_second, b_cos, b_sin, dtype, WIDE)
        b_second = _turn(b_second, b_first, b_cos, b_sin, dtype, WIDE)
        # In place, every read of these heads must come before any write: pairs may move to other columns.
        tl.debug_barrier()
        if APART:
            m_hp = (o_h < H)[:, None] & m_p[None, :]
            tl.store(p_oh + o_p[None, :], b_turned, mask=m_hp)
            tl.store(p_oh + o_p[None, :] + P, b_second, mask=m_hp)
        else:
            b_pairs = tl.reshape(tl.join(b_turned, b_second), (BLOCK_H, 2 * BLOCK_P))
            tl.store(p_oh + o_2p[None, :], b_pairs, mask=m_h2p)
        if REST:
            tl.store(p_oh + o_d[None, :], b_rest, mask=m_hd)


@triton.jit
def rotary_kernel(
    p_q, p_k, p_q_out, p_k_out, p_cos, p_sin, p_q_weight, p_k_weight,
    HQ, HK, D, P, eps,
    stride_qt, stride_qh, stride_kt, stride_kh,
    stride_qot, stride_qoh, stride_kot, stride_koh,
    stride_cos_t, stride_cos_p, stride_sin_t, stride_sin_p,
    LAYOUT: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """LAYOUT indexes `LAYOUTS`. REST: elements behind the rotated ones are to be copied (neighbours alone).

    NORM: 0 none, else the variant of `rms_norm_kernel` (halves alone).
    """
    i_t = tl.program_id(0).to(tl.int64)
    p_qt = p_q + i_t * stride_qt
    p_kt = p_k + i_t * stride_kt
    p_qot = p_q_out + i_t * stride_qot
    p_kot = p_k_out + i_t * stride_kot
    p_ct = p_cos + i_t * stride_cos_t
    p_st = p_sin + i_t * stride_sin_t
    if LAYOUT == 0:
        o_w = tl.arange(0, BLOCK_W)
        o_p = tl.where(o_w < P, o_w, o_w - P)
        b_cos = tl.load(p_ct + o_p * stride_cos_p, mask=o_w < 2 * P, other=1.0).to(tl.float32)
        b_sin = tl.load(p_st + o_p * stride_sin_p, mask=o_w < 2 * P, other=0.0).to(tl.float32)
        b_sin = tl.where(o_w < P, -b_sin, b_sin)
        _rotate_halves(
            p_qt, p_qot, b_cos, b_sin, p_q_weight, HQ, D, P, eps, stride_qh, stride_qoh,
            WIDE, NORM, BLOCK_H, BLOCK_W,
        )  # fmt: skip
        _rotate_halves(
            p_kt, p_kot, b_cos, b_sin, p_k_weight, HK, D, P, eps, stride_kh, stride_koh,
            WIDE, NORM, BLOCK_H, BLOCK_W,
        )  # fmt: skip
    else:
        _rotate_neighbours(
            p_qt, p_qot, p_ct, p_st, HQ, D, P, stride_qh, stride_qoh, stride_cos_p, stride_sin_p,
            LAYOUT == 2, WIDE, REST, BLOCK_H, BLOCK_P, BLOCK_D,
        )  # fmt: skip
        _rotate_neighbours(
            p_kt, p_kot, p_ct, p_st, HK, D, P, stride_kh, stride_koh, stride_cos_p, stride_sin_p,
            LAYOUT == 2, WIDE, REST, BLOCK_H, BLOCK_P, BLOCK_D,
        )  # fmt: skip
