"""Times workloads on one engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moelora.batching.planner import BatchLimits, plan
from moelora.batching.sequences import expand
from moelora.bench.ceilings import Ceilings
from moelora.bench.floor import DecoderShape, floor_seconds
from moelora.bench.parts import busy_seconds, seconds_by_part, top_kernels
from moelora.bench.peer import NAME as PEER
from moelora.bench.peer import TransformersPeer
from moelora.bench.profile import profile_kernels
from moelora.bench.report import OWN, Measurement, Profile
from moelora.bench.workloads import Task, Workload
from moelora.engine import PrefillEngine
from moelora.errors import MoeloraError
from moelora.types import Request, RunMode

_SHOWN_KERNELS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an engine was made with, as far as its measurements name it."""

    backend: str
    graph: str
    adapters: tuple[str, ...]
    rank: int
    beyond_bytes: int
    """Device bytes of weights and slots, which peaks are counted beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How often, and what to compare with."""

    repeat: int
    device: torch.device
    limits: BatchLimits
    shape: DecoderShape
    ceilings: Ceilings

    @property
    def cuda(self) -> bool:
        """Whether memory and kernels can be looked at."""
        return self.device.type == "cuda"


def measure(
    engine: PrefillEngine, setting: Setting, workload: Workload, task: Task, *, mixed: bool, timing: Timing
) -> Measurement:
    """Times one workload: under all adapters of the setting and the base if `mixed`, else under the base alone."""
    requests, call = _work(engine, setting, workload, task, mixed=mixed)
    call()  # compiles, and fills the slots
    before = engine.report()
    call()
    counted = _counted(before, engine.report())
    one = _time(call, OWN, setting, workload, task, requests, timing, mixed=mixed)
    return replace(one, passes=counted.passes, padding_share=counted.padding_share, eager_reasons=counted.eager_reasons)


def add_profile(
    one: Measurement, engine: PrefillEngine, setting: Setting, workload: Workload, task: Task, *, mixed: bool
) -> Measurement:
    """The same measurement, and where the time of one more call goes.

    To be called when all is timed: CUDA's tracing stays in the process, and then a graph of a thousand kernels starts
    1 ms after its call instead of at once, and leaves 0.4 µs between two kernels instead of 0.1.
    """
    _, call = _work(engine, setting, workload, task, mixed=mixed)
    call()  # fills the slots
    return with_profile(one, call)


def _work(
    engine: PrefillEngine, setting: Setting, workload: Workload, task: Task, *, mixed: bool
) -> tuple[list[Request], Callable[[], None]]:
    names = list(setting.adapters) if mixed else []
    requests = workload.requests(task, vocab_size=engine.vocab_size, adapters=names)

    def call() -> None:
        _check(engine.score(requests))

    return requests, call


def measure_peer(
    peer: TransformersPeer, setting: Setting, workload: Workload, task: Task, *, mixed: bool, timing: Timing, vocab: int
) -> Measurement:
    """The same on transformers. vocab: V, for the same prompts."""
    names = list(setting.adapters) if mixed else []
    requests = workload.requests(task, vocab_size=vocab, adapters=names)

    def call() -> None:
        peer.score(requests, task)

    call()
    one = _time(call, PEER, setting, workload, task, requests, timing, mixed=mixed)
    return replace(one, padding_share=peer.padding_share(requests))


def _time(
    call: Callable[[], None],
    engine: str,
    setting: Setting,
    workload: Workload,
    task: Task,
    requests: Sequence[Request],
    timing: Timing,
    *,
    mixed: bool,
) -> Measurement:
    if timing.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(timing.device)
        call()  # takes back from the driver what it was given
    seconds = repeat(call, timing.repeat)
    peak = torch.cuda.max_memory_reserved(timing.device) - setting.beyond_bytes if timing.cuda else None
    return Measurement(
        engine=engine,
        backend=setting.backend,
        graph=setting.graph,
        workload=workload.name,
        task=str(task),
        adapters=len(setting.adapters) if mixed else 0,
        rank=setting.rank,
        loaded=len(setting.adapters),
        prompts=len(requests),
        tokens=sum(len(r.token_ids) for r in requests),
        seconds=seconds,
        floor_s=floor_seconds(timing.shape, batches_of(requests, timing.limits), timing.ceilings),
        memory_bytes=peak,
    )


def repeat(call: Callable[[], None], times: int) -> tuple[float, ...]:
    """Seconds of each call. What it computes must be on the host when it returns."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return tuple(seconds)


def with_profile(one: Measurement, call: Callable[[], None]) -> Measurement:
    """The same measurement, and where the time of one more call went."""
    runs = profile_kernels(call)
    profile = Profile(
        wall_s=one.median_s,
        busy_s=busy_seconds(runs),
        parts=seconds_by_part(runs),
        kernels=top_kernels(runs, _SHOWN_KERNELS),
    )
    return replace(one, profile=profile)


def batches_of(requests: Sequence[Request], limits: BatchLimits) -> list[tuple[list[int], int]]:
    """The batches that the planner makes of some requests, each as its sequences' lengths and its scored rows."""
    sequences = [s for i, request in enumerate(requests) for s in expand(i, request)]
    return [
        ([s.num_tokens for s in batch.sequences], sum(s.num_rows for s in batch.sequences))
        for batch in plan(sequences, limits)
    ]


@dataclass(frozen=True, slots=True)
class _Counted:
    passes: tuple[tuple[RunMode, int | None, int], ...]
    eager_reasons: dict[str, int]
    padding_share: float


def _counted(before: dict[str, Any], after: dict[str, Any]) -> _Counted:
    """What a call added to the engine's counts."""
    passes: Counter[tuple[str, int | None]] = Counter()
    for report, sign in ((after, 1), (before, -1)):
        for entry in report["passes"]:
            passes[entry["mode"], entry["bucket"]] += sign * entry["count"]
    reasons = Counter(after["eager_reasons"])
    reasons.subtract(before["eager_reasons"])
    padded = after["padded_tokens"] - before["padded_tokens"]
    rows = after["tokens"] - before["tokens"] + padded
    return _Counted(
        passes=tuple((RunMode(mode), bucket, n) for (mode, bucket), n in passes.items() if n),
        eager_reasons={reason: n for reason, n in reasons.items() if n},
        padding_share=padded / rows,
    )


def _check(results: list[Any]) -> None:
    """Raises `MoeloraError` if a prompt was not scored: a rate of errors would be no rate."""
    failed = next((r.error for r in results if r.error is not None), None)
    if failed is not None:
        raise MoeloraError(f"a prompt of the workload could not be scored: {failed}")
