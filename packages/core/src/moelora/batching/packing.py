"""What the model and the head see of a batch: sequences one behind the other, without padding, and who each belongs to.

Made on the host in plain arrays and sent to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from moelora.batching.sequences import NO_TARGET, Sequence
from moelora.batching.transfer import send
from moelora.types import BASE_ADAPTER, BASE_SLOT, PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """The N positions of a batch that go through the head, in the order of its sequences and their runs.

    position_N: int64 on the device, the row of the packed batch. target_N: int64 on the device, NO_TARGET for none.
    slot_N: int32 on the device. open_M: int64 on the device, which of the N have no target, ascending. slots, opens:
    the last two on the host.
    """

    position_N: torch.Tensor
    target_N: torch.Tensor
    slot_N: torch.Tensor
    open_M: torch.Tensor
    slots: np.ndarray
    opens: np.ndarray

    @property
    def count(self) -> int:
        """N."""
        return self.slots.size


def pack(sequences: Seq[Sequence], slot_of: Mapping[str, int], device: torch.device) -> PackedBatch:
    """Packs sequences in the given order. `slot_of` maps adapter names to slots; the base needs no entry."""
    return pack_with_rows(sequences, slot_of, device)[0]


def pack_with_rows(
    sequences: Seq[Sequence], slot_of: Mapping[str, int], device: torch.device
) -> tuple[PackedBatch, HeadRows]:
    """Packs sequences, and the rows of them that are scored. Nothing waits for the device."""
    lengths = tuple(s.num_tokens for s in sequences)
    slots = tuple(BASE_SLOT if s.adapter == BASE_ADAPTER else slot_of[s.adapter] for s in sequences)
    length_S, slot_S = np.asarray(lengths, dtype=np.int64), np.asarray(slots, dtype=np.int32)
    boundary_S1 = np.concatenate(([0], np.cumsum(length_S)))
    ids_T = np.concatenate([np.asarray(s.token_ids, dtype=np.int64) for s in sequences])
    position_T = np.arange(boundary_S1[-1]) - np.repeat(boundary_S1[:-1], length_S)
    target_N, place_N, rows_S = _rows(sequences, boundary_S1)
    row_slot_N = np.repeat(slot_S, rows_S)
    open_M = np.flatnonzero(target_N == NO_TARGET)
    arrays = (
        *(ids_T, position_T, boundary_S1.astype(np.int32), np.repeat(slot_S, length_S)),
        *(place_N, target_N, row_slot_N, open_M),
    )
    ids, positions, boundaries, token_slots, places, targets, row_slots, opens = send(arrays, device)
    batch = PackedBatch(
        input_ids_T=ids,
        position_ids_T=positions,
        cu_seqlens_S1=boundaries,
        token_slot_T=token_slots,
        lengths=lengths,
        slots=slots,
    )
    rows = HeadRows(position_N=places, target_N=targets, slot_N=row_slots, open_M=opens, slots=row_slot_N, opens=open_M)
    return batch, rows


def _rows(sequences: Seq[Sequence], boundary_S1: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Targets and packed positions of all scored rows, and how many each sequence has."""
    runs = [(int(begin) + run.first, run.targets) for s, begin in zip(sequences, boundary_S1) for run in s.runs]
    sizes = np.asarray([len(targets) for _, targets in runs], dtype=np.int64)
    firsts = np.asarray([first for first, _ in runs], dtype=np.int64)
    none = np.empty(0, dtype=np.int64)
    target_N = np.concatenate([none, *(np.asarray(targets, dtype=np.int64) for _, targets in runs)])
    within_N = np.arange(target_N.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return target_N, np.repeat(firsts, sizes) + within_N, [s.num_rows for s in sequences]
