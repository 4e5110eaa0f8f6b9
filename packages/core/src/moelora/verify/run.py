"""The whole comparison: sample, engine, reference. The engine is gone before the reference is loaded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from moelora.engine import EngineOptions, PrefillEngine
from moelora.environment import resolve_device
from moelora.jobs.rows import Row
from moelora.jobs.run import JobOptions, PrefillJob
from moelora.jobs.stats import JobStats
from moelora.jobs.text import TextEncoder
from moelora.models.base_model import open_base, resolve_dtype
from moelora.models.catalogue import build_catalogue
from moelora.types import Result
from moelora.verify.compare import Comparison, Tolerance
from moelora.verify.reference import Reference, ReferenceChoice, ReferenceKind, choose_reference, require_peft
from moelora.verify.sample import Sample, take_sample
from moelora.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `verify` found. stats: what was read, rows that cannot be scored included."""

    comparisons: tuple[Comparison, ...]
    tolerance: Tolerance
    dtype: str
    device: str
    stats: JobStats

    @property
    def failed(self) -> list[str]:
        """The adapters whose difference exceeds the tolerance."""
        return [one.adapter for one in self.comparisons if not self.tolerance.admits(one)]


def verify(
    model: str | Path,
    rows: Iterable[Row],
    encoder: TextEncoder,
    *,
    adapters: Mapping[str, Path],
    options: EngineOptions,
    job_options: JobOptions,
    sample: int = 8,
    tolerance: float | None = None,
    on_event: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Compares the engine with transformers + PEFT on up to `sample` rows of each adapter and of the base.

    tolerance: in nats, None for that of the dtype. Raises what the engine raises at construction, `ConfigError` without
    PEFT where it is needed, `InputError` for an input of which no row can be scored.
    """
    device = resolve_device(options.device)
    source = open_base(model, load_format=options.load_format)
    dtype = resolve_dtype(options.dtype, source.config, device)
    catalogue = build_catalogue(source.skeleton())
    layout = options.lora_b_layout
    choices = {name: choose_reference(path, catalogue, lora_b_layout=layout) for name, path in adapters.items()}
    require_peft(choices)

    taken, ours, stats = _score_with_engine(
        PrefillEngine(model, adapters=adapters, options=options, on_event=on_event),
        rows,
        encoder,
        job_options,
        sample,
        on_event,
    )
    _release(device)

    reference = Reference(source, catalogue, device=device, dtype=dtype, lora_b_layout=layout, seed=options.seed)
    comparisons = []
    for name, places in _by_adapter(taken).items():
        on_event(f"scoring {counted(len(places), 'request')} of {name} with the reference")
        requests = [taken.requests[i] for i in places]
        choice = choices.get(name, ReferenceChoice(kind=ReferenceKind.PLAIN))
        theirs, used = reference.score(name, adapters.get(name), choice, requests)
        notes = [used.reason] if used.reason else []
        notes += ["no row names it: compared on rows of others"] if name in taken.borrowed else []
        found = Comparison(adapter=name, reference=str(used.kind), note="; ".join(notes))
        for place, other in zip(places, theirs, strict=True):
            found.add(taken.lines[place], ours[place], other)
        comparisons.append(found)
    return Verdict(
        comparisons=tuple(comparisons),
        tolerance=Tolerance.of(dtype, tolerance),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        stats=stats,
    )


def _score_with_engine(
    engine: PrefillEngine,
    rows: Iterable[Row],
    encoder: TextEncoder,
    job_options: JobOptions,
    size: int,
    on_event: Callable[[str], None],
) -> tuple[Sample, list[Result], JobStats]:
    """The sample and its results, neighbours of different adapters in one batch. Nothing returned holds the engine."""
    job = PrefillJob(engine, encoder, job_options)
    numbered = ((row.line, request) for row, request in job.requests(rows))
    taken = take_sample(numbered, engine.adapter_names, size)
    on_event(f"scoring {counted(len(taken.requests), 'request')} in mixed batches")
    order = _mixed_order(taken)
    scored = engine.score([taken.requests[i] for i in order])
    results = dict(zip(order, scored, strict=True))
    return taken, [results[i] for i in range(len(order))], job.stats


def _by_adapter(taken: Sample) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for place, request in enumerate(taken.requests):
        places.setdefault(request.adapter, []).append(place)
    return places


def _mixed_order(taken: Sample) -> list[int]:
    """The first request of every adapter, then the second of every one, …: neighbours in a batch differ."""
    ranked = [(rank, place) for places in _by_adapter(taken).values() for rank, place in enumerate(places)]
    return [place for _, place in sorted(ranked)]


def _release(device: torch.device) -> None:
    """Gives the engine's memory back: the reference needs it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
