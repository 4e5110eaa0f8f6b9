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

SlotRows = list[tuple[int, slice | torch.Tensor]]
"""The rows of each adapter slot: runs of neighbouring rows where they are known, else indices. Base rows: none."""


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
            runs = _runs(batch)
            return LoraMetadata(phase=phase, token_slot_T=batch.token_slot_T, has_lora=has_lora, private=runs)
        static_T = self._token_slots[phase]
        static_T[: batch.num_tokens].copy_(batch.token_slot_T)
        static_T[batch.num_tokens :].fill_(BASE_SLOT)
        # No row lists: they would be those of this batch, and a replay must read the buffer.
        return LoraMetadata(phase=phase, token_slot_T=static_T[:bucket], has_lora=has_lora)

    def rows_metadata(self, row_slot_N: torch.Tensor, *, has_lora: bool) -> LoraMetadata:
        rows = _rows_by_slot(row_slot_N) if has_lora else []
        return LoraMetadata(phase=Phase.PREFILL, token_slot_T=row_slot_N, has_lora=has_lora, private=rows)

    def linear(self, x_TI: torch.Tensor, out_TO: torch.Tensor, slots: DenseSlots, meta: LoraMetadata) -> None:
        ranks = slots.ranks_L.tolist()
        for slot, rows in _slot_rows(meta):
            rank = ranks[slot]
            if rank:
                _add(out_TO, rows, _low_rank(x_TI[rows], slots.a_LRI[slot, :rank], slots.b_LOR[slot, :, :rank]))

    def embedding(self, ids_T: torch.Tensor, out_TH: torch.Tensor, slots: DenseSlots, meta: LoraMetadata) -> None:
        ranks = slots.ranks_L.tolist()
        for slot, rows in _slot_rows(meta):
            rank = ranks[slot]
            if rank:
                a_NR = slots.a_LRI[slot, :rank, ids_T[rows]].T.float()
                _add(out_TH, rows, a_NR @ slots.b_LOR[slot, :, :rank].float().T)

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
        ids_P = expert_ids_TK.reshape(-1).long()
        slot_P = meta.token_slot_T.repeat_interleave(top_k).long()
        if not meta.has_lora:
            up_slots = down_slots = None
        # Pairs by expert, then slot: every group is a run of neighbouring rows.
        slots_and_base = int(slot_P.max()) + 2
        order_P = torch.argsort(ids_P * slots_and_base + slot_P, stable=True)
        ids_P, slot_P = ids_P[order_P], slot_P[order_P]
        x_PH = x_TH[order_P // top_k]
        out_PH = torch.zeros(tokens * top_k, x_TH.shape[1], dtype=torch.float32, device=x_TH.device)
        for expert, pairs in _groups(ids_P):
            if 0 <= expert < base.num_experts:
                groups = _groups(slot_P[pairs])
                up = _expert_product(x_PH[pairs], expert, base.up, base.up_bias, base.transposed, up_slots, groups)
                hidden = base.activation(up)
                down = _expert_product(hidden, expert, base.down, base.down_bias, base.transposed, down_slots, groups)
                out_PH[pairs] = (base.post_norm(down) if base.post_norm is not None else down).float()
        out_PH *= weights_TK.reshape(-1)[order_P].unsqueeze(1).float()
        by_pair_PH = torch.empty_like(out_PH)
        by_pair_PH[order_P] = out_PH
        return by_pair_PH.view(tokens, top_k, -1).sum(dim=1).to(x_TH.dtype)


def _groups(sorted_P: torch.Tensor) -> list[tuple[int, slice]]:
    """Each value of a sorted tensor, and the run of entries that have it."""
    values, counts = torch.unique_consecutive(sorted_P, return_counts=True)
    groups, begin = [], 0
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        groups.append((value, slice(begin, begin + count)))
        begin += count
    return groups


def _runs(batch: PackedBatch) -> SlotRows:
    """Runs of neighbouring sequences of one slot."""
    runs: list[tuple[int, slice]] = []
    begin = 0
    for length, slot in zip(batch.lengths, batch.slots, strict=True):
        end = begin + length
        if runs and runs[-1][0] == slot:
            runs[-1] = (slot, slice(runs[-1][1].start, end))
        else:
            runs.append((slot, slice(begin, end)))
        begin = end
    return [run for run in runs if run[0] != BASE_SLOT]


def _add(out_TO: torch.Tensor, rows: slice | torch.Tensor, delta_NO: torch.Tensor) -> None:
    """out += delta on some rows, summed in fp32 and rounded once."""
    out_TO[rows] = (out_TO[rows].float() + delta_NO).to(out_TO.dtype)


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
    groups: list[tuple[int, slice]],
) -> torch.Tensor:
    """W x + b + B A x of one expert, `[N, out]` in x's dtype. groups: the rows of each slot, base included."""
    matrix = weight[expert].T if transposed else weight[expert]
    out_NO = functional.linear(x_NI, matrix, bias[expert] if bias is not None else None)
    if slots is None:
        return out_NO
    ranks = slots.ranks_L.tolist()
    for slot, rows in groups:
        rank = ranks[slot] if slot != BASE_SLOT else 0
        if rank:
            a_RI = slots.a_LERI[slot, expert % slots.a_LERI.shape[1], :rank]
            b_OR = slots.b_LEOR[slot, expert % slots.b_LEOR.shape[1], :, :rank]
            _add(out_NO, rows, _low_rank(x_NI[rows], a_RI, b_OR))
    return out_NO
