"""The reference backend: plain torch, any device, any dtype. Every other backend is tested against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from moelora.backends.base import (
    Backend,
    Capabilities,
    DenseSlots,
    ExpertSlots,
    ExpertsWeights,
    LoraMetadata,
    MoeShape,
    PhaseError,
)
from moelora.capacity import PrefillCapacity
from moelora.types import BASE_SLOT, PackedBatch, Phase

SlotRows = list[tuple[int, torch.Tensor]]
"""Each adapter slot that has rows, and the indices of its rows. Base rows are in none."""


class TorchBackend(Backend):
    """One product per slot over the rows of that slot.

    Finding those rows synchronises, so that it captures no graphs; its static metadata still keeps the contract.
    """

    capabilities = Capabilities(name="torch", device_types=frozenset({"cpu", "cuda"}), graph_modes=frozenset())

    def __init__(self) -> None:
        self._token_slots: dict[Phase, torch.Tensor] = {}
        self._moe_phases: set[Phase] = set()

    def init_graph_metadata(self, phase: Phase, capacity: PrefillCapacity, device: torch.device) -> None:
        if phase in self._token_slots:
            raise PhaseError(f"the metadata of phase {phase} was made already")
        self._token_slots[phase] = torch.full((capacity.max_tokens,), BASE_SLOT, dtype=torch.int32, device=device)

    def init_moe_buffers(
        self,
        phase: Phase,
        capacity: PrefillCapacity,
        device: torch.device,
        dtype: torch.dtype,
        shapes: Sequence[MoeShape],
    ) -> None:
        if phase in self._moe_phases:
            raise PhaseError(f"the expert buffers of phase {phase} were made already")
        self._moe_phases.add(phase)

    def prepare_batch(self, batch: PackedBatch, *, phase: Phase, bucket: int | None = None) -> LoraMetadata:
        if phase not in self._token_slots:
            raise PhaseError(f"phase {phase} has no metadata; call init_graph_metadata for it first")
        has_lora = any(slot != BASE_SLOT for slot in batch.slots)
        if bucket is None:
            return self._metadata(phase, batch.token_slot_T, has_lora)
        static_T = self._token_slots[phase]
        static_T[: batch.num_tokens].copy_(batch.token_slot_T)
        static_T[batch.num_tokens :].fill_(BASE_SLOT)
        # No row lists: they would be those of this batch, and a replay must read the buffer.
        return LoraMetadata(phase=phase, token_slot_T=static_T[:bucket], has_lora=has_lora)

    def rows_metadata(self, row_slot_N: torch.Tensor, *, has_lora: bool) -> LoraMetadata:
        return self._metadata(Phase.PREFILL, row_slot_N, has_lora)

    @staticmethod
    def _metadata(phase: Phase, token_slot_T: torch.Tensor, has_lora: bool) -> LoraMetadata:
        rows = _rows_by_slot(token_slot_T) if has_lora else []
        return LoraMetadata(phase=phase, token_slot_T=token_slot_T, has_lora=has_lora, private=rows)

    def linear(self, x_TI: torch.Tensor, out_TO: torch.Tensor, slots: DenseSlots, meta: LoraMetadata) -> None:
        ranks = slots.ranks_L.tolist()
        for slot, rows in _slot_rows(meta):
            rank = ranks[slot]
            if rank:
                delta = _low_rank(x_TI[rows], slots.a_LRI[slot, :rank], slots.b_LOR[slot, :, :rank])
                out_TO[rows] = (out_TO[rows].float() + delta).to(out_TO.dtype)

    def embedding(self, ids_T: torch.Tensor, out_TH: torch.Tensor, slots: DenseSlots, meta: LoraMetadata) -> None:
        ranks = slots.ranks_L.tolist()
        for slot, rows in _slot_rows(meta):
            rank = ranks[slot]
            if rank:
                a_NR = slots.a_LRI[slot, :rank, ids_T[rows]].T.float()
                delta = a_NR @ slots.b_LOR[slot, :, :rank].float().T
                out_TH[rows] = (out_TH[rows].float() + delta).to(out_TH.dtype)

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
        tokens, top_k = expert_ids_TK.shape
        ids_P = expert_ids_TK.reshape(-1)
        slot_P = meta.token_slot_T.repeat_interleave(top_k)
        out_PH = torch.zeros(tokens * top_k, x_TH.shape[1], dtype=torch.float32, device=x_TH.device)
        for expert in ids_P.unique().tolist():
            if 0 <= expert < base.num_experts:
                pairs = (ids_P == expert).nonzero()[:, 0]
                slots = slot_P[pairs] if meta.has_lora else None
                up = _expert_product(
                    x_TH[pairs // top_k], expert, base.up, base.up_bias, base.transposed, up_slots, slots
                )
                hidden = base.activation(up)
                down = _expert_product(hidden, expert, base.down, base.down_bias, base.transposed, down_slots, slots)
                out_PH[pairs] = (base.post_norm(down) if base.post_norm is not None else down).float()
        out_PH *= weights_TK.reshape(-1, 1).float()
        return out_PH.view(tokens, top_k, -1).sum(dim=1).to(x_TH.dtype)


def _rows_by_slot(token_slot_T: torch.Tensor) -> SlotRows:
    return [(s, (token_slot_T == s).nonzero()[:, 0]) for s in token_slot_T.unique().tolist() if s != BASE_SLOT]


def _slot_rows(meta: LoraMetadata) -> SlotRows:
    return _rows_by_slot(meta.token_slot_T) if meta.private is None else meta.private


def _low_rank(x_NI: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor) -> torch.Tensor:
    """B A x in fp32: `[N, out]`."""
    return (x_NI.float() @ a_RI.float().T) @ b_OR.float().T


def _expert_product(
    x_NI: torch.Tensor,
    expert: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: bool,
    slots: ExpertSlots | None,
    slot_N: torch.Tensor | None,
) -> torch.Tensor:
    """W x + b + B A x of one expert; each row with its own slot. Returns `[N, out]` in x's dtype."""
    matrix = weight[expert].T if transposed else weight[expert]
    out_NO = functional.linear(x_NI, matrix, bias[expert] if bias is not None else None)
    if slots is None or slot_N is None:
        return out_NO
    ranks = slots.ranks_L.tolist()
    for slot in slot_N.unique().tolist():
        rank = ranks[slot] if slot != BASE_SLOT else 0
        if rank:
            rows = (slot_N == slot).nonzero()[:, 0]
            a_RI = slots.a_LERI[slot, expert % slots.a_LERI.shape[1], :rank]
            b_OR = slots.b_LEOR[slot, expert % slots.b_LEOR.shape[1], :, :rank]
            out_NO[rows] = (out_NO[rows].float() + _low_rank(x_NI[rows], a_RI, b_OR)).to(out_NO.dtype)
    return out_NO
