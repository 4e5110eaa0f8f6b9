"""What the triton and csgmv backends share: who owns which buffer, which op serves which call. Kernels live in `ops/`.

Whether the LoRA kernels run is read from the handle's `has_lora` alone. Whoever captures a graph sets it: True records
them even from base rows, False makes the variant for all-base batches, which costs what the base costs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from moelora.backends.base import (
    AttentionChoices,
    Backend,
    DenseSlots,
    ExpertSlots,
    ExpertsWeights,
    LoraMetadata,
    MoeShape,
    PhaseError,
)
from moelora.capacity import PrefillCapacity, admit
from moelora.errors import ConfigError
from moelora.types import BASE_SLOT, GraphMode, PackedBatch, Phase
from moelora_kernels.attention import KERNELS, PackedAttention
from moelora_kernels.fused import TritonOps
from moelora_kernels.handles import Handle, PhaseBuffers, no_rows, scratch_of
from moelora_kernels.launch import interpreted, require
from moelora_kernels.metadata import RowBuffers, RowPlan, RowSizes
from moelora_kernels.ops.attention import MAX_WIDTH, MIN_WIDTH
from moelora_kernels.ops.dense_lora import (
    MAX_RANK,
    RowTiles,
    dense_lora,
    embedding_lora,
    scratch_numel,
)
from moelora_kernels.ops.invariant_gemm import bulk_copies
from moelora_kernels.ops.lora_gemm import joined_projections, lora_gemm, most_entries

if TYPE_CHECKING:
    from moelora.models.context import Segments
    from moelora_kernels.ops.experts.buffers import MoeBuffers

DEVICE_TYPES = frozenset({"cuda", "cpu"} if interpreted() else {"cuda"})
GRAPH_MODES = frozenset({GraphMode.FULL, GraphMode.BREAKABLE})

RIDE_ROWS = 2048
"""From here on LoRA rides in the base product. One H200, q, k, v, o of a 2,048 wide model, ms: 0.155 riding and 0.160
added at 2,048 rows, 0.469 and 0.515 at 8,192; at 512 rows adding is the faster by far."""
RIDE_WIDTH = 1024
"""And from so many columns of all projections together: narrower products run through pointers, slower than torch's."""


class TiledBackend(Backend):
    """What both backends share: metadata per phase, refreshed in place, and the calls into `ops/`."""

    fused_ops = TritonOps()
    attention_kernels = KERNELS

    def __init__(self) -> None:
        self._attention = PackedAttention()
        self._buffers: dict[Phase, PhaseBuffers] = {}
        self._moe: dict[Phase, MoeBuffers] = {}

    def init_graph_metadata(self, phase: Phase, capacity: PrefillCapacity, device: torch.device) -> None:
        if phase in self._buffers:
            raise PhaseError(f"the metadata of phase {phase} was made already")
        device = torch.device(device)
        name = self.capabilities.name
        require(
            device.type in self.capabilities.device_types,
            f"backend {name!r} has no kernels for device {device.type!r}",
            "--backend torch",
        )
        require(capacity.max_rank <= MAX_RANK, f"rank {capacity.max_rank} is over {MAX_RANK}", "--backend torch")
        # Sized for the mode with more request slots: the tiles of the other fit as well.
        mode = max((GraphMode.BREAKABLE, GraphMode.FULL), key=capacity.request_slots)
        tokens = capacity.max_tokens
        sizes = self._sizes(tokens, self._most_tiles(capacity, mode), capacity.request_slots(mode), capacity.slots)
        self._buffers[phase] = PhaseBuffers(
            capacity=capacity,
            mode=mode,
            rows=sizes.allocate(device),
            scratch=torch.zeros(4 * scratch_numel(tokens, capacity.max_rank), dtype=torch.uint8, device=device),
        )

    def init_moe_buffers(
        self,
        phase: Phase,
        capacity: PrefillCapacity,
        device: torch.device,
        dtype: torch.dtype,
        shapes: Sequence[MoeShape],
    ) -> None:
        from moelora_kernels.ops.experts.buffers import MoeBuffers

        if phase in self._moe:
            raise PhaseError(f"the expert buffers of phase {phase} were made already")
        if shapes:
            self._moe[phase] = MoeBuffers(phase, capacity, torch.device(device), dtype, shapes)

    def prepare_batch(self, batch: PackedBatch, *, phase: Phase, bucket: int | None = None) -> LoraMetadata:
        if phase not in self._buffers:
            raise PhaseError(f"phase {phase} has no metadata; call init_graph_metadata for it first")
        has_lora = any(slot != BASE_SLOT for slot in batch.slots)
        if bucket is None:
            return self._eager(batch, phase, has_lora)
        own = self._buffers[phase]
        self._check_admitted(batch, bucket, own)
        if bucket not in own.buckets:
            own.buckets[bucket] = self._lay_out(own, phase, bucket)
        buffers, handle = own.buckets[bucket]
        plan = self._plan(batch, handle.rows.tile_rows)
        buffers.refresh(plan, batch)
        return LoraMetadata(phase=phase, token_slot_T=buffers.token_slot_T, has_lora=has_lora, private=handle)

    def _lay_out(self, own: PhaseBuffers, phase: Phase, bucket: int) -> tuple[RowBuffers, Handle]:
        """The row metadata of a bucket in the phase's memory, and the handle to it."""
        requests, slots = own.capacity.request_slots(own.mode), own.capacity.slots
        buffers = RowBuffers(self._sizes(bucket, self._bucket_tiles(own, bucket), requests, slots), own.rows)
        handle = Handle(
            phase=phase,
            rows=buffers.tiles,
            blocks=buffers.blocks,
            static=True,
            scratch=own.scratch,
            num_live_1=buffers.num_live_1,
            order_T=buffers.order_T,
        )
        return buffers, handle

    def _sizes(self, tokens: int, tiles: int, requests: int, slots: int) -> RowSizes:
        """Of a batch of `tokens` rows in all, with slots listed per block only if LoRA may ride in its products."""
        return RowSizes(
            tokens=tokens,
            tiles=tiles,
            tile_rows=self._tile_rows(tokens),
            permuted=self._permuted,
            entries=most_entries(tokens, requests, slots) if tokens >= RIDE_ROWS else None,
        )

    def rows_metadata(self, row_slot_N: torch.Tensor, *, has_lora: bool) -> LoraMetadata:
        rows = self._cut(row_slot_N) if has_lora else no_rows(row_slot_N.device)
        handle = Handle(phase=Phase.PREFILL, rows=rows)
        return LoraMetadata(phase=Phase.PREFILL, token_slot_T=row_slot_N, has_lora=has_lora, private=handle)

    def linear(self, x_TI: torch.Tensor, out_TO: torch.Tensor, slots: DenseSlots, meta: LoraMetadata) -> None:
        self.fused_linear(x_TI, [out_TO], [slots], meta)

    def fused_linear(
        self,
        x_TI: torch.Tensor,
        outs_TO: Sequence[torch.Tensor],
        slots: Sequence[DenseSlots | None],
        meta: LoraMetadata,
    ) -> None:
        handle = self._handle(meta)
        pairs = [(out, one) for out, one in zip(outs_TO, slots, strict=True) if one is not None]
        if pairs and meta.has_lora:
            outs, live = zip(*pairs, strict=True)
            dense_lora(x_TI, outs, live, handle.rows, scratch=scratch_of(handle, x_TI.dtype))

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
        """LoRA rides in the base product of large batches, whose outputs would otherwise be read and written twice.

        Smaller ones, loose rows, and batch-invariant runs take the base product and add to it: in the last, bits must
        not depend on the size of the batch, and the sum is rounded once here, twice there.
        """
        handle = self._handle(meta)
        if handle.blocks is not None and self._rides(x_TI, weights_OI, meta):
            scratch = scratch_of(handle, x_TI.dtype)
            return lora_gemm(x_TI, weights_OI, biases_O, slots, handle.rows, handle.blocks, scratch=scratch)
        if rows_apart and x_TI.shape[0] < RIDE_ROWS and not self.batch_invariant:
            rows = handle.rows if meta.has_lora else None
            scratch = scratch_of(handle, x_TI.dtype)
            outs = joined_projections(x_TI, weights_OI, biases_O, slots, rows, scratch=scratch)
            if outs is not None:
                return outs
        return super().projections(x_TI, weights_OI, biases_O, slots, meta)

    def _rides(self, x_TI: torch.Tensor, weights_OI: Sequence[torch.Tensor], meta: LoraMetadata) -> bool:
        return (
            meta.has_lora
            and x_TI.shape[0] >= RIDE_ROWS
            and sum(weight.shape[0] for weight in weights_OI) >= RIDE_WIDTH
            and not self.batch_invariant
            and x_TI.dtype is not torch.float32
            and bulk_copies(x_TI, *weights_OI)
        )

    def embedding(self, ids_T: torch.Tensor, out_TH: torch.Tensor, slots: DenseSlots, meta: LoraMetadata) -> None:
        handle = self._handle(meta)
        if meta.has_lora:
            embedding_lora(ids_T, out_TH, slots, handle.rows, scratch=scratch_of(handle, out_TH.dtype))

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
        handle = self._handle(meta)
        if meta.phase not in self._moe:
            raise PhaseError(f"phase {meta.phase} has no expert buffers; call init_moe_buffers for it first")
        from moelora_kernels.ops.experts import experts_lora

        buffers = self._moe[meta.phase]
        tokens = x_TH.shape[0]
        if tokens <= buffers.max_tokens:
            return experts_lora(
                x_TH,
                expert_ids_TK,
                weights_TK,
                base,
                up_slots,
                down_slots,
                meta.token_slot_T,
                buffers=buffers,
                has_lora=meta.has_lora,
                phase=meta.phase,
                num_live=handle.num_live_1,
                order_T=handle.order_T,
            )
        # One request longer than the budget of a batch: rows are independent, so it passes through in pieces.
        out_TH = torch.empty_like(x_TH)
        for begin in range(0, tokens, buffers.max_tokens):
            piece = slice(begin, begin + buffers.max_tokens)
            out_TH[piece] = experts_lora(
                x_TH[piece],
                expert_ids_TK[piece],
                weights_TK[piece],
                base,
                up_slots,
                down_slots,
                meta.token_slot_T[piece],
                buffers=buffers,
                has_lora=meta.has_lora,
                phase=meta.phase,
            )
        return out_TH

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
        unfit = max(q_THD.shape[2], v_THD.shape[2]) > MAX_WIDTH or q_THD.shape[2] < MIN_WIDTH
        if mask is not None or unfit or (interpreted() and segments.lengths is not None):
            # Masks that hold more than causality, very wide or narrow heads, and the CPU take the exact and slow way.
            return super().attention(
                q_THD, k_THD, v_THD, segments, scale=scale, window=window, sinks=sinks, softcap=softcap, mask=mask
            )
        return self._attention.run(
            q_THD, k_THD, v_THD, segments, scale=scale, window=window, sinks=sinks, softcap=softcap
        )

    def settle_attention(self, *, longest: int, full_slots: int | None, say: Callable[[str], None]) -> None:
        self._attention.settle(
            self.attention_kernel,
            batch_invariant=self.batch_invariant,
            longest=longest,
            full_slots=full_slots,
            say=say,
        )

    @property
    def attention_choice(self) -> AttentionChoices:
        return self._attention.choices

    @attention_choice.setter
    def attention_choice(self, choices: AttentionChoices) -> None:
        self._attention.choices = choices

    @property
    def long_request_tokens(self) -> int | None:
        return self._attention.long_request_tokens

    def attention_report(self) -> list[dict[str, Any]]:
        return self._attention.report()

    def _eager(self, batch: PackedBatch, phase: Phase, has_lora: bool) -> LoraMetadata:
        """A handle with tensors of its own, for a batch that no graph takes."""
        handle = self._eager_handle(batch, phase) if has_lora else Handle(phase=phase, rows=no_rows(batch.device))
        return LoraMetadata(phase=phase, token_slot_T=batch.token_slot_T, has_lora=has_lora, private=handle)

    def _eager_handle(self, batch: PackedBatch, phase: Phase) -> Handle:
        tokens = batch.num_tokens
        plan = self._plan(batch, self._tile_rows(tokens))
        sizes = self._sizes(tokens, len(plan.slot_C), batch.num_sequences, max(batch.slots) + 1)
        buffers = RowBuffers(sizes, sizes.allocate(batch.device))
        buffers.refresh(plan, batch)
        return Handle(phase=phase, rows=buffers.tiles, blocks=buffers.blocks, order_T=buffers.order_T)

    def _handle(self, meta: LoraMetadata) -> Handle:
        handle = meta.private
        if not isinstance(handle, Handle):
            raise PhaseError(f"the handle was not made by backend {self.capabilities.name!r}")
        if handle.phase is not meta.phase:
            raise PhaseError(f"buffers of phase {handle.phase} were handed to phase {meta.phase}")
        if handle.static and (
            meta.phase not in self._buffers or handle.scratch is not self._buffers[meta.phase].scratch
        ):
            raise PhaseError(f"the buffers of the handle are not those of phase {meta.phase} of this backend")
        return handle

    def _check_admitted(self, batch: PackedBatch, bucket: int, own: PhaseBuffers) -> None:
        """The runner admitted this batch by the same function; a bucket that the buffers cannot hold is refused."""
        if bucket > own.capacity.max_tokens:
            raise ConfigError(f"bucket {bucket} is over max_tokens {own.capacity.max_tokens}")
        admission = admit(
            tokens=batch.num_tokens,
            requests=batch.num_sequences,
            mode=own.mode,
            buckets=(bucket,),
            capacity=own.capacity,
        )
        if admission.reason is not None:
            raise ConfigError(f"the batch cannot use bucket {bucket}: {admission.reason.text}")

    _permuted: bool
    """Whether tiles count rows of a sorted order."""

    @staticmethod
    @abstractmethod
    def _tile_rows(tokens: int) -> int:
        """Rows of a tile: by the bucket alone, since graphs bake it in."""

    @staticmethod
    @abstractmethod
    def _most_tiles(capacity: PrefillCapacity, mode: GraphMode) -> int:
        """Tiles of the phase's list: enough for every batch of `capacity`."""

    @staticmethod
    @abstractmethod
    def _bucket_tiles(own: PhaseBuffers, bucket: int) -> int:
        """Tiles of the list that a batch of `bucket` can need."""

    @staticmethod
    @abstractmethod
    def _plan(batch: PackedBatch, tile_rows: int) -> RowPlan:
        """The tiles of a packed batch, planned on the host."""

    @abstractmethod
    def _cut(self, slot_N: torch.Tensor) -> RowTiles:
        """The tiles of loose rows, cut on the device."""
