"""How much device memory a run takes, part by part, before it is loaded. Static buffers are made and let go again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moelora.adapters.bank import BankLayout
from moelora.adapters.base import Adapter, Catalogue
from moelora.backends.base import Backend
from moelora.capacity import PrefillCapacity
from moelora.errors import ConfigError
from moelora.models.experts import moe_shapes
from moelora.scoring.head import chunk_rows, row_bytes
from moelora.types import Phase

NOT_COUNTED = ("activations", "captured graphs", "what the libraries keep")
"""Device memory that only a run can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the device. base: weights and buffers. bank: all slots, and whole modules that adapters replace.

    static: metadata and expert scratch of the backend. scoring_chunk: logits held at once. adapters_host: factors of
    all adapters, on the host. free, total: of a CUDA device as it is now; None elsewhere.
    """

    base: int
    bank: int
    static: int
    scoring_chunk: int
    adapters_host: int
    free: int | None
    total: int | None

    @property
    def needed(self) -> int:
        """The sum of the parts on the device; `NOT_COUNTED` comes on top."""
        return self.base + self.bank + self.static + self.scoring_chunk

    @property
    def fits(self) -> bool | None:
        """Whether the parts fit into what is free; None where that is not known."""
        return None if self.free is None else self.needed <= self.free


def plan_memory(
    skeleton: Any,
    catalogue: Catalogue,
    adapters: Collection[Adapter],
    *,
    backend: Backend,
    capacity: PrefillCapacity,
    device: torch.device,
    dtype: torch.dtype,
    score_chunk_rows: int | None = None,
) -> MemoryPlan:
    """Sizes what `PrefillEngine` would allocate. skeleton: the model on the meta device.

    Raises `ConfigError` if not even the static buffers find room.
    """
    layout = BankLayout.of(adapters)
    config = skeleton.config.get_text_config()
    replaced = sorted((sum(t.nbytes for t in a.replacements.values()) for a in adapters), reverse=True)
    bank = capacity.bank_slots * layout.bytes_per_slot(catalogue, dtype) + sum(replaced[: capacity.bank_slots])
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (None, None)
    try:
        with _Allocations(device.type) as made:
            backend.init_graph_metadata(Phase.PREFILL, capacity, device)
            shapes = moe_shapes(skeleton, config, layout.ranks)
            if shapes:
                backend.init_moe_buffers(Phase.PREFILL, capacity, device, dtype, shapes)
    except torch.cuda.OutOfMemoryError:
        raise ConfigError(
            f"the static buffers of batches of {capacity.max_tokens} tokens do not fit on {device}; lower --max-tokens"
        ) from None
    base = _weights(skeleton, catalogue, dtype)
    left = None if free is None else max(free - base - bank - made.nbytes, 0)
    rows = score_chunk_rows or chunk_rows(config.vocab_size, dtype, left)
    return MemoryPlan(
        base=base,
        bank=bank,
        static=made.nbytes,
        scoring_chunk=rows * row_bytes(config.vocab_size, dtype),
        adapters_host=sum(a.nbytes for a in adapters),
        free=free,
        total=total,
    )


def _weights(skeleton: Any, catalogue: Catalogue, dtype: torch.dtype) -> int:
    """Parameters in `dtype` and buffers as they are; a tied head counts once."""
    parameters = {id(p): p.numel() for p in skeleton.parameters()}
    head, embedding = skeleton.get_output_embeddings(), skeleton.get_input_embeddings()
    if catalogue.tied_lm_head and head.weight is not embedding.weight:
        del parameters[id(head.weight)]
    return sum(parameters.values()) * dtype.itemsize + sum(b.nbytes for b in skeleton.buffers())


class _Allocations(TorchDispatchMode):
    """Adds up the storages that are made on one type of device within its context."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._storages: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device_type:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage.nbytes()
        return out
