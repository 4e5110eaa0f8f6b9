"""Which runner a run gets: the mode that was asked for, or the next one that works, with what was in the way."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moelora.backends.base import Backend
from moelora.capacity import EagerReason, PrefillCapacity, graphs_blocked
from moelora.graphs.base import GraphRunner
from moelora.graphs.captured import CapturedRunner
from moelora.graphs.eager import EagerRunner
from moelora.graphs.recorder import CudaRecorder, Recorder
from moelora.models.architecture import Architecture
from moelora.models.base_model import BaseModel
from moelora.types import GraphMode, Phase

FALLBACKS = {
    GraphMode.AUTO: (GraphMode.FULL, GraphMode.BREAKABLE),
    GraphMode.FULL: (GraphMode.FULL, GraphMode.BREAKABLE),
    GraphMode.BREAKABLE: (GraphMode.BREAKABLE,),
}
"""The modes to try, in order, by the mode that was asked for."""


def allows(architecture: Architecture, mode: GraphMode) -> bool:
    """Whether the structure of a model leaves a mode at all; whether capture succeeds, only a run tells."""
    return mode is not GraphMode.FULL or not architecture.loops


def first_mode(
    wanted: GraphMode,
    *,
    device: torch.device,
    architecture: Architecture,
    has_replacements: bool,
    modes: Collection[GraphMode],
) -> tuple[GraphMode, EagerReason | None]:
    """The mode that is captured first, or OFF with the reason. modes: what the backend supports."""
    blocked = graphs_blocked(
        mode=wanted,
        has_graph_device=device.type == "cuda",
        packs=architecture.packs,
        has_replacements=has_replacements,
        graph_modes=modes,
    )
    if blocked is not None:
        return GraphMode.OFF, blocked
    possible = [mode for mode in FALLBACKS[wanted] if mode in modes and allows(architecture, mode)]
    return (possible[0], None) if possible else (GraphMode.OFF, EagerReason.ARCHITECTURE_NOT_CAPTURABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The runner, ready to run, and why it is not of a mode further up."""

    runner: GraphRunner
    notes: tuple[str, ...] = ()

    def report(self) -> dict[str, Any]:
        """For the report: mode, buckets, cost of capture, the `auto` table, and the notes."""
        if not isinstance(self.runner, CapturedRunner):
            return {"mode": "off", "notes": list(self.notes)}
        return {
            "mode": str(self.runner.mode),
            "buckets": list(self.runner.buckets),
            "capture_seconds": self.runner.capture_seconds,
            "capture_bytes": self.runner.capture_bytes,
            "timings": [{"bucket": t.bucket, "eager_s": t.eager_s, "graph_s": t.graph_s} for t in self.runner.timings],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerRequest:
    """What a runner is made for."""

    base: BaseModel
    backend: Backend
    phase: Phase
    mode: GraphMode
    capacity: PrefillCapacity
    buckets: Sequence[int]
    has_adapters: bool
    has_replacements: bool
    on_event: Callable[[str], None] = field(default=lambda text: None)


def select_runner(wanted: RunnerRequest, make_recorder: Callable[[torch.device], Recorder] = CudaRecorder) -> Selection:
    """Captures the first mode that works, from the one asked for down to eager. Never silent about a step down."""
    reason = _blocked(wanted, make_recorder)
    if reason is not None:
        asked = wanted.mode in (GraphMode.FULL, GraphMode.BREAKABLE)
        notes_of_reason = (f"no {wanted.mode} graphs: {reason.text}",) if asked else ()
        for note in notes_of_reason:
            wanted.on_event(note)
        return Selection(runner=_eager(wanted, reason), notes=notes_of_reason)
    notes: list[str] = []
    for mode in FALLBACKS[wanted.mode]:
        if mode not in wanted.backend.capabilities.graph_modes:
            notes.append(f"backend {wanted.backend.capabilities.name} does not support {mode} graphs")
            continue
        if not allows(wanted.base.architecture, mode):
            looped = ", ".join(wanted.base.architecture.looped)
            notes.append(f"no {mode} graphs: {looped} is called once per request, between the parts of a graph")
            continue
        runner = CapturedRunner(
            wanted.base,
            wanted.backend,
            wanted.phase,
            mode=mode,
            capacity=wanted.capacity,
            buckets=wanted.buckets,
            recorder=make_recorder(wanted.base.device),
            has_adapters=wanted.has_adapters,
            on_event=wanted.on_event,
        )
        try:
            runner.capture()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            notes.append(f"{mode} graphs cannot be captured: {_where(error)}: {_what(error)}")
            wanted.on_event(notes[-1])
            continue
        if wanted.mode is GraphMode.AUTO:
            runner.measure()
        return Selection(runner=runner, notes=tuple(notes))
    return Selection(runner=_eager(wanted, EagerReason.ARCHITECTURE_NOT_CAPTURABLE), notes=tuple(notes))


def _blocked(wanted: RunnerRequest, make_recorder: Callable[[torch.device], Recorder]) -> EagerReason | None:
    return graphs_blocked(
        mode=wanted.mode,
        has_graph_device=make_recorder is not CudaRecorder or wanted.base.device.type == "cuda",
        packs=wanted.base.architecture.packs,
        has_replacements=wanted.has_replacements,
        graph_modes=wanted.backend.capabilities.graph_modes,
    )


def _eager(wanted: RunnerRequest, reason: EagerReason) -> EagerRunner:
    return EagerRunner(wanted.base, wanted.backend, wanted.phase, reason)


def _where(error: BaseException) -> str:
    """The innermost frame outside torch: what in the model or in a kernel cannot be captured."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else "unknown place"


def _what(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
