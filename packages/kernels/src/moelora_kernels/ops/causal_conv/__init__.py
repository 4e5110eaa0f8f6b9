"""Causal depthwise convolution over the tokens of a request. `naive.py` is the truth, `kernel.py` the Triton code."""

from __future__ import annotations

import torch

from moelora.errors import ConfigError, choose_from
from moelora_kernels.launch import INT32_LIMIT, power_of_two, require, require_device, require_dtype
from moelora_kernels.ops.causal_conv.kernel import causal_conv_kernel
from moelora_kernels.ops.causal_conv.naive import ACTIVATIONS, naive_causal_conv

__all__ = ["ACTIVATIONS", "MAX_TAPS", "causal_conv", "naive_causal_conv"]

MAX_TAPS = 16
"""The longest filter; the kernel is unrolled over its taps."""


def causal_conv(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    positions_T: torch.Tensor,
    *,
    activation: str = "none",
) -> torch.Tensor:
    """Returns act(bias + Σ over i < K of weight[:, K − 1 − i] · x[t − i]) as a contiguous `[T, C]`.

    x `[T, C]`, weight `[C, K]`, bias `[C]` or None, in one dtype and of any strides. positions `[T]`: int64, of each
    token in its request, which begins at 0 and lies in one piece; taps that reach before it count as zeros, whatever
    lies there. activation: "none" or "silu".

    Products are added in fp32 as they are made, from the latest token to the earliest; the sum with the bias is rounded
    to the dtype, and the activation of that rounded again. Weights must be finite: earlier requests' tokens meet them
    as zeros. A token's bits depend on its request alone. Raises `ConfigError` for what has no kernel.
    """
    if activation not in ACTIVATIONS:
        raise ConfigError(choose_from("activation", activation, ACTIVATIONS))
    given = [t for t in (x_TC, weight_CK, bias_C) if t is not None]
    require_dtype("causal_conv", *given)
    require_device("causal_conv", *given, positions_T)
    (tokens, width), taps = x_TC.shape, weight_CK.shape[1]
    require(0 < taps <= MAX_TAPS, f"causal_conv: {taps} taps are not in 1 … {MAX_TAPS}", "the module's own function")
    assert weight_CK.shape[0] == width, f"x {tuple(x_TC.shape)}, weight {tuple(weight_CK.shape)}"
    assert bias_C is None or bias_C.shape == (width,)
    assert positions_T.shape == (tokens,), f"x {tuple(x_TC.shape)}, positions {tuple(positions_T.shape)}"
    out_TC = torch.empty((tokens, width), dtype=x_TC.dtype, device=x_TC.device)
    if out_TC.numel() == 0:
        return out_TC
    block_c = min(power_of_two(width, least=16), 256)
    block_t = 4096 // block_c
    blocks = -(-width // block_c)
    grid = -(-tokens // block_t) * blocks
    require(grid < INT32_LIMIT, f"causal_conv: {tokens}×{width} is too large", "fewer tokens at once")
    causal_conv_kernel[(grid,)](
        x_TC, weight_CK, bias_C.contiguous() if bias_C is not None else x_TC, positions_T.contiguous(), out_TC,
        tokens, width, blocks, *x_TC.stride(), *weight_CK.stride(),
        K=taps, BIAS=bias_C is not None, SILU=activation == "silu", BLOCK_T=block_t, BLOCK_C=block_c,
        num_warps=4,
    )  # fmt: skip
    return out_TC
