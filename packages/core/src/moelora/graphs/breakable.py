"""Breakable graphs: the body in segments that end at every attention or other token mixer, which runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from moelora.backends.base import Backend, LoraMetadata
from moelora.graphs.buffers import StaticInputs
from moelora.graphs.recorder import Recorder, Recording
from moelora.models.base_model import BaseModel
from moelora.models.context import ForwardContext, GraphBreak, Segments, forward_context, has_context


class _Live:
    """The batch that runs now. The pieces between the parts of a graph hold this, not the graph, which holds them."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._segments: Segments | None = None
        self._meta: LoraMetadata | None = None

    def set(self, segments: Segments, meta: LoraMetadata | None = None) -> None:
        """The sequences of the next run, and, unless they are those of the last one, the slots of their rows."""
        self._segments = segments
        self._meta = meta or self._meta

    @property
    def segments(self) -> Segments:
        """Where the sequences of the batch lie."""
        assert self._segments is not None, "a graph has seen no batch"
        return self._segments

    def context(self, graph_break: GraphBreak | None = None) -> ForwardContext:
        """Of a forward on the batch."""
        assert self._meta is not None, "a graph has seen no batch"
        return ForwardContext(backend=self.backend, meta=self._meta, segments=self.segments, graph_break=graph_break)


class BreakableGraph:
    """One bucket and one variant, with or without LoRA. Token mixers read what is live at replay, not at capture."""

    def __init__(self, base: BaseModel, backend: Backend, inputs: StaticInputs, bucket: int) -> None:
        self._base = base
        self._inputs = inputs
        self._bucket = bucket
        self._live = _Live(backend)
        self._recording: Recording | None = None
        self._hidden_TH: torch.Tensor | None = None

    def run_eagerly(self, meta: LoraMetadata, live: Segments) -> torch.Tensor:
        """The padded forward that capture records, without a graph. Returns `[bucket, H]`."""
        self._live.set(live, meta)
        return self._forward(_Break(self._live, lambda eager: eager(), keep=lambda tensor: tensor))

    def capture(self, recorder: Recorder, meta: LoraMetadata, live: Segments) -> None:
        """Records the forward in parts. `meta` must be the phase's static metadata."""
        self._live.set(live, meta)

        def work(pause: Callable[[Callable[[], None]], None]) -> None:
            # An alias, as in a full graph.
            self._hidden_TH = recorder.alias(self._forward(_Break(self._live, pause, keep=recorder.alias)))

        self._recording = recorder.record_parts(work)

    def replay(self, live: Segments) -> torch.Tensor:
        """Replays on what the static buffers hold and `live`.

        Returns `[bucket, H]`, overwritten by the next replay of any bucket.
        """
        assert self._recording is not None, f"bucket {self._bucket} was not captured"
        self._live.set(live)
        self._recording.replay()
        assert self._hidden_TH is not None
        return self._hidden_TH

    def _forward(self, graph_break: GraphBreak) -> torch.Tensor:
        with forward_context(self._live.context(graph_break)):
            return self._base.hidden_states(self._inputs.ids(self._bucket), self._inputs.positions(self._bucket))


class _Break(GraphBreak):
    """Puts a piece of eager work between two parts. Its tensors belong to the part before it."""

    def __init__(
        self,
        live: _Live,
        pause: Callable[[Callable[[], None]], None],
        keep: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._live = live
        self._pause = pause
        self._keep = keep

    @property
    def segments(self) -> Segments:
        return self._live.segments

    def run(self, work: Callable[..., None], tensors: Sequence[torch.Tensor]) -> None:
        live = self._live
        kept = [self._keep(tensor) for tensor in tensors]

        def eager() -> None:
            # Within the forward around it, or, at a replay, in one of its own.
            with nullcontext() if has_context() else forward_context(live.context()):
                work(live.segments, *kept)

        self._pause(eager)
