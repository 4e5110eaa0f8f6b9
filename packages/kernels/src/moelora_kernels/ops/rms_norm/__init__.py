"""RMSNorm, with a sum before it or a gate behind it. `naive.py` is the truth, `kernel.py` the Triton code."""

from __future__ import annotations

import torch

from moelora.backends.fused_ops import NORM_GATES, NORM_VARIANTS
from moelora.errors import ConfigError, choose_from
from moelora_kernels.launch import power_of_two, require, require_device, require_dtype
from moelora_kernels.ops.rms_norm.kernel import rms_norm_kernel
from moelora_kernels.ops.rms_norm.naive import naive_rms_norm

__all__ = ["MAX_WIDTH", "naive_rms_norm", "rms_norm"]

MAX_WIDTH = 32768
"""The widest row that one program holds in registers."""


def rms_norm(
    x: torch.Tensor,
    weight_W: torch.Tensor | None,
    eps: float,
    *,
    variant: str = "model",
    residual: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    gate_kind: str = "silu",
) -> torch.Tensor:
    """x or, with a residual, x + residual normalised over the last dimension, contiguous.

    x, residual, gate `[…, W]` and weight `[W]` or None, in one dtype. residual: contiguous, not x; the sum is left in
    it. gate: the result is multiplied by its silu or sigmoid, as `gate_kind` says. Rounding, as transformers' modules
    have it:

    1. with a residual, x + residual is rounded to the model's dtype, and that is what is normalised;
    2. the mean of squares and x / sqrt(mean + eps) are fp32, the root and the division correctly rounded;
    3. "model" (Llama, Qwen, Mixtral): the quotient is rounded to the model's dtype, times the weight, rounded again;
       "float" (gpt-oss, Olmo 2): times the weight in fp32, rounded once; "one_plus" (Gemma, Qwen3-Next): times
       (1 + weight) in fp32, rounded once. Without a weight the quotient is rounded;
    4. with a gate, its activation and the product are fp32, rounded once, "float" and "one_plus" not before that.

    The sum of squares has an order of its own, so the result may differ from torch's by one unit in the last place. A
    row's bits depend on the row alone. Raises `ConfigError` for what has no kernel.
    """
    if variant not in NORM_VARIANTS:
        raise ConfigError(choose_from("RMSNorm variant", variant, NORM_VARIANTS))
    if gate_kind not in NORM_GATES:
        raise ConfigError(choose_from("gate", gate_kind, NORM_GATES))
    given = [t for t in (x, weight_W, residual, gate) if t is not None]
    require_dtype("rms_norm", *given)
    require_device("rms_norm", *given)
    width = x.shape[-1]
    require(0 < width <= MAX_WIDTH, f"rms_norm: width {width} is not in 1 … {MAX_WIDTH}", "the module's own norm")
    assert weight_W is None or weight_W.shape == (width,)
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous() and residual is not x)
    assert gate is None or gate.shape == x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    x_GMW = _rows_in_groups(x)
    rows, block_w = x_GMW.shape[0] * x_GMW.shape[1], power_of_two(width)
    # Narrow rows (head norms) share a program, about 4,096 elements each: by width alone, so that bits stay the row's.
    # Each of the 128 threads has an element of its own: a second reader might come behind the sum that is written.
    block_m = max(1, 128 // block_w, min(32, 4096 // block_w))
    rms_norm_kernel[(-(-rows // block_m),)](
        x_GMW, residual if residual is not None else x_GMW, weight_W if weight_W is not None else x_GMW,
        gate.contiguous() if gate is not None else x_GMW, out,
        rows, width, eps, x_GMW.shape[1], *x_GMW.stride()[:2],
        RESIDUAL=residual is not None, VARIANT=0 if weight_W is None else 1 + NORM_VARIANTS.index(variant),
        GATE=0 if gate is None else 1 + NORM_GATES.index(gate_kind),
        BLOCK_M=block_m, BLOCK_W=block_w, num_warps=4 if block_w <= 4096 else 8 if block_w <= 8192 else 16,
        enable_fp_fusion=False,  # as the rotary kernel, which norms heads by the same steps
    )  # fmt: skip
    return out


def _rows_in_groups(x: torch.Tensor) -> torch.Tensor:
    """x as `[groups, rows, W]`, without a copy where its strides allow it: heads of tokens that lie apart are such."""
    width = x.shape[-1]
    inner = x.shape[-2] if x.dim() > 2 and not x.is_contiguous() else 1
    try:
        grouped = x.view(-1, inner, width)
    except RuntimeError:
        grouped = x.reshape(-1, 1, width)
    return grouped if grouped.stride(2) == 1 or width == 1 else grouped.contiguous()
