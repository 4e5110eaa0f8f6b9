"""Full graphs: the whole decoder body of one bucket in one graph, attention inside, boundaries in a static buffer."""

from __future__ import annotations

import torch

from moelora.backends.base import Backend, LoraMetadata
from moelora.graphs.buffers import StaticInputs
from moelora.graphs.recorder import Recorder, Recording
from moelora.models.base_model import BaseModel
from moelora.models.context import ForwardContext, Segments, forward_context


class FullGraph:
    """One bucket and one variant, with or without LoRA."""

    def __init__(self, base: BaseModel, backend: Backend, inputs: StaticInputs, bucket: int) -> None:
        self._base = base
        self._backend = backend
        self._inputs = inputs
        self._bucket = bucket
        self._recording: Recording | None = None
        self._hidden_TH: torch.Tensor | None = None

    def run_eagerly(self, meta: LoraMetadata, live: Segments) -> torch.Tensor:
        """The padded forward that capture records, without a graph. Returns `[bucket, H]`."""
        segments = Segments(cu_seqlens_S1=self._inputs.boundaries(self._bucket), lengths=None, longest=self._bucket)
        with forward_context(ForwardContext(backend=self._backend, meta=meta, segments=segments)):
            return self._base.hidden_states(self._inputs.ids(self._bucket), self._inputs.positions(self._bucket))

    def capture(self, recorder: Recorder, meta: LoraMetadata, live: Segments) -> None:
        """Records the forward. `meta` must be the phase's static metadata, whatever rows it holds now."""

        def work() -> None:
            # An alias: graphs of other buckets may use its memory, since only one replay is read at a time.
            self._hidden_TH = recorder.alias(self.run_eagerly(meta, live))

        self._recording = recorder.record(work)

    def replay(self, live: Segments) -> torch.Tensor:
        """Replays on what the static buffers hold. Returns `[bucket, H]`, overwritten by any bucket's next replay."""
        assert self._recording is not None, f"bucket {self._bucket} was not captured"
        self._recording.replay()
        assert self._hidden_TH is not None
        return self._hidden_TH
