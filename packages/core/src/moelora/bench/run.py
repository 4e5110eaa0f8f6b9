"""A whole benchmark: which engines are made, one after the other, and what is timed on each."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from moelora.adapters.base import Adapter
from moelora.batching.planner import BatchLimits
from moelora.bench.ceilings import measure_ceilings
from moelora.bench.dummy_adapters import dummy_adapters
from moelora.bench.floor import decoder_shape
from moelora.bench.measure import Setting, Timing, add_profile, batches_of, measure, measure_peer
from moelora.bench.peer import NAME as PEER
from moelora.bench.peer import TransformersPeer, require_peft
from moelora.bench.report import OWN, BenchReport, Setup
from moelora.bench.workloads import Task, Workload
from moelora.capacity import bucket_for, default_buckets
from moelora.checks import vocab_size_of
from moelora.engine import PrefillEngine
from moelora.environment import freeze_objects, resolve_device
from moelora.errors import ConfigError
from moelora.models.base_model import open_base, resolve_dtype
from moelora.models.catalogue import build_catalogue
from moelora.models.checkpoint import find_model_folder
from moelora.models.experts import moe_shapes
from moelora.options import EngineOptions, batch_limits, choose_backend, derive_capacity
from moelora.types import GraphMode
from moelora.versions import versions
from moelora.wording import counted

_REPORTED = ("moelora", "moelora-kernels", "torch", "transformers", "triton", "peft")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to time. One engine is made for each backend, graph mode, rank and number of adapters.

    adapters: numbers of adapters held; 0 is an engine without LoRA. Each engine also times the same prompts under the
    base alone. layers: cut the config to so many; dummy weights alone. peer: time transformers (with PEFT) too.
    """

    workloads: tuple[Workload, ...]
    tasks: tuple[Task, ...] = (Task.SCORING, Task.PREFILL)
    backends: tuple[str, ...] = ("auto",)
    graphs: tuple[GraphMode, ...] = (GraphMode.AUTO,)
    adapters: tuple[int, ...] = (8,)
    ranks: tuple[int, ...] = (16,)
    repeat: int = 5
    layers: int | None = None
    profile: bool = True
    peer: bool = False


def run_bench(
    model: str | Path,
    bench: BenchOptions,
    options: EngineOptions,
    on_event: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Runs everything that `bench` asks for. `options` says how engines are made, graph mode and backend apart.

    Raises what `PrefillEngine` raises, and `ConfigError` for layers that cannot be cut, prompts beyond the model's
    positions, or a peer that needs PEFT where there is none.
    """
    if bench.peer:
        require_peft(bench.adapters)
    if bench.layers is None:
        return _Bench(model, bench, options, on_event).run()
    with cut_to_layers(find_model_folder(model), bench.layers, options.load_format) as folder:
        return _Bench(folder, bench, options, on_event).run(named=str(model))


@contextmanager
def cut_to_layers(folder: Path, layers: int, load_format: str) -> Iterator[Path]:
    """A folder with the config of a model of fewer layers. Raises `ConfigError` unless weights are dummies."""
    if load_format != "dummy":
        raise ConfigError("only dummy weights can be cut to fewer layers: add --load-format dummy")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    have = text.get("num_hidden_layers")
    if have is None or not 1 <= layers <= have:
        raise ConfigError(f"layers must lie in [1, {have}], the model's own number, got {layers}")
    for key, value in text.items():
        if isinstance(value, list) and len(value) == have:  # one entry per layer, as in layer_types
            text[key] = value[:layers]
    text["num_hidden_layers"] = layers
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(made)


def _check_lengths(workloads: Iterable[Workload], positions: int | None) -> None:
    """Raises `ConfigError` for prompts that the model has no positions for, before anything is timed."""
    for workload in workloads:
        if positions is not None and workload.longest > positions:
            raise ConfigError(
                f"{workload.name} has prompts of up to {workload.longest:,} tokens, and the model {positions:,} "
                "positions; give a smaller --scale, or another --workload"
            )


class _Bench:
    """One benchmark of one model folder."""

    def __init__(
        self, model: str | Path, bench: BenchOptions, options: EngineOptions, say: Callable[[str], None]
    ) -> None:
        self._model = model
        self._bench = bench
        self._options = options
        self._say = say
        self._device = resolve_device(options.device)
        self._source = open_base(model, load_format=options.load_format)
        self._dtype = resolve_dtype(options.dtype, self._source.config, self._device)
        skeleton = self._source.skeleton()
        self._catalogue = build_catalogue(skeleton)
        text_config = self._source.config.get_text_config()
        self._shape = decoder_shape(
            text_config, self._catalogue, moe_shapes(skeleton, text_config, {}), self._dtype.itemsize
        )
        self._layers = text_config.num_hidden_layers
        _check_lengths(bench.workloads, getattr(text_config, "max_position_embeddings", None))

    def run(self, named: str | None = None) -> BenchReport:
        """Everything, in order. named: what the report calls the model."""
        self._say("measuring the device's ceilings")
        report = BenchReport(
            model=named or str(self._model),
            architecture=self._source.architecture.model_type,
            layers=self._layers,
            dtype=str(self._dtype).removeprefix("torch."),
            device=str(self._device),
            device_name=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU",
            max_tokens=self._options.max_tokens or 0,
            versions={name: found for name, found in versions(_REPORTED).items() if found is not None},
            ceilings=measure_ceilings(self._device, self._dtype),
        )
        settings = self._adapter_settings()
        engines = len(settings) * (len(self._bench.backends) * len(self._bench.graphs) + bool(self._bench.peer))
        if self._profiles and engines > 1:
            report.notes.append(
                "the profiler stays in the process: engines behind the first start graphs up to 1 ms late; "
                "--no-profile compares short requests without it"
            )
        for backend in self._bench.backends:
            for graph in self._bench.graphs:
                for count, rank in self._adapter_settings():
                    what = f"moelora {backend}, graph {graph}, {counted(count, 'adapter')} of rank {rank}"
                    self._attempt(report, what, partial(self._time_engine, report, backend, graph, count, rank))
        if self._bench.peer:
            for count, rank in self._adapter_settings():
                what = f"transformers, {counted(count, 'adapter')} of rank {rank}"
                self._attempt(report, what, partial(self._time_peer, report, count, rank))
        return report

    def _adapter_settings(self) -> list[tuple[int, int]]:
        """Numbers of adapters and their ranks; without adapters there is but one."""
        return list(dict.fromkeys((n, r if n else 0) for r in self._bench.ranks for n in self._bench.adapters))

    def _attempt(self, report: BenchReport, what: str, work: Callable[[], None]) -> None:
        """Does `work`, or notes that there was no memory for it; either way the memory is free afterwards."""
        try:
            work()
        except torch.OutOfMemoryError:
            report.notes.append(f"{what}: out of device memory, left out")
            self._say(report.notes[-1])
        _free_memory(self._device)

    def _time_engine(self, report: BenchReport, backend: str, graph: GraphMode, count: int, rank: int) -> None:
        adapters = self._adapters(count, rank)
        options = replace(self._options, backend=backend, graph=graph, slots=max(count, 1))
        limits = self._limits(options, adapters)
        options = replace(options, buckets=self._buckets(limits, list(adapters)))
        self._say(f"making an engine: backend {backend}, graph {graph}, {counted(count, 'adapter')} of rank {rank}")
        began = time.perf_counter()
        engine = PrefillEngine(self._model, adapters=adapters, options=options, on_event=self._say)
        setup_s = time.perf_counter() - began
        freeze_objects()
        facts = engine.report()
        setup = Setup(
            engine=OWN,
            backend=facts["backend"],
            graph=str(graph),
            adapters=count,
            rank=rank,
            seconds=setup_s,
            weight_bytes=facts["weight_bytes"],
            slot_bytes=facts["bytes_per_slot"] * engine.slots,
            report=facts,
        )
        report.setups.append(setup)
        pool_bytes = _distinct_bytes(adapters)
        setting = Setting(
            backend=setup.backend,
            graph=setup.graph,
            adapters=tuple(adapters),
            rank=rank,
            beyond_bytes=setup.weight_bytes + setup.slot_bytes + pool_bytes,
        )
        timed = []
        for workload, task, mixed in self._cases("timing", count):
            timing = self._timing(report, limits)
            timed.append(measure(engine, setting, workload, task, mixed=mixed, timing=timing))
        if self._profiles:
            cases = self._cases("looking into", count)
            timed = [
                add_profile(one, engine, setting, workload, task, mixed=mixed)
                for one, (workload, task, mixed) in zip(timed, cases, strict=True)
            ]
        report.measurements += timed

    @property
    def _profiles(self) -> bool:
        return self._bench.profile and self._device.type == "cuda"

    def _time_peer(self, report: BenchReport, count: int, rank: int) -> None:
        self._say(f"loading transformers{' with PEFT' if count else ''}")
        began = time.perf_counter()
        peer = TransformersPeer(
            self._source,
            self._catalogue,
            device=self._device,
            dtype=self._dtype,
            rank=rank,
            max_tokens=self._options.max_tokens or 0,
            seed=self._options.seed,
        )
        setup = Setup(
            engine=PEER,
            backend="peft" if count else "none",
            graph=str(GraphMode.OFF),
            adapters=count,
            rank=rank,
            seconds=time.perf_counter() - began,
            weight_bytes=peer.weight_bytes,
            slot_bytes=0,
            report={},
        )
        report.setups.append(setup)
        setting = Setting(
            backend=setup.backend,
            graph=setup.graph,
            adapters=tuple(f"dummy-{i}" for i in range(count)),
            rank=rank,
            beyond_bytes=setup.weight_bytes,
        )
        limits = self._limits(self._options, {})
        vocab = vocab_size_of(self._source.config.get_text_config())
        for workload, task, mixed in self._cases("timing", count):
            one = measure_peer(
                peer, setting, workload, task, mixed=mixed, timing=self._timing(report, limits), vocab=vocab
            )
            report.measurements.append(one)

    def _cases(self, doing: str, count: int) -> Iterator[tuple[Workload, Task, bool]]:
        """What is timed on each engine: workload, task, and whether under its adapters or the base alone.

        doing: in the words that say so.
        """
        for workload in self._bench.workloads:
            for task in self._bench.tasks:
                for mixed in (False, True) if count else (False,):
                    self._say(f"{doing} {workload.name}, {task}, {'adapters' if mixed else 'base'}")
                    yield workload, task, mixed

    def _timing(self, report: BenchReport, limits: BatchLimits) -> Timing:
        return Timing(
            repeat=self._bench.repeat,
            device=self._device,
            limits=limits,
            shape=self._shape,
            ceilings=report.ceilings,
        )

    def _adapters(self, count: int, rank: int) -> dict[str, Adapter]:
        if not count:
            return {}
        return dummy_adapters(
            self._catalogue, count=count, rank=rank, device=self._device, dtype=self._dtype, seed=self._options.seed
        )

    def _limits(self, options: EngineOptions, adapters: dict[str, Adapter]) -> BatchLimits:
        capacity = derive_capacity(
            options,
            self._device,
            packs=self._source.architecture.packs,
            adapters=adapters.values(),
            backend=choose_backend(options, self._device).capabilities,
        )
        return batch_limits(capacity)

    def _buckets(self, limits: BatchLimits, names: list[str]) -> tuple[int, ...]:
        """Those of the default buckets that the workloads fall into: the others would be captured for nothing."""
        if self._options.buckets is not None:
            return self._options.buckets
        buckets = default_buckets(limits.max_tokens)
        used = set()
        for workload in self._bench.workloads:
            for adapters in ([], names):
                requests = workload.requests(Task.PREFILL, vocab_size=2, adapters=adapters)
                used |= {bucket_for(sum(lengths), buckets) for lengths, _ in batches_of(requests, limits)}
        return tuple(sorted(bucket for bucket in used if bucket is not None)) or buckets[-1:]


def _distinct_bytes(adapters: dict[str, Adapter]) -> int:
    """Bytes of the storages that adapters are views of."""
    storages = {}
    for adapter in adapters.values():
        for factors in adapter.factors.values():
            for tensor in (factors.a, factors.b):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def _free_memory(device: torch.device) -> None:
    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
