"""The fused operations that a backend offers to the base model, in the form that core asks for."""

from __future__ import annotations

from functools import partial

import torch

from moelora.backends.fused_ops import HeadNorms, HeadWeights, RowScores
from moelora_kernels.launch import FLOAT_DTYPES
from moelora_kernels.ops.causal_conv import MAX_TAPS, causal_conv
from moelora_kernels.ops.gated_activation import gated_activation
from moelora_kernels.ops.invariant_gemm import invariant_gemm
from moelora_kernels.ops.rms_norm import rms_norm
from moelora_kernels.ops.rotary import rotary
from moelora_kernels.ops.score_head import MAX_TOP_K, score_rows
from moelora_kernels.ops.top_k import MAX_K, MAX_WIDTH, top_k, top_k_softmax


class TritonOps:
    """`moelora.backends.fused_ops.FusedOps` by the kernels of this package."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, variant: str) -> torch.Tensor:
        return rms_norm(x, weight, eps, variant=variant)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variant: str
    ) -> torch.Tensor:
        return rms_norm(x, weight, eps, variant=variant, residual=residual)

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, variant: str, kind: str
    ) -> torch.Tensor:
        return rms_norm(x, weight, eps, variant=variant, gate=gate, gate_kind=kind)

    def rotary(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        cos_TP: torch.Tensor,
        sin_TP: torch.Tensor,
        norms: HeadNorms | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary(q_THD, k_THD, cos_TP, sin_TP, norms=norms, inplace=norms is not None)

    def gated_activation(self, gate_PI: torch.Tensor, up_PI: torch.Tensor, kind: str) -> torch.Tensor:
        return gated_activation(gate_PI, up_PI, kind=kind)

    def top_k(self, x_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return top_k(x_TE.contiguous(), k) if _has_top_k(x_TE, k) else None

    def top_k_softmax(
        self, logits_TE: torch.Tensor, k: int, *, normed: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not _has_top_k(logits_TE, k) or dtype not in FLOAT_DTYPES:
            return None
        return top_k_softmax(logits_TE.contiguous(), k, normed=normed, dtype=dtype)

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CK: torch.Tensor,
        bias_C: torch.Tensor | None,
        positions_T: torch.Tensor,
        activation: str | None,
    ) -> torch.Tensor | None:
        kind = {None: "none", "silu": "silu", "swish": "silu"}.get(activation)
        if kind is None or weight_CK.shape[1] > MAX_TAPS or x_TC.dtype not in FLOAT_DTYPES:
            return None
        return causal_conv(x_TC, weight_CK, bias_C, positions_T, activation=kind)

    def linear(self, x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        return invariant_gemm(x_MK.contiguous(), w_NK, bias_N)

    def score_rows(
        self,
        hidden_NH: torch.Tensor,
        head: HeadWeights,
        targets_N: torch.Tensor,
        row_slot_N: torch.Tensor,
        open_M: torch.Tensor,
        top_k: int,
    ) -> RowScores | None:
        if top_k > MAX_TOP_K or hidden_NH.dtype not in FLOAT_DTYPES:
            return None
        score = partial(
            score_rows,
            weight_VH=head.weight_VH,
            bias_V=head.bias_V,
            slots=head.slots,
            logit_scale=head.scale,
            softcap=head.softcap,
        )
        scores = score(hidden_NH, targets_N=targets_N, row_slot_N=row_slot_N)
        top_ids_MK = torch.empty(0, top_k, dtype=torch.int64, device=hidden_NH.device)
        top_logprobs_MK = top_ids_MK.float()
        # Few rows have no target, and looking for the k best costs as much again as all else.
        if top_k and open_M.shape[0]:
            best = score(hidden_NH[open_M], targets_N=targets_N[open_M], row_slot_N=row_slot_N[open_M], top_k=top_k)
            top_ids_MK, top_logprobs_MK = best.top_ids, best.top_logprobs
        return RowScores(
            target_logprob_N=scores.target_logprob,
            # Equal log-probabilities come from equal logits: both are logit - lse of one row.
            is_greedy_N=scores.target_logprob == scores.argmax_logprob,
            best_id_N=scores.argmax_id,
            best_logprob_N=scores.argmax_logprob,
            top_ids_MK=top_ids_MK,
            top_logprobs_MK=top_logprobs_MK,
        )


def _has_top_k(x_TE: torch.Tensor, k: int) -> bool:
    width = x_TE.shape[1]
    return width <= MAX_WIDTH and 1 <= k <= min(MAX_K, width) and x_TE.dtype in FLOAT_DTYPES
