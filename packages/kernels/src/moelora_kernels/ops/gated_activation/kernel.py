"""Triton kernel of gated activations. P rows, I columns (`width`); every element stands alone."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(b_x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-b_x))


@triton.jit
def gated_activation_kernel(
    p_gate, p_up, p_out, rows, width, blocks,
    stride_gp, stride_gi, stride_up, stride_ui, limit, alpha,
    KIND: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """KIND indexes `KINDS`. Each named step of the module is rounded to the model's dtype."""
    i_work = tl.program_id(0).to(tl.int64)
    o_p = i_work // blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    o_i = (i_work % blocks).to(tl.int32) * BLOCK_I + tl.arange(0, BLOCK_I)
    m_pi = (o_p < rows)[:, None] & (o_i < width)[None, :]
    b_gate = tl.load(p_gate + o_p[:, None] * stride_gp + o_i[None, :] * stride_gi, mask=m_pi, other=0.0)
    b_up = tl.load(p_up + o_p[:, None] * stride_up + o_i[None, :] * stride_ui, mask=m_pi, other=0.0)
    dtype = b_gate.dtype
    b_gate = b_gate.to(tl.float32)
    b_up = b_up.to(tl.float32)
    if KIND == 3:
        # A clamp lets NaN through in torch; a plain minimum would hide it.
        b_gate = tl.where(b_gate > limit, limit, b_gate).to(dtype).to(tl.float32)
        b_up = tl.where(b_up > limit, limit, tl.where(b_up < -limit, -limit, b_up)).to(dtype).to(tl.float32)
        b_slope = (b_gate * alpha).to(dtype).to(tl.float32)
        b_act = (b_gate * _sigmoid(b_slope).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        b_up = (b_up + 1.0).to(dtype).to(tl.float32)
    else:
        if KIND == 0:
            b_act = tl.div_rn(b_gate, 1.0 + tl.exp(-b_gate))
        elif KIND == 1:
            # (1 + tanh u) / 2 = sigmoid(2u), with 2u = 2·sqrt(2/π)·(x + 0.044715·x³).
            b_act = b_gate * _sigmoid(1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate))
        else:
            b_act = 0.5 * b_gate * (1.0 + tl.erf(b_gate * 0.7071067811865476))
        b_act = b_act.to(dtype).to(tl.float32)
    tl.store(p_out + o_p[:, None] * width + o_i[None, :], (b_act * b_up).to(dtype), mask=m_pi)
