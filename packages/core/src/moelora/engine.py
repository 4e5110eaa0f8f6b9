"""`PrefillEngine`: the one place where the rooms meet. Loads base and adapters once, then scores batch by batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from moelora.adapters.bank import AdapterBank, BankLayout
from moelora.adapters.base import Adapter, Catalogue, check_fits
from moelora.adapters.host import HostAdapters
from moelora.adapters.loader import load_adapter
from moelora.adapters.residency import LOOK_AHEAD, Placement, Residency
from moelora.backends.base import DenseSlots, RowScores
from moelora.batching.packing import pack
from moelora.batching.planner import PlannedBatch, plan
from moelora.batching.sequences import NO_TARGET
from moelora.batching.sequences import Sequence as Tokens
from moelora.batching.slots import look_ahead
from moelora.capacity import EagerReason
from moelora.checks import check_request, count_tokens
from moelora.environment import free_host_memory, resolve_device
from moelora.errors import AdapterError, CheckpointError, RequestError
from moelora.graphs.captured import CapturedRunner
from moelora.graphs.eager import EagerRunner
from moelora.graphs.select import RunnerRequest, Selection, select_runner
from moelora.models.base_model import BaseSource, load_base, open_base, resolve_dtype
from moelora.models.catalogue import build_catalogue
from moelora.models.experts import moe_shapes
from moelora.models.lora import install_lora
from moelora.models.substitutes import Substitutes, install_substitutes
from moelora.options import (
    WINDOW_REQUESTS,
    EngineOptions,
    batch_limits,
    choose_backend,
    derive_buckets,
    derive_capacity,
)
from moelora.scoring.head import ScoringHead
from moelora.scoring.results import ResultBuilder
from moelora.types import BASE_ADAPTER, BASE_SLOT, Phase, Request, Result, RunMode
from moelora.versions import versions

_REPORTED = ("moelora", "moelora-kernels", "torch", "transformers", "triton", "safetensors")
"""Packages that shape a result."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """Where the adapters of a batch lie, and those of the batches behind it."""

    placement: Placement
    upcoming: Sequence[Placement]


class PrefillEngine:
    """One base model, its adapters, and the means to score requests under any of them.

    >>> engine = PrefillEngine("examples/tiny-moe", adapters={"python": "examples/tiny-moe/adapters/python"})
    >>> result = engine.score([Request(token_ids=[5, 6, 7], adapter="python")])[0]

    An adapter is a path, or an `Adapter` in canonical form that is in memory already. Raises `CheckpointError`,
    `AdapterError` or `ConfigError` at construction, before any work. Threads may share an engine: their batches take
    turns.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapters: Mapping[str, str | Path | Adapter] | None = None,
        options: EngineOptions = EngineOptions(),
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        say = self._say = on_event or (lambda text: None)
        self.options = options
        self._device = resolve_device(options.device)
        self._lock = RLock()
        torch.manual_seed(options.seed)
        self._backend = choose_backend(options, self._device)
        source = open_base(model, load_format=options.load_format)
        self._catalogue = build_catalogue(source.skeleton())
        # Adapters come first: a bad one is refused before minutes are spent on the base.
        self._adapters = self._load_adapters(adapters or {}, source, say)
        say(f"loading base model {model}")
        self._base = load_base(source, device=self._device, dtype=options.dtype)
        self._capacity = derive_capacity(
            options,
            self._device,
            packs=self._base.architecture.packs,
            adapters=self._adapters.values(),
            backend=self._backend.capabilities,
        )
        self._prepare_backend()
        # Before LoRA is hooked in: a substitute is compared with the bare module.
        ops = self._backend.fused_ops
        self._substitutes = (
            install_substitutes(self._base.causal_lm, ops, self._base.dtype, self._device) if ops else Substitutes()
        )
        self._bank = AdapterBank(
            self._catalogue,
            BankLayout.of(self._adapters.values()),
            slots=self._capacity.bank_slots,
            device=self._device,
            dtype=self._base.dtype,
        )
        if self._device.type == "cuda" and len(self._adapters) > self._bank.num_slots:
            self._adapters.pin()  # they take turns in the slots, and are copied while batches run
        self._residency = Residency(self._adapters, self._bank)
        self._installed = install_lora(self._base.causal_lm, self._catalogue, self._bank)
        self._head = self._make_head()
        self._passes: Counter[tuple[RunMode, int | None]] = Counter()
        self._eager_reasons: Counter[EagerReason] = Counter()
        self._tokens = 0
        self._memory_splits = 0
        self._padded_tokens = 0
        self._check_installed()
        self._selection = self._select_runner(say)
        self._runner = self._selection.runner

    # What the engine knows of itself.

    @property
    def model_config(self) -> Any:
        """The transformers config of the base."""
        return self._base.config

    @property
    def vocab_size(self) -> int:
        """V: token ids lie in [0, V)."""
        return self._base.text_config.vocab_size

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model has positions for; None if the config names no limit."""
        return getattr(self._base.text_config, "max_position_embeddings", None)

    @property
    def adapter_names(self) -> list[str]:
        """Names that a request may use besides `__base__`."""
        return list(self._adapters)

    @property
    def slots(self) -> int:
        """Adapters that lie on the device at once."""
        return self._bank.num_slots

    @property
    def eager_buckets(self) -> list[int]:
        """Buckets that `--graph auto` runs eagerly. Set it to what another process measured, for the same bits."""
        return sorted(self._runner.eager_buckets) if isinstance(self._runner, CapturedRunner) else []

    @eager_buckets.setter
    def eager_buckets(self, buckets: Iterable[int]) -> None:
        if isinstance(self._runner, CapturedRunner):
            self._runner.eager_buckets = frozenset(buckets)

    @property
    def catalogue(self) -> Catalogue:
        """The targets of the base."""
        return self._catalogue

    def check(self, request: Request) -> str | None:
        """Why a request cannot be scored, or None if it can. Whatever a caller put into it, nothing is raised."""
        return check_request(
            request, adapters=self._adapters, vocab_size=self.vocab_size, max_positions=self.max_positions
        )

    def score(self, requests: Iterable[Request], on_progress: Callable[[int, int], None] | None = None) -> list[Result]:
        """Scores all requests; results in the order of the requests. Raises `RequestError` for a bad one.

        `on_progress(done, total)` is called after every batch.
        """
        requests = list(requests)
        for i, request in enumerate(requests):
            reason = self.check(request)
            if reason:
                raise RequestError(f"request {i}: {reason}")
        results: dict[int, Result] = {}
        for index, result in self.score_stream(requests):
            results[index] = result
            if on_progress is not None:
                on_progress(len(results), len(requests))
        return [results[i] for i in range(len(requests))]

    def score_stream(self, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
        """Yields (index, result) as batches finish, in any order. A bad request yields a result with `error`."""
        numbered = enumerate(requests)
        while window := list(islice(numbered, WINDOW_REQUESTS)):
            builders: dict[int, ResultBuilder] = {}
            for index, request in window:
                reason = self.check(request)
                if reason:
                    yield index, Result(num_tokens=count_tokens(request), error=reason)
                else:
                    builders[index] = ResultBuilder(index, request)
            sequences = [s for builder in builders.values() for s in builder.sequences]
            placed = ((batch, self._place(batch)) for batch in plan(sequences, batch_limits(self._capacity)))
            for (batch, placement), following in look_ahead(placed, LOOK_AHEAD):
                turn = _Turn(placement, [later for _, later in following])
                yield from self._score_or_split(batch, turn, builders)

    def report(self) -> dict[str, Any]:
        """Counts since construction, and what ran where. All values are JSON types."""
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
        return {
            "model": str(self._base.folder),
            "architecture": self._base.architecture.model_type,
            "packed": self._base.architecture.packs,
            "packing_reason": self._base.architecture.reason,
            "device": str(self._device),
            "dtype": str(self._base.dtype).removeprefix("torch."),
            "backend": self._backend.capabilities.name,
            "graph": str(self.options.graph),
            "graphs": self._selection.report(),
            "substitutes": self._substitutes.report(),
            "fused_head": self._head.fused,
            "batch_invariant": self.options.batch_invariant,
            "passes": [
                {"phase": str(Phase.PREFILL), "mode": str(mode), "bucket": bucket, "count": count}
                for (mode, bucket), count in sorted(self._passes.items(), key=str)
            ],
            "eager_reasons": {str(reason): count for reason, count in self._eager_reasons.items()},
            "tokens": self._tokens,
            "memory_splits": self._memory_splits,
            "padded_tokens": self._padded_tokens,
            "padding_share": self._padded_tokens / max(self._tokens + self._padded_tokens, 1),
            "adapters": len(self._adapters),
            "adapters_kept_on_host": self._adapters.kept,
            "adapter_loads": self._bank.loads,
            "slots": self._capacity.slots,
            "max_tokens": self._capacity.max_tokens,
            "max_requests": self._capacity.max_requests,
            "bytes_per_slot": self._bank.layout.bytes_per_slot(self._catalogue, self._base.dtype),
            "weight_bytes": self._base.nbytes,
            "peak_device_bytes": peak,
            "score_chunk_rows": self._head.chunk_rows(),
            "skipped_checkpoint_tensors": len(self._base.skipped),
            "versions": {name: found for name, found in versions(_REPORTED).items() if found is not None},
        }

    # Construction.

    def _load_adapters(
        self, given: Mapping[str, str | Path | Adapter], source: BaseSource, say: Callable[[str], None]
    ) -> HostAdapters:
        sources: dict[str, Path | Adapter] = {}
        for name, one in given.items():
            if name == BASE_ADAPTER or not name:
                raise AdapterError(f"an adapter cannot be called {name!r}")
            if isinstance(one, Adapter):
                check_fits(one, self._catalogue)
                sources[name] = replace(one, name=name)  # residents of the bank are known by it
            else:
                sources[name] = Path(one)
        dtype = resolve_dtype(self.options.dtype, source.config, self._device)
        budget = self.options.host_bytes
        if budget is None and (free := free_host_memory()) is not None:
            budget = free // 2

        def load(name: str, path: Path) -> Adapter:
            return load_adapter(
                path,
                name=name,
                catalogue=self._catalogue,
                dtype=dtype,
                base_weight=source.stored_tensor,
                lora_b_layout=self.options.lora_b_layout,
            )

        return HostAdapters(sources, load, budget=budget, say=say)

    def _prepare_backend(self) -> None:
        self._backend.init_graph_metadata(Phase.PREFILL, self._capacity, self._device)
        shapes = moe_shapes(self._base.causal_lm, self._base.text_config, self._ranks())
        if shapes:
            self._backend.init_moe_buffers(Phase.PREFILL, self._capacity, self._device, self._base.dtype, shapes)

    def _make_head(self) -> ScoringHead:
        slots = self._bank.slots.get("lm_head")
        assert slots is None or isinstance(slots, DenseSlots)
        return ScoringHead(
            self._base,
            self._backend,
            chunk_rows=self.options.score_chunk_rows,
            slots=slots,
            replaced="lm_head" in self._bank.layout.replaced,
        )

    def _ranks(self) -> dict[str, int]:
        """The largest rank by target."""
        return dict(BankLayout.of(self._adapters.values()).ranks)

    def _select_runner(self, say: Callable[[str], None]) -> Selection:
        return select_runner(
            RunnerRequest(
                base=self._base,
                backend=self._backend,
                phase=Phase.PREFILL,
                mode=self.options.graph,
                capacity=self._capacity,
                buckets=derive_buckets(self.options, self._capacity),
                has_adapters=bool(self._adapters),
                has_replacements=bool(self._bank.layout.replaced),
                on_event=say,
            )
        )

    def _check_installed(self) -> None:
        """One tiny base-only batch: shows that the model runs and that it reaches every adapted target."""
        probe = Tokens(request=0, adapter=BASE_ADAPTER, token_ids=(0, 0), rows=(), top_k=0)
        eager = EagerRunner(self._base, self._backend, Phase.PREFILL, EagerReason.GRAPH_OFF)
        try:
            with torch.inference_mode():
                hidden_TH = eager.run(pack([probe], {}, self._device)).hidden_TH
                self._head.logits(hidden_TH[-1:], torch.tensor([BASE_SLOT], dtype=torch.int32))
                self._head.recognise(hidden_TH)
        except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError) as error:
            model_type = self._base.architecture.model_type
            raise CheckpointError(f"moelora cannot run {model_type} ({type(error).__name__}: {error})") from error
        self._installed.check_all_called()

    # Scoring.

    def _place(self, planned: PlannedBatch) -> Placement:
        with self._lock:
            return self._residency.place(planned)

    def _score_or_split(
        self, planned: PlannedBatch, turn: _Turn, builders: dict[int, ResultBuilder]
    ) -> Iterator[tuple[int, Result]]:
        """Halves a batch that does not fit into memory until it does; a single sequence that does not is an error."""
        try:
            finished = self._score_batch(planned, turn, builders)
        except torch.OutOfMemoryError:
            finished = None
        if finished is not None:
            yield from finished
            return
        # Outside the except block, whose traceback would keep the failed batch's tensors alive.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._memory_splits += 1
        sequences = planned.sequences
        if len(sequences) == 1:
            index, tokens = sequences[0].request, sequences[0].num_tokens
            if builders.pop(index, None) is not None:  # once, however many of its sequences fail
                yield index, Result(num_tokens=tokens, error=f"out of device memory at {tokens} tokens in one sequence")
            return
        self._say(f"out of device memory with {len(sequences)} sequences; going on with half of them at a time")
        middle = len(sequences) // 2
        for half in (sequences[:middle], sequences[middle:]):
            yield from self._score_or_split(replace(planned, sequences=half), turn, builders)

    def _score_batch(
        self, planned: PlannedBatch, turn: _Turn, builders: dict[int, ResultBuilder]
    ) -> list[tuple[int, Result]]:
        # Slots, static buffers and the model's modules belong to one batch at a time.
        with self._lock, torch.inference_mode():
            self._residency.bring(turn.placement)
            try:
                return self._score_resident(planned.sequences, turn, builders)
            finally:
                self._residency.release(turn.placement)

    def _score_resident(
        self, sequences: Sequence[Tokens], turn: _Turn, builders: dict[int, ResultBuilder]
    ) -> list[tuple[int, Result]]:
        batch = pack(sequences, turn.placement, self._device)
        output = self._runner.run(batch)
        # The body is queued, and the host waits for its scores below: time to copy what comes next.
        self._residency.prefetch(turn.placement, turn.upcoming)
        self._passes[output.mode, output.admission.bucket] += 1
        if output.admission.reason is not None:
            self._eager_reasons[output.admission.reason] += 1
        self._tokens += batch.num_tokens
        if output.admission.bucket is not None:
            self._padded_tokens += output.admission.bucket - batch.num_tokens
        scores = self._score_rows(sequences, batch.slots, output.hidden_TH)
        finished = []
        first = first_open = 0
        for sequence in sequences:
            builder = builders.get(sequence.request)
            result = builder.add(sequence, scores, first, first_open, output.mode) if builder is not None else None
            first += len(sequence.rows)
            first_open += sum(row.target == NO_TARGET for row in sequence.rows)
            if result is not None:
                finished.append((sequence.request, result))
        return finished

    def _score_rows(self, sequences: Sequence[Tokens], slots: tuple[int, ...], hidden_TH: torch.Tensor) -> RowScores:
        positions, targets, row_slots = [], [], []
        begin = 0
        for sequence, slot in zip(sequences, slots, strict=True):
            positions += [begin + row.position for row in sequence.rows]
            targets += [row.target for row in sequence.rows]
            row_slots += [slot] * len(sequence.rows)
            begin += sequence.num_tokens
        rows_N = torch.tensor(positions, dtype=torch.int64).to(hidden_TH.device, non_blocking=True)
        return self._head.score(
            hidden_TH.index_select(0, rows_N),
            torch.tensor(targets, dtype=torch.int64),
            torch.tensor(row_slots, dtype=torch.int32),
            top_k=max(s.top_k for s in sequences),
        )
