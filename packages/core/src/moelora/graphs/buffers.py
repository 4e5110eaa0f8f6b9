"""The static inputs of captured graphs: one set per phase, refilled in place before every replay."""

from __future__ import annotations

import torch

from moelora.capacity import PrefillCapacity
from moelora.types import GraphMode, PackedBatch, Phase


class StaticInputs:
    """Token ids, positions and boundaries at fixed addresses, sized by capacity.

    Behind the live tokens ids and positions are 0; unused request slots are empty segments at the last live boundary,
    so that padding belongs to no sequence.
    """

    def __init__(self, phase: Phase, capacity: PrefillCapacity, device: torch.device) -> None:
        self.phase = phase
        self._request_slots = capacity.request_slots(GraphMode.FULL)
        self._ids_T = torch.zeros(capacity.max_tokens, dtype=torch.int64, device=device)
        self._positions_T = torch.zeros(capacity.max_tokens, dtype=torch.int64, device=device)
        self.cu_seqlens_S1 = torch.zeros(self._request_slots + 1, dtype=torch.int32, device=device)

    def ids(self, bucket: int) -> torch.Tensor:
        """int64 `[1, bucket]`, a view."""
        return self._ids_T[:bucket].unsqueeze(0)

    def positions(self, bucket: int) -> torch.Tensor:
        """int64 `[1, bucket]`, a view."""
        return self._positions_T[:bucket].unsqueeze(0)

    def boundaries(self, bucket: int) -> torch.Tensor:
        """int32, a view: no more request slots than the bucket has tokens."""
        return self.cu_seqlens_S1[: min(self._request_slots, bucket) + 1]

    def fill(self, batch: PackedBatch, bucket: int) -> None:
        """Copies a batch in and covers the tail. Boundaries only where they fit (full graphs are admitted by that)."""
        live = batch.num_tokens
        assert live <= bucket <= self._ids_T.shape[0], f"{live} tokens, bucket {bucket}, room {self._ids_T.shape[0]}"
        for static_T, given_T in ((self._ids_T, batch.input_ids_T), (self._positions_T, batch.position_ids_T)):
            static_T[:live].copy_(given_T)
            static_T[live:bucket].zero_()
        used = batch.num_sequences + 1
        if used <= self.cu_seqlens_S1.shape[0]:
            self.cu_seqlens_S1[:used].copy_(batch.cu_seqlens_S1)
            self.cu_seqlens_S1[used:].fill_(live)
