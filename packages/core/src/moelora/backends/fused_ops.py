"""The small operations that a backend may offer to the base model and to the scoring head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from moelora.backends.base import DenseSlots

NORM_VARIANTS = ("model", "float", "one_plus")
"""Of an RMSNorm, by where its weight multiplies."""
NORM_GATES = ("silu", "sigmoid")
"""What an RMSNorm with a gate makes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """A head that is one product: logits = cap(scale · (W h + bias)), cap(x) = c·tanh(x / c) if `softcap` is c.

    weight_VH `[V, H]`; slots: the bank of lm_head, or None where no adapter targets it.
    """

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    slots: DenseSlots | None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """Scores of N rows in fp32, on the device or on the host.

    target_logprob_N: log p(target), NaN where there was no target. is_greedy_N: the target's logit is the largest of
    its row. best_id_N, best_logprob_N: the arg-max, the lowest id of equals. top_ids_MK, top_logprobs_MK: the K best of
    the M rows without a target, in their order, best first and equals by ascending id; not to be read where K is 0.
    """

    target_logprob_N: torch.Tensor
    is_greedy_N: torch.Tensor
    best_id_N: torch.Tensor
    best_logprob_N: torch.Tensor
    top_ids_MK: torch.Tensor
    top_logprobs_MK: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """RMSNorms over each head of queries and of keys. Weights `[D]`; eps and variant as in `FusedOps.rms_norm`."""

    q_weight_D: torch.Tensor
    k_weight_D: torch.Tensor
    eps: float
    variant: str


class FusedOps(Protocol):
    """Small operations that a backend offers to the base model. A row's bits depend on the row alone.

    Used where they agreed with the module at load (`models/substitutes.py`), `linear` for batch invariance.
    """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, variant: str) -> torch.Tensor:
        """RMSNorm over the last dimension. variant: "model", "float" or "one_plus", by where the weight multiplies."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variant: str
    ) -> torch.Tensor:
        """RMSNorm of x + residual rounded to their dtype, with the bits of the two operations.

        residual: contiguous; the sum is left in it.
        """

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, variant: str, kind: str
    ) -> torch.Tensor:
        """RMSNorm times the activation of `gate`, of x's shape. kind: "silu" or "sigmoid"."""

    def rotary(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        cos_TP: torch.Tensor,
        sin_TP: torch.Tensor,
        norms: HeadNorms | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates pairs (i, i + P) of each head; elements from 2·P on are carried over.

        norms: applied first, with the bits of `rms_norm`, and q and k are overwritten by the result.
        """

    def gated_activation(self, gate_PI: torch.Tensor, up_PI: torch.Tensor, kind: str) -> torch.Tensor:
        """act(gate) · up. kind: "silu", "gelu_tanh" or "gelu"."""

    def top_k(self, x_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Values and int64 indices `[T, k]` of each row's largest, largest first; None for what it cannot do."""

    def top_k_softmax(
        self, logits_TE: torch.Tensor, k: int, *, normed: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The k largest of each row's softmax, taken in fp32, and their int64 indices, `[T, k]`, largest first.

        normed: divided by their sum, in fp32. dtype: of the values. None for what it cannot do.
        """

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CK: torch.Tensor,
        bias_C: torch.Tensor | None,
        positions_T: torch.Tensor,
        activation: str | None,
    ) -> torch.Tensor | None:
        """act(bias + Σ over i < K of weight[:, K − 1 − i] · x[t − i]) `[T, C]`; a request's first tokens have zeros
        before them. positions_T: int64, of each token in its request. None for what it cannot do.
        """

    def linear(self, x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + bias in one order of accumulation, whatever M is."""

    def score_rows(
        self,
        hidden_NH: torch.Tensor,
        head: HeadWeights,
        targets_N: torch.Tensor,
        row_slot_N: torch.Tensor,
        open_M: torch.Tensor,
        top_k: int,
    ) -> RowScores | None:
        """Scores rows without writing their logits, or None for what it cannot do. All tensors on the device.

        hidden_NH `[N, H]`: in the dtype of the head's weight, which may be wider than that of its LoRA factors.
        targets_N: int64, negative where there is none. row_slot_N: int32. open_M: int64, the rows without a target,
        whose `top_k` best are wanted. Does not wait for the device.
        """
