"""act(gate) · up in one pass. `naive.py` is the truth, `kernel.py` the Triton code."""

from __future__ import annotations

import torch

from moelora.errors import ConfigError, choose_from
from moelora_kernels.launch import INT32_LIMIT, power_of_two, require, require_device, require_dtype
from moelora_kernels.ops.gated_activation.kernel import gated_activation_kernel
from moelora_kernels.ops.gated_activation.naive import KINDS, naive_gated_activation

__all__ = ["KINDS", "gated_activation", "naive_gated_activation", "split_gate_up"]


def split_gate_up(x_P2I: torch.Tensor, *, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of gate and up in a fused product: the two halves, or the even and the odd columns."""
    require(x_P2I.shape[-1] % 2 == 0, f"gated_activation: {x_P2I.shape[-1]} columns cannot be halved", "2·I columns")
    if interleaved:
        return x_P2I[..., ::2], x_P2I[..., 1::2]
    half = x_P2I.shape[-1] // 2
    return x_P2I[..., :half], x_P2I[..., half:]


def gated_activation(
    gate_PI: torch.Tensor,
    up_PI: torch.Tensor,
    *,
    kind: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
) -> torch.Tensor:
    """Returns act(gate) · up as a contiguous `[P, I]`. Inputs: `[P, I]` of one dtype, any strides (`split_gate_up`).

    Rounding: "silu", "gelu_tanh", "gelu" compute the activation in fp32, round it to the model's dtype, multiply,
    round. "gpt_oss" (clamp at `limit`, slope `alpha`) rounds after every step of the module: alpha · gate, sigmoid,
    gate · sigmoid, up + 1, product. NaN stays NaN. A row's bits depend on the row alone. Raises `ConfigError` for what
    has no kernel.
    """
    if kind not in KINDS:
        raise ConfigError(choose_from("gated activation", kind, KINDS))
    require_dtype("gated_activation", gate_PI, up_PI)
    require_device("gated_activation", gate_PI, up_PI)
    require(gate_PI.dim() == 2, f"gated_activation: {gate_PI.dim()} dimensions", "a matrix [rows, width]")
    assert gate_PI.shape == up_PI.shape, f"gate {tuple(gate_PI.shape)}, up {tuple(up_PI.shape)}"
    rows, width = gate_PI.shape
    out_PI = torch.empty((rows, width), dtype=gate_PI.dtype, device=gate_PI.device)
    if out_PI.numel() == 0:
        return out_PI
    block_i = min(power_of_two(width, least=16), 1024)
    block_p = max(1, 2048 // block_i)
    blocks = -(-width // block_i)
    grid = -(-rows // block_p) * blocks
    require(grid < INT32_LIMIT, f"gated_activation: {rows}×{width} is too large", "fewer rows at once")
    gated_activation_kernel[(grid,)](
        gate_PI, up_PI, out_PI, rows, width, blocks, *gate_PI.stride(), *up_PI.stride(), limit, alpha,
        KIND=KINDS.index(kind), BLOCK_P=block_p, BLOCK_I=block_i, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out_PI
