"""What the model and the head see of a batch: sequences one behind the other, without padding, and who each belongs to.

Made on the host in plain arrays: what the model sees first, what the head sees while the model runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from moelora.batching.sequences import NO_TARGET, Sequence
from moelora.batching.transfer import send
from moelora.types import BASE_ADAPTER, BASE_SLOT, HostRows, PackedBatch


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
    """Packs sequences in the given order. `slot_of` maps adapter names to slots; the base needs no entry.

    Does not wait for the device.
    """
    slots = [BASE_SLOT if s.adapter == BASE_ADAPTER else slot_of[s.adapter] for s in sequences]
    return pack_ids([s.token_ids for s in sequences], slots, device)


def pack_ids(ids: Seq[Seq[int]], slots: Seq[int], device: torch.device) -> PackedBatch:
    """Packs the token ids of some sequences, each under the adapter of its slot."""
    lengths = tuple(map(len, ids))
    boundary_S1 = _boundaries(lengths)
    id_T = np.concatenate([np.asarray(one, dtype=np.int64) for one in ids])
    position_T = np.arange(id_T.size) - np.repeat(boundary_S1[:-1], lengths)
    slot_T = np.repeat(np.asarray(slots, dtype=np.int32), lengths)
    host = HostRows(id_T=id_T, position_T=position_T, boundary_S1=boundary_S1.astype(np.int32), slot_T=slot_T)
    return PackedBatch(host=host, lengths=lengths, slots=tuple(slots), device=device)


def head_rows(sequences: Seq[Sequence], batch: PackedBatch) -> HeadRows:
    """The rows that are scored of the sequences that `batch` was packed from. Does not wait for the device.

    Apart from `pack`, since they are not needed before the body is done: made while it runs, they cost no time.
    """
    runs = [run for s in sequences for run in s.runs]
    begins = np.repeat(batch.host.boundary_S1[:-1], [len(s.runs) for s in sequences])
    first_N = begins + np.asarray([run.first for run in runs], dtype=np.int64)
    sizes = [len(run.targets) for run in runs]
    none = np.empty(0, dtype=np.int64)
    target_N = np.concatenate([none, *(np.asarray(run.targets, dtype=np.int64) for run in runs)])
    within_N = np.arange(target_N.size) - np.repeat(_boundaries(sizes)[:-1], sizes)
    slot_N = np.repeat(np.asarray(batch.slots, dtype=np.int32), [s.num_rows for s in sequences])
    open_M = np.flatnonzero(target_N == NO_TARGET)
    arrays = (np.repeat(first_N, sizes) + within_N, target_N, slot_N, open_M)
    places, targets, slots, opens = send(arrays, batch.device)
    return HeadRows(position_N=places, target_N=targets, slot_N=slots, open_M=opens, slots=slot_N, opens=open_M)


def _boundaries(sizes: Seq[int]) -> np.ndarray:
    """Where each of some neighbours begins, and where the last one ends; int64, one more than there are `sizes`."""
    return np.fromiter(accumulate(sizes, initial=0), dtype=np.int64, count=len(sizes) + 1)
