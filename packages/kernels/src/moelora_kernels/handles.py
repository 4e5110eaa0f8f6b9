"""What a backend keeps for a batch and for a phase: which buffers a handle reads, and who owns them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moelora.capacity import PrefillCapacity
from moelora.types import GraphMode, Phase
from moelora_kernels.metadata import RowBuffers
from moelora_kernels.ops.dense_lora import RowTiles, make_tile_list
from moelora_kernels.ops.lora_gemm import SlotBlocks


@dataclass(frozen=True, slots=True)
class Handle:
    """What a handle carries beside its public fields.

    `static`: its buffers are those of the phase, which a graph may bake in; else they are the handle's own.
    num_live_1: int32, tokens before the padding. order_T: tokens by slot, for the experts.
    """

    phase: Phase
    rows: RowTiles
    static: bool = False
    scratch: torch.Tensor | None = None
    blocks: SlotBlocks | None = None
    num_live_1: torch.Tensor | None = None
    order_T: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PhaseBuffers:
    """The static buffers of one phase, allocated once. scratch: bytes for y, viewed in the dtype of each call.

    rows: memory for the row metadata of any bucket. buckets: its layout for each bucket that was used so far, and the
    handle to it, which is the same for every batch.
    """

    capacity: PrefillCapacity
    mode: GraphMode
    rows: torch.Tensor
    scratch: torch.Tensor
    buckets: dict[int, tuple[RowBuffers, Handle]] = field(default_factory=dict)


def no_rows(device: torch.device) -> RowTiles:
    """Tiles of a batch without adapter rows."""
    return RowTiles(make_tile_list(0, device), 16)


def scratch_of(handle: Handle, dtype: torch.dtype) -> torch.Tensor | None:
    """The phase's scratch in the dtype of a call; None for handles that have none, whose calls allocate it."""
    return handle.scratch.view(dtype) if handle.scratch is not None else None
