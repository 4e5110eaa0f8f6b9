"""The backend contract: who owns which buffer, and in which order the calls come.

A backend owns the metadata that tells LoRA kernels which rows belong to which slot, the scratch of its experts, and the
kernels. The engine owns weights, the bank of factors and all activations.

Calling sequence, once per phase (`prefill` and `decode` never share a buffer):

1. `init_graph_metadata(phase, capacity, device)` allocates the phase's metadata, sized by capacity alone.
2. `init_moe_buffers(phase, capacity, device, dtype, shapes)` allocates the phase's expert scratch.
3. For every batch: `prepare_batch(batch, phase=…, bucket=…)` refreshes the metadata and returns a handle to it.
4. Within the forward: `projections`, `linear`, `fused_linear`, `embedding`, `experts` with that handle.

With `bucket` set (a graph will be captured or replayed) the refresh is **in place**: addresses are those that capture
baked in, and the tail is covered: unused request slots are empty segments at the last boundary with slot -1, and the
token→slot map is -1 behind the last token. With `bucket=None` the handle may hold tensors of its own.

Base rows (slot -1) are a group like any other when grids are sized. Whether LoRA kernels run is read from the handle's
`has_lora` alone: whoever captures sets it, so that capture records them even from base rows, and a second variant of
each graph leaves them out for all-base batches. `rows_metadata` serves the scoring head, outside every graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moelora.capacity import PrefillCapacity
from moelora.errors import MoeloraError
from moelora.types import GraphMode, PackedBatch, Phase

if TYPE_CHECKING:
    import torch

    from moelora.models.context import Segments


AttentionChoices = dict[str, dict[str, int | None]]
"""By attention, in words: the fewest tokens, of a batch's longest request ("requests") and of a full graph's bucket
("buckets"), from which on the other kernel runs; None for never."""


class PhaseError(MoeloraError):
    """Buffers of one phase were handed to the other, or used before they were made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do. `graph_modes`: the modes whose capture it supports. `max_rank`: None means any."""

    name: str
    device_types: frozenset[str]
    graph_modes: frozenset[GraphMode]
    max_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSlots:
    """The bank of one linear layer, router or embedding: every slot's factors side by side.

    a_LRI `[L, R, in]` (embedding: `[L, R, vocabulary]`), b_LOR `[L, out, R]`, in the model's dtype. ranks_L: int32 on
    the device, each slot's own rank; 0 where the slot's adapter leaves this target alone. Columns and rows beyond a
    slot's rank are zero.
    """

    a_LRI: torch.Tensor
    b_LOR: torch.Tensor
    ranks_L: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSlots:
    """The bank of one experts parameter.

    a_LERI `[L, E or 1, R, in]`, b_LEOR `[L, E or 1, out, R]`, ranks_L int32 `[L]` as in `DenseSlots`.
    A dimension of 1 in place of E is shared by all experts.
    """

    a_LERI: torch.Tensor
    b_LEOR: torch.Tensor
    ranks_L: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsWeights:
    """One layer's routed experts, as its transformers module holds them.

    up: the first parameter, gate and up fused or up alone: `[E, out, in]`, or `[E, in, out]` if `transposed`.
    down: the second, likewise. Biases `[E, out]` or None. `activation`: maps the first product `[P, up_out]` to
    `[P, I]` (the module's own gate, or its activation where there is none). `activation_name`: "silu", "gelu_tanh",
    "gelu", "relu2", "gpt_oss", or None if only the callable knows. `limit`, `alpha`: the clamp and slope of "gpt_oss".
    `post_norm`: applied to each pair's output before the routing weight, or None.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    transposed: bool
    gated: bool
    interleaved: bool
    activation: Callable[[torch.Tensor], torch.Tensor]
    activation_name: str | None
    limit: float | None = None
    alpha: float | None = None
    post_norm: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.up.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """Widths of one kind of experts layer: what expert scratch is sized by. up_out is 2·I for gated experts."""

    num_experts: int
    top_k: int
    hidden: int
    up_out: int
    inter: int
    max_rank_up: int
    max_rank_down: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraMetadata:
    """The handle that `prepare_batch` returns. `token_slot_T`: int32 `[T]`, slot of each row or -1, padding included.

    `has_lora` is False for an all-base batch, which then costs what the base costs. `private` is the backend's own.
    """

    phase: Phase
    token_slot_T: torch.Tensor
    has_lora: bool
    private: Any = None


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


class Backend(ABC):
    """LoRA kernels and their metadata. See the module docstring for the calling sequence.

    fused_ops: None where the backend offers none; then it cannot run batch-invariantly either. attention_kernels: what
    a user may ask for as `attention_kernel`, "auto" first. batch_invariant, attention_kernel: set once by the engine,
    before the first forward.
    """

    capabilities: Capabilities
    fused_ops: FusedOps | None = None
    batch_invariant: bool = False
    attention_kernels: tuple[str, ...] = ("auto",)
    attention_kernel: str = "auto"

    @abstractmethod
    def init_graph_metadata(self, phase: Phase, capacity: PrefillCapacity, device: torch.device) -> None:
        """Allocates the metadata of `phase`, sized by `capacity`. Raises `PhaseError` if the phase has one already."""

    @abstractmethod
    def init_moe_buffers(
        self,
        phase: Phase,
        capacity: PrefillCapacity,
        device: torch.device,
        dtype: torch.dtype,
        shapes: Sequence[MoeShape],
    ) -> None:
        """Allocates the expert scratch of `phase` for the largest of `shapes`. No other phase may use it."""

    @abstractmethod
    def prepare_batch(self, batch: PackedBatch, *, phase: Phase, bucket: int | None = None) -> LoraMetadata:
        """Refreshes the metadata of `phase` for `batch`; in place and with the tail covered if `bucket` is given."""

    @abstractmethod
    def rows_metadata(self, row_slot_N: torch.Tensor, *, has_lora: bool) -> LoraMetadata:
        """Metadata for N loose rows (the scoring head). row_slot_N: int32 on the device."""

    @abstractmethod
    def linear(self, x_TI: torch.Tensor, out_TO: torch.Tensor, slots: DenseSlots, meta: LoraMetadata) -> None:
        """Adds B A x to `out_TO` in place, each row with its own slot; base rows are left as they are.

        x_TI `[T, in]`, out_TO `[T, out]`, rows contiguous, in the model's dtype or (routers) both in fp32 beside
        factors of another dtype. The product accumulates in fp32.
        """

    def fused_linear(
        self,
        x_TI: torch.Tensor,
        outs_TO: Sequence[torch.Tensor],
        slots: Sequence[DenseSlots | None],
        meta: LoraMetadata,
    ) -> None:
        """`linear` for several projections of one input; None leaves that output alone."""
        for out_TO, one in zip(outs_TO, slots, strict=True):
            if one is not None:
                self.linear(x_TI, out_TO, one, meta)

    def projections(
        self,
        x_TI: torch.Tensor,
        weights_OI: Sequence[torch.Tensor],
        biases_O: Sequence[torch.Tensor | None],
        slots: Sequence[DenseSlots],
        meta: LoraMetadata,
        *,
        rows_apart: bool = False,
    ) -> list[torch.Tensor]:
        """Returns W x (+ b) + B A x for several projections of one input, `[T, out]` each, in x's dtype.

        x_TI `[T, in]`, weights_OI `[out, in]`, biases_O `[out]`: one dtype. The delta joins the base product before or
        after that is rounded: by the shape of the batch alone, never by its contents. rows_apart: results may be
        columns of one tensor, so that a row does not begin where the one before it ends.
        """
        from torch.nn import functional

        outs = [functional.linear(x_TI, weight, bias) for weight, bias in zip(weights_OI, biases_O, strict=True)]
        if meta.has_lora:
            self.fused_linear(x_TI, outs, slots, meta)
        return outs

    @abstractmethod
    def embedding(self, ids_T: torch.Tensor, out_TH: torch.Tensor, slots: DenseSlots, meta: LoraMetadata) -> None:
        """Adds B A[:, id] to `out_TH` in place. ids_T: int64 `[T]`."""

    def attention(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        segments: Segments,
        *,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention within each segment; arguments and result as `models.attention.reference_attention`."""
        from moelora.models.attention import reference_attention

        return reference_attention(
            q_THD, k_THD, v_THD, segments, scale=scale, window=window, sinks=sinks, softcap=softcap, mask=mask
        )

    def settle_attention(  # noqa: B027 - most backends have one kernel, and nothing to choose
        self, *, longest: int, full_slots: int | None, say: Callable[[str], None]
    ) -> None:
        """Chooses between kernels for every attention that ran so far, by time; nothing where there is one kernel.

        Called once, after a first forward and before any capture. longest: tokens that a request may have. full_slots:
        request slots of full graphs, None if none will be captured. say: told what takes its time, and what failed.
        Raises `ConfigError` if `attention_kernel` names one that cannot be used here.
        """

    @property
    def attention_choice(self) -> AttentionChoices:
        """What was settled; set it to what another process settled, and both take the same kernels."""
        return {}

    @attention_choice.setter
    def attention_choice(self, choices: AttentionChoices) -> None:
        return None

    @property
    def long_request_tokens(self) -> int | None:
        """From how many tokens of a batch's longest request on attention is faster with known lengths than in a full
        graph; None for never."""
        return None

    def attention_report(self) -> list[dict[str, Any]]:
        """What was settled and why, for the report: JSON types alone, an entry for each attention of the model."""
        return []

    @abstractmethod
    def experts(
        self,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        base: ExpertsWeights,
        up_slots: ExpertSlots | None,
        down_slots: ExpertSlots | None,
        meta: LoraMetadata,
    ) -> torch.Tensor:
        """The routed experts with LoRA: Σ_k w_k · (W₂h + B₂A₂h), h = act(W₁x + B₁A₁x), summed over K in fp32.

        x_TH `[T, H]`, expert_ids_TK int64 or int32 `[T, K]`, weights_TK `[T, K]` in any float dtype. Returns `[T, H]`
        in x's dtype. An id outside `[0, E)` marks a pair that no expert computes; it contributes nothing.
        """
