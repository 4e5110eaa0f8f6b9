"""The fused operations that a backend offers to the base model, in the form that core asks for."""

from __future__ import annotations

import torch

from moelora_kernels.ops.gated_activation import gated_activation
from moelora_kernels.ops.invariant_gemm import invariant_gemm
from moelora_kernels.ops.rms_norm import rms_norm
from moelora_kernels.ops.rotary import rotary


class TritonOps:
    """`moelora.backends.base.FusedOps` by the kernels of this package."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, variant: str) -> torch.Tensor:
        return rms_norm(x, weight, eps, variant=variant)[0]

    def rotary(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary(q_THD, k_THD, cos_TP, sin_TP)

    def gated_activation(self, gate_PI: torch.Tensor, up_PI: torch.Tensor, kind: str) -> torch.Tensor:
        return gated_activation(gate_PI, up_PI, kind=kind)

    def linear(self, x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        return invariant_gemm(x_MK.contiguous(), w_NK, bias_N)
