"""The static inputs of captured graphs: one set per phase, refilled in place before every replay."""

from __future__ import annotations

import numpy as np
import torch

from moelora.capacity import PrefillCapacity
from moelora.models.context import Segments
from moelora.types import GraphMode, PackedBatch, Phase

_ALIGN = 32
"""Elements of int64 (256 bytes) that each array starts at a multiple of: kernels compile once for all buckets."""


class StaticInputs:
    """Token ids, positions and boundaries at fixed addresses, sized by capacity, each bucket in a layout of its own.

    Behind the live tokens ids and positions are 0; unused request slots are empty segments at the last live boundary,
    so that padding belongs to no sequence. All buckets share one buffer, from its beginning on, so that a small one is
    filled by a small copy.
    """

    def __init__(self, phase: Phase, capacity: PrefillCapacity, device: torch.device) -> None:
        self.phase = phase
        self._full_slots = capacity.request_slots(GraphMode.FULL)
        self._most_requests = max(map(capacity.request_slots, (GraphMode.FULL, GraphMode.BREAKABLE)))
        self._max_tokens = capacity.max_tokens
        self._flat = torch.zeros(self._layout(self._max_tokens)[1], dtype=torch.int64, device=device)

    def _layout(self, bucket: int) -> tuple[int, int]:
        """Elements from one array of a bucket to the next, and of all three: ids, positions, boundaries."""
        step = -(-bucket // _ALIGN) * _ALIGN
        return step, 2 * step + -(-(min(self._most_requests, bucket) + 1) // 2)  # two of int32 in each

    def ids(self, bucket: int) -> torch.Tensor:
        """int64 `[1, bucket]`, a view."""
        return self._flat[:bucket].unsqueeze(0)

    def positions(self, bucket: int) -> torch.Tensor:
        """int64 `[1, bucket]`, a view."""
        step, _ = self._layout(bucket)
        return self._flat[step : step + bucket].unsqueeze(0)

    def boundaries(self, bucket: int) -> torch.Tensor:
        """int32, a view: the request slots of a full graph, no more than the bucket has tokens."""
        return self._boundaries(bucket)[: min(self._full_slots, bucket) + 1]

    def fill(self, batch: PackedBatch, bucket: int) -> Segments:
        """Copies a batch in and covers the tail; returns where its sequences lie. Does not wait for the device."""
        live, used = batch.num_tokens, batch.num_sequences + 1
        assert live <= bucket <= self._max_tokens, f"{live} tokens, bucket {bucket}, room {self._max_tokens}"
        assert used <= self._most_requests + 1, f"{used - 1} requests, room {self._most_requests}"
        step, numel = self._layout(bucket)
        host = torch.zeros(numel, dtype=torch.int64, pin_memory=self._flat.is_cuda)
        flat = host.numpy()
        flat[:live], flat[step : step + live] = batch.host.id_T, batch.host.position_T
        boundaries = flat[2 * step :].view(np.int32)
        boundaries[:used], boundaries[used:] = batch.host.boundary_S1, live
        # The allocator keeps the pinned memory back until the stream has passed this copy.
        self._flat[:numel].copy_(host, non_blocking=True)
        return Segments(
            cu_seqlens_S1=self._boundaries(bucket)[:used], lengths=batch.lengths, longest=max(batch.lengths)
        )

    def _boundaries(self, bucket: int) -> torch.Tensor:
        step, numel = self._layout(bucket)
        return self._flat[2 * step : numel].view(torch.int32)
