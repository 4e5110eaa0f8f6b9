"""The eager runner: the body as transformers runs it, on exact lengths. Every other runner falls back to it."""

from __future__ import annotations

from moelora.backends.base import Backend
from moelora.capacity import Admission, EagerReason
from moelora.graphs.base import BodyOutput, GraphRunner
from moelora.models.base_model import BaseModel
from moelora.models.context import ForwardContext, Segments, forward_context
from moelora.types import PackedBatch, Phase, RunMode


class EagerRunner(GraphRunner):
    """Never captures. `reason` says why, and is counted for each batch."""

    def __init__(self, base: BaseModel, backend: Backend, phase: Phase, reason: EagerReason) -> None:
        self._base = base
        self._backend = backend
        self._phase = phase
        self._reason = reason

    def run(self, batch: PackedBatch) -> BodyOutput:
        context = ForwardContext(
            backend=self._backend,
            meta=self._backend.prepare_batch(batch, phase=self._phase),
            segments=Segments.of(batch),
        )
        with forward_context(context):
            hidden_TH = self._base.hidden_states(batch.input_ids_T.unsqueeze(0), batch.position_ids_T.unsqueeze(0))
        return BodyOutput(
            hidden_TH=hidden_TH,
            mode=RunMode.EAGER,
            admission=Admission(bucket=None, reason=self._reason),
        )
