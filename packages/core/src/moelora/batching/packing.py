"""What the model sees of a batch: sequences one behind the other, without padding, and who each token belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from moelora.batching.sequences import Sequence
from moelora.types import BASE_ADAPTER, BASE_SLOT, PackedBatch


def pack(sequences: Seq[Sequence], slot_of: Mapping[str, int], device: torch.device) -> PackedBatch:
    """Packs sequences in the given order. `slot_of` maps adapter names to slots; the base needs no entry."""
    lengths = tuple(s.num_tokens for s in sequences)
    slots = tuple(BASE_SLOT if s.adapter == BASE_ADAPTER else slot_of[s.adapter] for s in sequences)
    lengths_S = torch.tensor(lengths, dtype=torch.int64)
    boundaries = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths_S, 0, out=boundaries[1:])
    total = int(boundaries[-1])
    positions = torch.arange(total) - boundaries[:-1].repeat_interleave(lengths_S)
    slot_T = torch.tensor(slots, dtype=torch.int32).repeat_interleave(lengths_S)
    ids = torch.tensor([token for s in sequences for token in s.token_ids], dtype=torch.int64)
    return PackedBatch(
        input_ids_T=ids.to(device, non_blocking=True),
        position_ids_T=positions.to(device, non_blocking=True),
        cu_seqlens_S1=boundaries.to(device=device, dtype=torch.int32, non_blocking=True),
        token_slot_T=slot_T.to(device, non_blocking=True),
        lengths=lengths,
        slots=slots,
    )
