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
from typing import TYPE_CHECKING, Any

from moelora.backends.fused_ops import FusedOps
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
