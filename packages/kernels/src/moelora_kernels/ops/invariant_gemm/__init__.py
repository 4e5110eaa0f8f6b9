"""y = x Wᵀ (+ bias) with the same bits for a row whatever else is in the batch: what `--batch-invariant` stands on.

Library products choose their algorithm by the number of rows, and with it the order of their sums. `naive.py` is the
truth up to rounding, `kernel.py` the Triton code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moelora_kernels.launch import INT32_LIMIT, power_of_two, require, require_device, require_dtype, require_rows
from moelora_kernels.ops.invariant_gemm.kernel import invariant_gemm_kernel
from moelora_kernels.ops.invariant_gemm.naive import naive_invariant_gemm

__all__ = ["GemmConfig", "invariant_gemm", "naive_invariant_gemm", "pick_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """Blocks of the product. `block_k` is part of the result's bits; the others are not."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8


def pick_config(dtype: torch.dtype, rows: int, width: int) -> GemmConfig:
    """Blocks for `rows` rows of output width `width`. `block_k` depends on the dtype alone."""
    if dtype == torch.float32:
        block_n = 64 if width > 32 else 16
        return GemmConfig(block_m=64 if rows > 32 else 16, block_n=block_n, block_k=32, warps=4, stages=2)
    if rows <= 128:
        # Few rows: reading W is the cost, so many narrow programs read it side by side.
        block_m = power_of_two(rows, least=16)
        return GemmConfig(block_m=block_m, block_n=32, block_k=64, warps=4, stages=5)
    if rows <= 1024 or width < 1024:
        # On one H200, 512 × 4096 × 2048: 0.020 ms, as with 128 × 128; narrow outputs need the smaller tile to fill it.
        return GemmConfig(block_m=64, block_n=64 if width <= 512 else 128, block_k=64, warps=4, stages=4)
    # On one H200, 8192 × 4096 × 2048: 0.218 ms against 0.235 (128 × 128) and 0.262 (128 × 256).
    return GemmConfig(block_m=256, block_n=128, block_k=64, warps=8, stages=3)


def invariant_gemm(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    out_MN: torch.Tensor | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Returns x Wᵀ (+ bias), `[M, N]`, in `out_MN` if given.

    x `[M, K]`, W `[N, K]`, bias `[N]`, out `[M, N]`: one dtype, rows contiguous, rows may lie apart. Products and sums
    are fp32 (bfloat16 and float16 products are exact in it, float32 products are IEEE, not tf32); the bias is added in
    fp32; one rounding at the end. Raises `ConfigError` for what has no kernel.
    """
    given = [t for t in (x_MK, w_NK, bias_N, out_MN) if t is not None]
    require_dtype("invariant_gemm", *given)
    require_device("invariant_gemm", *given)
    require_rows("invariant_gemm", "x", x_MK)
    require_rows("invariant_gemm", "W", w_NK)
    (rows, inner), width = x_MK.shape, w_NK.shape[0]
    assert w_NK.shape[1] == inner, f"x {tuple(x_MK.shape)}, W {tuple(w_NK.shape)}"
    assert bias_N is None or bias_N.shape == (width,)
    require(max(rows, width, inner) < INT32_LIMIT, f"invariant_gemm: {rows}×{inner}×{width}", "fewer rows at once")
    if out_MN is None:
        out_MN = torch.empty((rows, width), dtype=x_MK.dtype, device=x_MK.device)
    require_rows("invariant_gemm", "out", out_MN)
    assert out_MN.shape == (rows, width)
    if rows == 0 or width == 0:
        return out_MN
    config = config or pick_config(x_MK.dtype, rows, width)
    grid = -(-rows // config.block_m) * -(-width // config.block_n)
    invariant_gemm_kernel[(grid,)](
        x_MK, w_NK, bias_N if bias_N is not None else w_NK, out_MN,
        rows, width, inner, x_MK.stride(0), w_NK.stride(0), out_MN.stride(0),
        BIAS=bias_N is not None, GROUP_M=config.group_m,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out_MN
