"""What an engine says of itself: which base, adapters and kernels it has, what ran where, and what memory it took."""

from __future__ import annotations

from typing import Any

from moelora.adapters.bank import AdapterBank
from moelora.adapters.base import Catalogue
from moelora.adapters.host import HostAdapters
from moelora.backends.base import Backend
from moelora.capacity import PrefillCapacity
from moelora.graphs.select import Selection
from moelora.memory import MemoryPlan, together
from moelora.meter import DeviceMeter
from moelora.models.base_model import BaseModel
from moelora.models.substitutes import Substitutes
from moelora.options import EngineOptions
from moelora.pipeline import BatchPipeline
from moelora.scoring.head import ScoringHead
from moelora.versions import versions

_REPORTED = (
    *("moelora", "moelora-kernels", "torch", "transformers", "triton", "safetensors", "flash-attn-4"),
    *("flash-linear-attention", "causal-conv1d"),
)
"""Packages that shape a result."""


def engine_report(
    *,
    options: EngineOptions,
    base: BaseModel,
    quantised: str | None,
    catalogue: Catalogue,
    backend: Backend,
    substitutes: Substitutes,
    selection: Selection,
    head: ScoringHead,
    adapters: HostAdapters,
    bank: AdapterBank,
    capacity: PrefillCapacity,
    planned: MemoryPlan,
    meter: DeviceMeter,
    pipeline: BatchPipeline,
) -> dict[str, Any]:
    """The dict that `PrefillEngine.report` describes, of an engine with these parts.

    quantised: how the weights of a quantised checkpoint are held, in a sentence; None if they are plain.
    """
    measured = meter.parts
    return {
        "model": str(base.folder),
        "architecture": base.architecture.model_type,
        "packed": base.architecture.packs,
        "packing_reason": base.architecture.reason,
        "quantised": quantised,
        "device": str(base.device),
        "dtype": str(base.dtype).removeprefix("torch."),
        "backend": backend.capabilities.name,
        "graph": str(options.graph),
        "graphs": selection.report(),
        "substitutes": substitutes.report(),
        "fused_head": head.fused,
        "attention": backend.attention_report(),
        "batch_invariant": options.batch_invariant,
        **pipeline.counts.report(),
        "memory_splits": pipeline.memory_splits,
        "padded_tokens": pipeline.counts.padded_tokens,
        "adapters": len(adapters),
        "adapters_kept_on_host": adapters.kept,
        "adapter_loads": bank.loads,
        "slots": capacity.slots,
        "max_tokens": capacity.max_tokens,
        "max_requests": capacity.max_requests,
        "bytes_per_slot": bank.layout.bytes_per_slot(catalogue, base.dtype),
        "weight_bytes": base.nbytes,
        "peak_device_bytes": meter.highest(),
        "memory": planned.to_json(),
        "memory_measured": measured and {**measured, "needed": together(measured)},
        "score_chunk_rows": head.chunk_rows,
        "skipped_checkpoint_tensors": len(base.skipped),
        "versions": {name: found for name, found in versions(_REPORTED).items() if found is not None},
    }
