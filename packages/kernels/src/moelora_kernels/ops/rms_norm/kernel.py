"""Triton kernel of RMSNorm, with an optional sum before it or gate behind it.

M rows of a program, W width. The whole row is one block, so its sum is taken in one order that depends on W alone.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_scale(b_wide, W, eps):
    """1 / sqrt(mean of squares + eps) of each row of an fp32 block, zeros behind its W columns."""
    b_mean = tl.div_rn(tl.sum(b_wide * b_wide, axis=1), W * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(b_mean + eps))


@triton.jit
def weigh(b_normed, b_weight, dtype: tl.constexpr, VARIANT: tl.constexpr):
    """The fp32 quotient times an fp32 weight, as VARIANT has it, in fp32 and still to be rounded to the dtype."""
    if VARIANT == 1:
        return b_normed.to(dtype).to(tl.float32) * b_weight
    elif VARIANT == 2:
        return b_normed * b_weight
    else:
        return b_normed * (1.0 + b_weight)


@triton.jit
def rms_norm_kernel(
    p_x, p_residual, p_weight, p_gate, p_out,
    rows, W, eps, inner, stride_group, stride_x,
    RESIDUAL: tl.constexpr, VARIANT: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """`inner` rows of x, `stride_x` apart, make a group, and groups lie `stride_group` apart.

    RESIDUAL: the sum of x and p_residual is normed, and takes the place of p_residual.

    VARIANT: 0 no weight, 1 weight in the model's dtype, 2 weight in fp32, 3 (1 + weight) in fp32. GATE: 0 none, 1 silu,
    2 sigmoid.
    """
    i_m = tl.program_id(0).to(tl.int64)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_w = tl.arange(0, BLOCK_W)
    m_w = o_w < W
    m_mw = (o_m < rows)[:, None] & m_w[None, :]
    o_x = o_m // inner * stride_group + o_m % inner * stride_x
    b_x = tl.load(p_x + o_x[:, None] + o_w[None, :], mask=m_mw, other=0.0)
    dtype = b_x.dtype
    o_out = o_m[:, None] * W + o_w[None, :]
    if RESIDUAL:
        b_residual = tl.load(p_residual + o_out, mask=m_mw, other=0.0)
        b_x = (b_x.to(tl.float32) + b_residual.to(tl.float32)).to(dtype)
        tl.store(p_residual + o_out, b_x, mask=m_mw)
    b_wide = b_x.to(tl.float32)
    b_normed = b_wide * rms_scale(b_wide, W, eps)[:, None]
    if VARIANT > 0:
        b_weight = tl.load(p_weight + o_w, mask=m_w, other=0.0).to(tl.float32)[None, :]
        b_normed = weigh(b_normed, b_weight, dtype, VARIANT)
    if GATE > 0:
        if VARIANT < 2:  # what these give is a tensor of the model's dtype in the module
            b_normed = b_normed.to(dtype).to(tl.float32)
        b_gate = tl.load(p_gate + o_out, mask=m_mw, other=0.0).to(tl.float32)
        b_normed = b_normed * tl.div_rn(b_gate if GATE == 1 else 1.0, 1.0 + tl.exp(-b_gate))
    tl.store(p_out + o_out, b_normed.to(dtype), mask=m_mw)
