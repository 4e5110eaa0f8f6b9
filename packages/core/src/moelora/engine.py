"""`PrefillEngine`: the one place where the rooms meet. Loads base and adapters once, then scores batch by batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import index as as_integer
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from moelora.adapters.bank import AdapterBank, BankLayout
from moelora.adapters.base import Adapter, Catalogue
from moelora.adapters.loader import load_adapter
from moelora.backends import backend_names, get_backend
from moelora.backends.base import Backend, DenseSlots, RowScores
from moelora.batching.packing import pack
from moelora.batching.planner import BatchLimits, PlannedBatch, assign_slots, plan
from moelora.batching.sequences import NO_TARGET
from moelora.batching.sequences import Sequence as Tokens
from moelora.capacity import EagerReason, PrefillCapacity, default_buckets
from moelora.environment import resolve_device, versions
from moelora.errors import AdapterError, CheckpointError, ConfigError, RequestError, choose_from
from moelora.graphs.eager import EagerRunner
from moelora.graphs.select import RunnerRequest, Selection, select_runner
from moelora.models.base_model import BaseSource, load_base, open_base, resolve_dtype
from moelora.models.catalogue import build_catalogue
from moelora.models.experts import moe_shapes
from moelora.models.lora import install_lora
from moelora.models.substitutes import Substitutes, install_substitutes
from moelora.scoring.head import ScoringHead
from moelora.scoring.results import ResultBuilder
from moelora.types import BASE_ADAPTER, BASE_SLOT, GraphMode, Phase, Request, Result, RunMode

# Requests that are planned together: enough to group adapters, few enough to keep memory flat.
_WINDOW_REQUESTS = 65_536

_DEFAULT_TOKENS = {"cuda": 8192, "cpu": 2048}
_MAX_DEFAULT_SLOTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to run. None means: derived from the device, the model and the adapters.

    backend: auto, or a name of `moelora.backends.backend_names()`. device: auto, cpu, cuda, cuda:N. dtype: auto,
    bfloat16, float16, float32; auto is the checkpoint's own on CUDA and float32 on the CPU. max_tokens, max_requests:
    the budget of one batch. slots: adapters on the device at once. buckets: token counts to capture. load_format: auto
    or dummy (random weights from the config alone, seeded by `seed`). score_chunk_rows: rows of logits held at once.
    lora_b_layout: "rank_major" or "grouped_by_expert" where an adapter of fused experts does not say which it is.
    """

    backend: str = "auto"
    graph: GraphMode = GraphMode.AUTO
    device: str = "auto"
    dtype: str = "auto"
    max_tokens: int | None = None
    max_requests: int | None = None
    slots: int | None = None
    buckets: tuple[int, ...] | None = None
    load_format: str = "auto"
    batch_invariant: bool = False
    score_chunk_rows: int | None = None
    lora_b_layout: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_requests", "slots", "score_chunk_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.load_format not in {"auto", "safetensors", "dummy"}:
            raise ConfigError(choose_from("load format", self.load_format, ["auto", "safetensors", "dummy"]))


class PrefillEngine:
    """One base model, its adapters, and the means to score requests under any of them.

    >>> engine = PrefillEngine("examples/tiny-moe", adapters={"python": "examples/tiny-moe/adapters/python"})
    >>> result = engine.score([Request(token_ids=[5, 6, 7], adapter="python")])[0]

    Raises `CheckpointError`, `AdapterError` or `ConfigError` at construction, before any work. Threads may share an
    engine: their batches take turns.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        options: EngineOptions = EngineOptions(),
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        say = self._say = on_event or (lambda text: None)
        self.options = options
        self._device = resolve_device(options.device)
        self._lock = RLock()
        torch.manual_seed(options.seed)
        self._backend = _choose_backend(options, self._device)
        source = open_base(model, load_format=options.load_format)
        self._catalogue = build_catalogue(source.skeleton())
        # Adapters come first: a bad one is refused before minutes are spent on the base.
        self._adapters = self._load_adapters(adapters or {}, source, say)
        say(f"loading base model {model}")
        self._base = load_base(source, device=self._device, dtype=options.dtype)
        self._capacity = self._plan_capacity()
        self._prepare_backend()
        # Before LoRA is hooked in: a substitute is compared with the bare module.
        ops = self._backend.fused_ops
        self._substitutes = (
            install_substitutes(self._base.causal_lm, ops, self._base.dtype, self._device) if ops else Substitutes()
        )
        self._bank = AdapterBank(
            self._catalogue,
            BankLayout.of(self._adapters.values()),
            slots=max(self._capacity.slots, 1),
            device=self._device,
            dtype=self._base.dtype,
        )
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
    def catalogue(self) -> Catalogue:
        """The targets of the base."""
        return self._catalogue

    def check(self, request: Request) -> str | None:
        """Why a request cannot be scored, or None if it can. Whatever a caller put into it, nothing is raised."""
        problem = _malformed(request)
        if problem:
            return problem
        if request.adapter != BASE_ADAPTER and request.adapter not in self._adapters:
            return choose_from("adapter", request.adapter, [*self._adapters, BASE_ADAPTER])
        if not len(request.token_ids):
            return "the prompt has no tokens"
        empty = [i for i, choice in enumerate(request.choices) if not len(choice)]
        if empty:
            return f"choice {empty[0]} has no tokens"
        vocab_size = self.vocab_size
        for ids in (request.token_ids, *request.choices):
            if min(ids) < 0 or max(ids) >= vocab_size:
                outside = next(t for t in ids if not 0 <= t < vocab_size)
                return f"token id {outside} is outside the vocabulary [0, {vocab_size})"
        # The last choice token is predicted but never read, yet counting it keeps the rule simple to state.
        longest = len(request.token_ids) + max((len(c) for c in request.choices), default=0)
        if self.max_positions is not None and longest > self.max_positions:
            return f"{longest} tokens are more than the model's {self.max_positions} positions"
        if not 0 <= request.top_k <= self.vocab_size:
            return f"top_k {request.top_k} is outside [0, {self.vocab_size}]"
        if not 0 <= request.score_from <= len(request.token_ids):
            return f"score_from {request.score_from} is outside [0, {len(request.token_ids)}]"
        return None

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
        while window := list(islice(numbered, _WINDOW_REQUESTS)):
            builders: dict[int, ResultBuilder] = {}
            for index, request in window:
                reason = self.check(request)
                if reason:
                    yield index, Result(num_tokens=_count(request), error=reason)
                else:
                    builders[index] = ResultBuilder(index, request)
            sequences = [s for builder in builders.values() for s in builder.sequences]
            for batch in plan(sequences, self._limits()):
                yield from self._score_or_split(batch, builders)

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
            "padding_share": self._padded_tokens / max(self._tokens + self._padded_tokens, 1),
            "adapters": len(self._adapters),
            "adapter_loads": self._bank.loads,
            "slots": self._capacity.slots,
            "max_tokens": self._capacity.max_tokens,
            "max_requests": self._capacity.max_requests,
            "bytes_per_slot": self._bank.layout.bytes_per_slot(self._catalogue, self._base.dtype),
            "peak_device_bytes": peak,
            "score_chunk_rows": self._head.chunk_rows(),
            "skipped_checkpoint_tensors": len(self._base.skipped),
            "versions": versions(),
        }

    # Construction.

    def _load_adapters(
        self, paths: Mapping[str, str | Path], source: BaseSource, say: Callable[[str], None]
    ) -> dict[str, Adapter]:
        dtype = resolve_dtype(self.options.dtype, source.config, self._device)
        adapters = {}
        for name, path in paths.items():
            if name == BASE_ADAPTER or not name:
                raise AdapterError(f"an adapter cannot be called {name!r}")
            say(f"reading adapter {name} from {path}")
            adapters[name] = load_adapter(
                Path(path),
                name=name,
                catalogue=self._catalogue,
                dtype=dtype,
                base_weight=source.stored_tensor,
                lora_b_layout=self.options.lora_b_layout,
            )
        return adapters

    def _plan_capacity(self) -> PrefillCapacity:
        max_tokens = self.options.max_tokens or _DEFAULT_TOKENS[self._device.type]
        max_requests = min(self.options.max_requests or max_tokens, max_tokens)
        if not self._base.architecture.packs:
            max_requests = 1
        slots = min(self.options.slots or _MAX_DEFAULT_SLOTS, len(self._adapters))
        max_rank = max((a.max_rank for a in self._adapters.values()), default=0)
        limit = self._backend.capabilities.max_rank
        if limit is not None and max_rank > limit:
            raise ConfigError(
                f"an adapter has rank {max_rank}; backend {self._backend.capabilities.name} goes up to {limit}"
            )
        return PrefillCapacity(
            max_tokens=max_tokens,
            max_requests=max_requests,
            full_max_requests=min(max_requests, max(max_tokens // 16, 1)),
            slots=slots,
            max_rank=max_rank,
        )

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
        tokens = self._capacity.max_tokens
        buckets = self.options.buckets or default_buckets(tokens)
        if max(buckets) > tokens or min(buckets) < 1:
            raise ConfigError(f"buckets must lie in [1, max_tokens = {tokens}], got {', '.join(map(str, buckets))}")
        return select_runner(
            RunnerRequest(
                base=self._base,
                backend=self._backend,
                phase=Phase.PREFILL,
                mode=self.options.graph,
                capacity=self._capacity,
                buckets=buckets,
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

    def _limits(self) -> BatchLimits:
        return BatchLimits(
            max_tokens=self._capacity.max_tokens,
            max_sequences=self._capacity.max_requests,
            max_adapters=self._bank.num_slots,
        )

    def _score_or_split(
        self, planned: PlannedBatch, builders: dict[int, ResultBuilder]
    ) -> Iterator[tuple[int, Result]]:
        """Halves a batch that does not fit into memory until it does; a single sequence that does not is an error."""
        try:
            finished = self._score_batch(planned, builders)
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
            yield from self._score_or_split(replace(planned, sequences=half), builders)

    def _score_batch(self, planned: PlannedBatch, builders: dict[int, ResultBuilder]) -> list[tuple[int, Result]]:
        # Slots, static buffers and the model's modules belong to one batch at a time.
        with self._lock, torch.inference_mode():
            return self._score_batch_alone(planned, builders)

    def _score_batch_alone(self, planned: PlannedBatch, builders: dict[int, ResultBuilder]) -> list[tuple[int, Result]]:
        sequences = planned.sequences
        slot_of = self._make_resident(planned)
        batch = pack(sequences, slot_of, self._device)
        output = self._runner.run(batch)
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

    def _make_resident(self, planned: PlannedBatch) -> dict[str, int]:
        """Loads what the batch needs; the slots of the whole round are chosen together, so that none is taken twice."""
        needed = {s.adapter for s in planned.sequences}
        slot_of = assign_slots(planned.adapters, self._bank.residents)
        for name, slot in slot_of.items():
            if name in needed and self._bank.residents[slot] != name:
                self._bank.load(slot, self._adapters[name])
        return slot_of

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


def _malformed(request: Request) -> str | None:
    """What of a request has the wrong type. Arrays of numpy and tensors of torch may stand for sequences."""
    if not isinstance(request, Request):
        return f"must be a Request, got {type(request).__name__}"
    if not isinstance(request.adapter, str):
        return f"adapter must be a name, got {type(request.adapter).__name__}"
    for name in ("top_k", "score_from"):
        if not _is_integer(getattr(request, name)):
            return f"{name} must be an integer, got {getattr(request, name)!r:.40}"
    if not _is_sequence(request.choices):
        return f"choices must be a sequence of sequences of integers, got {type(request.choices).__name__}"
    named = [("token_ids", request.token_ids), *((f"choices[{i}]", c) for i, c in enumerate(request.choices))]
    for name, ids in named:
        if not _is_sequence(ids):
            return f"{name} must be a sequence of integers, got {type(ids).__name__}"
        if not set(map(type, ids)) <= {int}:  # the usual case, at the speed of C
            wrong = [i for i, token in enumerate(ids) if not _is_integer(token)]
            if wrong:
                return f"{name}[{wrong[0]}] must be an integer, got {ids[wrong[0]]!r:.40}"
    return None


def _is_sequence(value: Any) -> bool:
    if isinstance(value, str | bytes | bytearray):
        return False
    return isinstance(value, Sequence) or len(getattr(value, "shape", ())) > 0


def _is_integer(value: Any) -> bool:
    try:
        as_integer(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)


def _count(request: Any) -> int:
    """Tokens of a request that may be none."""
    ids = getattr(request, "token_ids", ())
    return len(ids) if _is_sequence(ids) else 0


def _choose_backend(options: EngineOptions, device: torch.device) -> Backend:
    # Off CUDA the Triton backends would run in their interpreter, which is for tests.
    fastest = "triton" if device.type == "cuda" and "triton" in backend_names() else "torch"
    name = options.backend if options.backend != "auto" else fastest
    backend = get_backend(name)
    if device.type not in backend.capabilities.device_types:
        raise ConfigError(
            f"backend {name!r} does not run on {device.type}; it runs on "
            f"{', '.join(sorted(backend.capabilities.device_types))}. Valid on {device.type}: torch"
        )
    if options.batch_invariant and backend.fused_ops is None:
        raise ConfigError(f"backend {name!r} does not run batch-invariantly; valid: triton or csgmv on CUDA")
    backend.batch_invariant = options.batch_invariant
    return backend
