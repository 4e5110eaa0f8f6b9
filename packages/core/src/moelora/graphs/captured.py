"""The runner that replays graphs: captures every bucket, admits each batch, and falls back to eager with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from moelora.backends.base import Backend, LoraMetadata
from moelora.batching.packing import pack
from moelora.batching.sequences import Sequence as Tokens
from moelora.capacity import Admission, EagerReason, PrefillCapacity, admit
from moelora.graphs.base import BodyOutput, GraphRunner
from moelora.graphs.breakable import BreakableGraph
from moelora.graphs.buffers import StaticInputs
from moelora.graphs.eager import EagerRunner
from moelora.graphs.full import FullGraph
from moelora.graphs.recorder import Recorder
from moelora.models.base_model import BaseModel
from moelora.models.context import Segments
from moelora.types import BASE_ADAPTER, GraphMode, PackedBatch, Phase, RunMode

WARM_UPS = 2
_TIMED_RUNS = 3
_TYPICAL_TOKENS = 256
_EAGER_WINS = 0.97
"""Share of a replay's time that eager must stay under: within timing noise a graph is the better, for it leaves the
host idle, and its memory is taken anyway."""
_AS_FAST = 1.03
"""Share of a replay's time up to which eager counts as taking the same."""

_GRAPHS: dict[GraphMode, type[FullGraph] | type[BreakableGraph]] = {
    GraphMode.FULL: FullGraph,
    GraphMode.BREAKABLE: BreakableGraph,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTiming:
    """One line of the `auto` table: seconds of one forward at this bucket, eager and replayed."""

    bucket: int
    eager_s: float
    graph_s: float


class CapturedRunner(GraphRunner):
    """Replays graphs of one mode (full or breakable) and one phase. Everything it holds is sized by capacity."""

    def __init__(
        self,
        base: BaseModel,
        backend: Backend,
        phase: Phase,
        *,
        mode: GraphMode,
        capacity: PrefillCapacity,
        buckets: Sequence[int],
        recorder: Recorder,
        has_adapters: bool,
        on_event: Callable[[str], None] = lambda text: None,
    ) -> None:
        assert mode in _GRAPHS, f"no graphs of mode {mode}"
        self.mode = mode
        self.buckets = tuple(sorted(set(buckets)))
        self.capture_seconds = 0.0
        self.capture_bytes = 0
        self.timings: list[BucketTiming] = []
        self._base = base
        self._backend = backend
        self._phase = phase
        self._capacity = capacity
        self._recorder = recorder
        self._has_adapters = has_adapters
        self._say = on_event
        self._inputs = StaticInputs(phase, capacity, base.device)
        self._graphs: dict[tuple[int, bool], FullGraph | BreakableGraph] = {}
        self.eager_buckets: dict[int, int] = {}
        """Buckets that run eagerly because that was measured to be faster, each with the fewest tokens of the batch's
        longest request from which on: 1 is every batch."""

    def capture(self) -> None:
        """Captures all buckets, the largest first, so that smaller ones find room in the shared pool."""
        began = time.monotonic()
        if self._graphs:  # captured before, with other kernels
            self._graphs.clear()
            self._recorder.forget()
        before = _reserved(self._base.device)
        variants = [True, False] if self._has_adapters else [False]
        for number, bucket in enumerate(reversed(self.buckets), start=1):
            self._say(f"capturing {self.mode} graphs: bucket {bucket} ({number} of {len(self.buckets)})")
            for lora in variants:
                self._capture_one(bucket, lora)
        self.capture_seconds = time.monotonic() - began
        self.capture_bytes = _reserved(self._base.device) - before

    @torch.inference_mode()
    def _capture_one(self, bucket: int, lora: bool) -> None:
        # Base rows alone: what capture sees must not matter.
        batch = self._synthetic(bucket)
        meta, live = self._prepare(batch, bucket, lora)
        graph = _GRAPHS[self.mode](self._base, self._backend, self._inputs, bucket)
        for _ in range(WARM_UPS):
            graph.run_eagerly(meta, live)
        graph.capture(self._recorder, meta, live)
        self._graphs[bucket, lora] = graph

    def admit(self, batch: PackedBatch) -> Admission:
        """Whether this batch replays, and which bucket."""
        admission = admit(
            tokens=batch.num_tokens,
            requests=batch.num_sequences,
            mode=self.mode,
            buckets=self.buckets,
            capacity=self._capacity,
        )
        if admission.bucket in self.eager_buckets and max(batch.lengths) >= self.eager_buckets[admission.bucket]:
            return Admission(bucket=None, reason=EagerReason.EAGER_FASTER)
        return admission

    def run(self, batch: PackedBatch) -> BodyOutput:
        admission = self.admit(batch)
        if admission.reason is not None:
            return EagerRunner(self._base, self._backend, self._phase, admission.reason).run(batch)
        assert admission.bucket is not None
        graph, _, live = self._ready(batch, admission.bucket)
        hidden_TH = graph.replay(live)
        return BodyOutput(hidden_TH=hidden_TH[: batch.num_tokens], mode=RunMode(str(self.mode)), admission=admission)

    def run_padded(self, batch: PackedBatch) -> torch.Tensor:
        """The eager run of the same padded batch, for comparison. Returns the live rows `[T, H]`."""
        bucket = self.admit(batch).bucket
        assert bucket is not None, "this batch does not replay"
        graph, meta, live = self._ready(batch, bucket)
        return graph.run_eagerly(meta, live)[: batch.num_tokens]

    @torch.inference_mode()
    def measure(self) -> None:
        """Times replay against eager at every bucket and keeps the clearly faster; the table is in `timings`.

        Where both take the same time, long requests run eagerly if attention then has a faster kernel than a full
        graph, which is captured for requests of any length.
        """
        long = self._backend.long_request_tokens if self.mode is GraphMode.FULL else None
        self.eager_buckets = {}
        for bucket in self.buckets:
            batch = self._synthetic(bucket)
            eager = EagerRunner(self._base, self._backend, self._phase, EagerReason.EAGER_FASTER)
            graph, _, live = self._ready(batch, bucket)
            eager_s, graph_s = _seconds([partial(eager.run, batch), partial(graph.replay, live)], self._base.device)
            timing = BucketTiming(bucket=bucket, eager_s=eager_s, graph_s=graph_s)
            self.timings.append(timing)
            if timing.eager_s < _EAGER_WINS * timing.graph_s:
                self.eager_buckets[bucket] = 1
            elif long is not None and timing.eager_s < _AS_FAST * timing.graph_s:
                self.eager_buckets[bucket] = long

    def _ready(self, batch: PackedBatch, bucket: int) -> tuple[FullGraph | BreakableGraph, LoraMetadata, Segments]:
        """Fills the static buffers with `batch`; returns what reads them: graph, metadata, live segments."""
        lora = self._has_adapters and any(slot >= 0 for slot in batch.slots)
        meta, live = self._prepare(batch, bucket, lora)
        return self._graphs[bucket, lora], meta, live

    def _prepare(self, batch: PackedBatch, bucket: int, lora: bool) -> tuple[LoraMetadata, Segments]:
        live = self._inputs.fill(batch, bucket)
        meta = self._backend.prepare_batch(batch, phase=self._phase, bucket=bucket)
        # The variant decides whether LoRA kernels run: capture records them from base rows too.
        return replace(meta, has_lora=lora), live

    def _synthetic(self, bucket: int) -> PackedBatch:
        """Base rows that fill the bucket with sequences of typical length, within the request slots."""
        slots = self._capacity.request_slots(self.mode)
        count = max(1, min(slots, bucket // _TYPICAL_TOKENS))
        lengths = [bucket // count + (1 if i < bucket % count else 0) for i in range(count)]
        sequences = [
            Tokens(request=i, adapter=BASE_ADAPTER, token_ids=(0,) * n, runs=(), top_k=0) for i, n in enumerate(lengths)
        ]
        return pack(sequences, {}, self._base.device)


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _seconds(works: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """The median of a few runs of each after one that warms up; in turn, for a device slows down as it heats."""

    def once(work: Callable[[], object]) -> float:
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        return time.perf_counter() - began

    rounds = [[once(work) for work in works] for _ in range(1 + _TIMED_RUNS)]
    return [sorted(taken)[_TIMED_RUNS // 2] for taken in zip(*rounds[1:], strict=True)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
