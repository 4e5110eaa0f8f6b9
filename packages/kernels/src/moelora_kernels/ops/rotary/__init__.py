"""Rotary position embedding of queries and keys. `naive.py` is the truth, `kernel.py` the Triton code."""

from __future__ import annotations

import torch

from moelora.backends.fused_ops import NORM_VARIANTS, HeadNorms
from moelora.errors import ConfigError, choose_from
from moelora_kernels.launch import power_of_two, require, require_device, require_dtype
from moelora_kernels.ops.rotary.kernel import rotary_kernel
from moelora_kernels.ops.rotary.naive import LAYOUTS, naive_rotary

__all__ = ["LAYOUTS", "naive_rotary", "rotary"]


def rotary(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    cos_TP: torch.Tensor,
    sin_TP: torch.Tensor,
    *,
    layout: str = "half",
    wide: bool = False,
    inplace: bool = False,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q and k with the first 2·P of D elements of every head rotated; the others are carried over.

    q `[T, HQ, D]`, k `[T, HK, D]`: one dtype, last dimension contiguous, any other strides. cos, sin `[T, P]`, one
    column for each *pair*, any strides: where transformers repeats the angles, pass `cos[..., : n // 2]` (it
    concatenates them) or `cos[..., ::2]` (Cohere interleaves them). `layout`: "half" pairs element i with i + P,
    "interleaved" 2i with 2i + 1 (GLM-4, Cohere), "interleaved_to_half" reads the latter and writes the former
    (DeepSeek). `inplace` overwrites q and k and returns them. `norms` (of the layout "half" alone) are applied to
    whole heads first, with the bits of `rms_norm`.

    Rounding: with `wide=False` every product is rounded to the model's dtype and then the sum, as torch does when cos
    and sin are in that dtype; with `wide=True` everything is fp32 and only the result is rounded (Cohere, or cos and
    sin in fp32 with the result cast back). fp32 multiplies and adds separately, as torch does. A token's bits depend
    on the token alone. Raises `ConfigError` for what has no kernel.
    """
    if layout not in LAYOUTS:
        raise ConfigError(choose_from("rotary layout", layout, LAYOUTS))
    require_dtype("rotary", q_THD, k_THD)
    require_device("rotary", q_THD, k_THD, cos_TP, sin_TP)
    if not wide:
        require_dtype("rotary", q_THD, cos_TP, sin_TP)
    if norms is not None:
        require(layout == "half", f"rotary: norms of heads with layout {layout!r}", "rms_norm")
        if norms.variant not in NORM_VARIANTS:
            raise ConfigError(choose_from("RMSNorm variant", norms.variant, NORM_VARIANTS))
        require_dtype("rotary", q_THD, norms.q_weight_D, norms.k_weight_D)
        require_device("rotary", q_THD, norms.q_weight_D, norms.k_weight_D)
        assert norms.q_weight_D.shape == norms.k_weight_D.shape == q_THD.shape[2:]
    tokens, _, size = q_THD.shape
    pairs = cos_TP.shape[1]
    assert (k_THD.shape[0], k_THD.shape[2]) == (tokens, size), f"q {tuple(q_THD.shape)}, k {tuple(k_THD.shape)}"
    assert cos_TP.shape == sin_TP.shape == (tokens, pairs), f"cos {tuple(cos_TP.shape)}, sin {tuple(sin_TP.shape)}"
    require(2 * pairs <= size <= 1024, f"rotary: {pairs} pairs in heads of {size}", "the module's own function")
    for name, tensor in (("q", q_THD), ("k", k_THD)):
        require(tensor.stride(2) == 1, f"rotary: the heads of {name} are not contiguous", f"{name}.contiguous()")
    q_out, k_out = (q_THD, k_THD) if inplace else (_like(q_THD), _like(k_THD))
    require(norms is None or pairs > 0, "rotary: norms of heads that are not rotated", "rms_norm")
    if tokens == 0 or pairs == 0:
        if not inplace:
            q_out.copy_(q_THD)
            k_out.copy_(k_THD)
        return q_out, k_out
    block_p = power_of_two(pairs)
    rotary_kernel[(tokens,)](
        q_THD, k_THD, q_out, k_out, cos_TP, sin_TP,
        norms.q_weight_D if norms else q_THD, norms.k_weight_D if norms else k_THD,
        q_THD.shape[1], k_THD.shape[1], size, pairs, norms.eps if norms else 0.0,
        *q_THD.stride()[:2], *k_THD.stride()[:2], *q_out.stride()[:2], *k_out.stride()[:2],
        *cos_TP.stride(), *sin_TP.stride(),
        LAYOUT=LAYOUTS.index(layout), WIDE=wide, REST=not inplace and 2 * pairs < size,
        NORM=1 + NORM_VARIANTS.index(norms.variant) if norms else 0,
        BLOCK_H=max(1, 2048 // power_of_two(size)) if q_THD.is_cuda else 4, BLOCK_P=block_p,
        BLOCK_D=power_of_two(max(1, size - 2 * pairs)), BLOCK_W=power_of_two(size), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return q_out, k_out


def _like(x_THD: torch.Tensor) -> torch.Tensor:
    return torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
