"""Breakable graphs: the body in segments that end at every attention, which runs eagerly on the live rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moelora.backends.base import Backend, LoraMetadata
from moelora.graphs.buffers import StaticInputs
from moelora.graphs.recorder import Recorder, Recording
from moelora.models.base_model import BaseModel
from moelora.models.context import AttentionBreak, ForwardContext, Segments, forward_context


class BreakableGraph:
    """One bucket and one variant, with or without LoRA. Attention reads `live` at replay, never what capture saw."""

    def __init__(self, base: BaseModel, backend: Backend, inputs: StaticInputs, bucket: int) -> None:
        self._base = base
        self._backend = backend
        self._inputs = inputs
        self._bucket = bucket
        self._live: Segments | None = None
        self._recording: Recording | None = None
        self._hidden_TH: torch.Tensor | None = None

    def run_eagerly(self, meta: LoraMetadata, live: Segments) -> torch.Tensor:
        """The padded forward that capture records, without a graph. Returns `[bucket, H]`."""
        self._live = live
        return self._forward(meta, _Break(self, lambda eager: eager(), keep=lambda tensor: tensor))

    def capture(self, recorder: Recorder, meta: LoraMetadata, live: Segments) -> None:
        """Records the forward in parts. `meta` must be the phase's static metadata."""
        self._live = live

        def work(pause: Callable[[Callable[[], None]], None]) -> None:
            self._hidden_TH = self._forward(meta, _Break(self, pause, keep=recorder.alias))

        self._recording = recorder.record_parts(work)

    def replay(self, live: Segments) -> torch.Tensor:
        """Replays on what the static buffers hold and `live`. Returns `[bucket, H]`, overwritten by the next replay."""
        assert self._recording is not None, f"bucket {self._bucket} was not captured"
        self._live = live
        self._recording.replay()
        assert self._hidden_TH is not None
        return self._hidden_TH

    def _forward(self, meta: LoraMetadata, attention_break: AttentionBreak) -> torch.Tensor:
        context = ForwardContext(backend=self._backend, meta=meta, segments=self._live, attention_break=attention_break)
        with forward_context(context):
            return self._base.hidden_states(self._inputs.ids(self._bucket), self._inputs.positions(self._bucket))

    def live_rows(self) -> tuple[Segments, int]:
        """Where the sequences of the batch lie now, and how many rows they fill."""
        assert self._live is not None
        assert self._live.lengths is not None
        return self._live, sum(self._live.lengths)


class _Break(AttentionBreak):
    """Puts each attention between two parts. Its output lands in a buffer that belongs to the part before it."""

    def __init__(
        self,
        graph: BreakableGraph,
        pause: Callable[[Callable[[], None]], None],
        keep: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._graph = graph
        self._pause = pause
        self._keep = keep

    def attend(
        self, backend: Backend, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        # Zeroed inside the graph: rows behind the live ones would else hand old values, NaN perhaps, to the next part.
        out_THD = torch.zeros(*q_THD.shape[:2], v_THD.shape[2], dtype=q_THD.dtype, device=q_THD.device)
        graph = self._graph
        out, q, k, v = (self._keep(x) for x in (out_THD, q_THD, k_THD, v_THD))

        def eager() -> None:
            segments, live = graph.live_rows()
            out[:live] = backend.attention(q[:live], k[:live], v[:live], segments, **options)

        self._pause(eager)
        return out_THD
