"""Which slots each block of `LIST_ROWS` rows meets: planned on the host from the requests of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moelora.types import BASE_SLOT
from moelora_kernels.ops.invariant_gemm import LIST_ROWS


@dataclass(frozen=True, slots=True)
class SlotBlocks:
    """token_slot_T: slot of each row or -1. Block i meets slot[first[i]] … slot[first[i + 1] - 1]; base is not listed.

    All int32 on the device. Blocks behind the last row are empty.
    """

    token_slot_T: torch.Tensor
    first: torch.Tensor
    slot: torch.Tensor


def most_entries(tokens: int, requests: int, slots: int) -> int:
    """The most entries that `tokens` rows of `requests` requests can give: a request adds one, and one for each border
    that it crosses; a block lists no slot twice."""
    blocks = -(-tokens // LIST_ROWS)
    return min(blocks + min(requests, tokens), blocks * slots)


def plan_blocks(lengths: Sequence[int], slots: Sequence[int], blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(first `[blocks + 1]`, slot) as int32 on the host."""
    length_S = np.asarray(lengths, dtype=np.int64)
    slot_S = np.asarray(slots, dtype=np.int64)
    start_S = np.cumsum(length_S) - length_S
    adapted = (slot_S != BASE_SLOT) & (length_S > 0)
    length_S, slot_S, start_S = length_S[adapted], slot_S[adapted], start_S[adapted]
    first_block = start_S // LIST_ROWS
    count = (start_S + length_S - 1) // LIST_ROWS - first_block + 1
    request = np.repeat(np.arange(count.size), count)
    block = first_block[request] + np.arange(request.size) - np.repeat(np.cumsum(count) - count, count)
    stride = int(slot_S.max(initial=0)) + 1
    pairs = np.unique(block * stride + slot_S[request])
    first = np.searchsorted(pairs, np.arange(blocks + 1) * stride)
    return first.astype(np.int32), (pairs % stride).astype(np.int32)
