"""Breakable graphs: the body in segments that end at every attention or other token mixer, which runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from moelora.backends.base import Backend, LoraMetadata
from moelora.graphs.buffers import StaticInputs
from moelora.graphs.recorder import Recorder, Recording
from moelora.models.base_model import BaseModel
from moelora.models.context import ForwardContext, GraphBreak, Segments, forward_context, has_context


class BreakableGraph:
    """One bucket and one variant, with or without LoRA. Token mixers read `live` at replay, never what capture saw."""

    def __init__(self, base: BaseModel, backend: Backend, inputs: StaticInputs, bucket: int) -> None:
        self._base = base
        self._backend = backend
        self._inputs = inputs
        self._bucket = bucket
        self._live: Segments | None = None
        self._meta: LoraMetadata | None = None
        self._recording: Recording | None = None
        self._hidden_TH: torch.Tensor | None = None

    def run_eagerly(self, meta: LoraMetadata, live: Segments) -> torch.Tensor:
        """The padded forward that capture records, without a graph. Returns `[bucket, H]`."""
        self._live, self._meta = live, meta
        return self._forward(_Break(self, lambda eager: eager(), keep=lambda tensor: tensor))

    def capture(self, recorder: Recorder, meta: LoraMetadata, live: Segments) -> None:
        """Records the forward in parts. `meta` must be the phase's static metadata."""
        self._live, self._meta = live, meta

        def work(pause: Callable[[Callable[[], None]], None]) -> None:
            # An alias, as in a full graph.
            self._hidden_TH = recorder.alias(self._forward(_Break(self, pause, keep=recorder.alias)))

        self._recording = recorder.record_parts(work)

    def replay(self, live: Segments) -> torch.Tensor:
        """Replays on what the static buffers hold and `live`.

        Returns `[bucket, H]`, overwritten by the next replay of any bucket.
        """
        assert self._recording is not None, f"bucket {self._bucket} was not captured"
        self._live = live
        self._recording.replay()
        assert self._hidden_TH is not None
        return self._hidden_TH

    def _forward(self, graph_break: GraphBreak) -> torch.Tensor:
        with forward_context(self._context(graph_break)):
            return self._base.hidden_states(self._inputs.ids(self._bucket), self._inputs.positions(self._bucket))

    def _context(self, graph_break: GraphBreak | None = None) -> ForwardContext:
        assert self._meta is not None, f"bucket {self._bucket} has seen no batch"
        return ForwardContext(backend=self._backend, meta=self._meta, segments=self.live, graph_break=graph_break)

    def between_parts(self) -> AbstractContextManager[None]:
        """What an eager piece runs in: the forward around it, or, at a replay, one of its own."""
        return nullcontext() if has_context() else forward_context(self._context())

    @property
    def live(self) -> Segments:
        """Where the sequences of the batch lie now."""
        assert self._live is not None, f"bucket {self._bucket} has seen no batch"
        return self._live


class _Break(GraphBreak):
    """Puts a piece of eager work between two parts. Its tensors belong to the part before it."""

    def __init__(
        self,
        graph: BreakableGraph,
        pause: Callable[[Callable[[], None]], None],
        keep: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._graph = graph
        self._pause = pause
        self._keep = keep

    @property
    def segments(self) -> Segments:
        return self._graph.live

    def run(self, work: Callable[..., None], tensors: Sequence[torch.Tensor]) -> None:
        graph = self._graph
        kept = [self._keep(tensor) for tensor in tensors]

        def eager() -> None:
            with graph.between_parts():
                work(graph.live, *kept)

        self._pause(eager)
