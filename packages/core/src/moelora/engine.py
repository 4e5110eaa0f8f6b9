"""`PrefillEngine`: the one place where the rooms meet. Loads base and adapters once, then scores batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from moelora.adapters.arena import Allocate
from moelora.adapters.bank import AdapterBank, BankLayout
from moelora.adapters.base import Adapter, Catalogue, check_fits
from moelora.adapters.host import HostAdapters
from moelora.adapters.loader import load_adapter
from moelora.adapters.residency import LOOK_AHEAD, Placement, Residency
from moelora.backends.base import AttentionChoices, DenseSlots
from moelora.batching.packing import pack
from moelora.batching.planner import PlannedBatch, plan
from moelora.batching.sequences import Sequence as Tokens
from moelora.batching.slots import look_ahead
from moelora.capacity import EagerReason
from moelora.checks import check_request, count_tokens
from moelora.environment import free_host_memory, resolve_device
from moelora.errors import AdapterError, CheckpointError, RequestError
from moelora.graphs.captured import CapturedRunner
from moelora.graphs.eager import EagerRunner
from moelora.graphs.select import RunnerRequest, Selection, first_mode, select_runner
from moelora.memory import Sizing, choose_capacity, together
from moelora.meter import DeviceMeter, measure_largest_batch
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
)
from moelora.pipeline import BatchPipeline, Turn
from moelora.scoring.head import ScoringHead
from moelora.scoring.results import ResultBuilder
from moelora.types import BASE_ADAPTER, BASE_SLOT, GraphMode, Phase, Request, Result
from moelora.versions import versions

_PROBE_TOKENS = 149
"""A prime that no other dimension of a model has or divides, and longer than what indexers and compressors wait for.

Two thirds of it are more than the chunks of 64 tokens that kernels of linear attention cut a request into.
"""

_REPORTED = (
    *("moelora", "moelora-kernels", "torch", "transformers", "triton", "safetensors", "flash-attn-4"),
    *("flash-linear-attention", "causal-conv1d"),
)
"""Packages that shape a result."""


class PrefillEngine:
    """One base model, its adapters, and the means to score requests under any of them.

    Threads may share an engine: their batches take turns.

    Examples:
        >>> engine = PrefillEngine("examples/tiny-moe", adapters={"python": "examples/tiny-moe/adapters/python"})
        >>> result = engine.score([Request(token_ids=[5, 6, 7], adapter="python")])[0]

    Args:
        model: A checkpoint's folder, or the name of a model in the Hugging Face cache.
        adapters: By name: an adapter's folder, or an `Adapter` in canonical form that is in memory already.
        options: How to run.
        on_event: Called with a sentence when something begins that takes its time, as loading and capture do.

    Raises:
        CheckpointError: If the model cannot be loaded or run.
        AdapterError: If an adapter would lose a tensor or does not fit; read before the base's weights are.
        ConfigError: If the options cannot be honoured on this machine.
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
        skeleton = source.skeleton()
        self._catalogue = build_catalogue(skeleton)
        # Adapters come first: a bad one is refused before minutes are spent on the base.
        self._adapters = self._load_adapters(adapters or {}, source, say)
        sizing = Sizing(
            skeleton=skeleton,
            catalogue=self._catalogue,
            architecture=source.architecture,
            adapters=self._adapters.values(),
            device=self._device,
            dtype=resolve_dtype(options.dtype, source.config, self._device),
        )
        self._capacity, self._planned_memory = choose_capacity(options, sizing, say)
        meter = self._meter = DeviceMeter(self._device)
        say(f"loading base model {model}")
        self._base = meter.kept("base", lambda: load_base(source, device=self._device, dtype=options.dtype))
        self._quantised = source.quantisation.told(source.files, self._base.nbytes) if source.quantisation else None
        if self._quantised:
            say(self._quantised)
        # Asked for every request, and transformers' configs answer slowly.
        self._vocab_size: int = self._base.text_config.vocab_size
        self._max_positions: int | None = getattr(self._base.text_config, "max_position_embeddings", None)
        meter.kept("static", self._prepare_backend)
        # Before LoRA is hooked in: a substitute is compared with the bare module.
        ops = self._backend.fused_ops
        self._substitutes = (
            install_substitutes(self._base.causal_lm, ops, self._base.dtype, self._device) if ops else Substitutes()
        )
        self._bank = meter.kept("bank", self._make_bank)
        if self._device.type == "cuda" and len(self._adapters) > self._bank.num_slots:
            self._adapters.pin(self._bank.num_slots)  # they take turns in the slots, and are copied while batches run
        self._residency = Residency(self._adapters, self._bank)
        self._installed = install_lora(self._base.causal_lm, self._catalogue, self._bank)
        self._head = self._make_head()
        self._check_installed()
        self._settle_attention(say)
        if self._device.type == "cuda":
            runner = EagerRunner(self._base, self._backend, Phase.PREFILL, EagerReason.GRAPH_OFF)
            measure_largest_batch(meter, runner, self._head, self._capacity, self._max_positions, say)
        self._selection = meter.pooled("graphs", lambda: self._select_runner(say))
        self._runner = self._selection.runner
        self._pipeline = BatchPipeline(
            self._runner, self._head, self._residency, device=self._device, lock=self._lock, say=say
        )

    # What the engine knows of itself.

    @property
    def model_config(self) -> Any:
        """The base's config, a `transformers.PretrainedConfig`."""
        return self._base.config

    @property
    def vocab_size(self) -> int:
        """V, the number of token ids, which lie in [0, V)."""
        return self._vocab_size

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest sequence that the model has positions for; None if the config names no limit."""
        return self._max_positions

    @property
    def adapter_names(self) -> list[str]:
        """Names that a request may use besides `__base__`."""
        return list(self._adapters)

    @property
    def slots(self) -> int:
        """L, the number of adapters that lie on the device at once."""
        return self._bank.num_slots

    @property
    def eager_buckets(self) -> list[list[int]]:
        """Buckets, in tokens, that `GraphMode.AUTO` measured to be faster without a graph, in ascending order.

        Each is a pair with the fewest tokens of a batch's longest request from which on it is: 1 is every batch.

        Set it to what another process measured, and both choose the same kernels and give the same bits.
        """
        found = self._runner.eager_buckets if isinstance(self._runner, CapturedRunner) else {}
        return [[bucket, tokens] for bucket, tokens in sorted(found.items())]

    @eager_buckets.setter
    def eager_buckets(self, buckets: Iterable[list[int]]) -> None:
        if isinstance(self._runner, CapturedRunner):
            self._runner.eager_buckets = {pair[0]: pair[1] for pair in buckets}

    @property
    def attention_choice(self) -> AttentionChoices:
        """From how many tokens on each attention of the model runs FlashAttention 4; empty where it never can.

        As with `eager_buckets`, for processes that must give the same bits. Graphs that hold another kernel are
        captured anew. Raises `ConfigError` if FlashAttention 4 cannot be used here.
        """
        return self._backend.attention_choice

    @attention_choice.setter
    def attention_choice(self, choice: AttentionChoices) -> None:
        before = self._backend.attention_choice
        self._backend.attention_choice = choice
        baked = [{name: one["buckets"] for name, one in choices.items()} for choices in (before, self.attention_choice)]
        runner = self._runner
        if isinstance(runner, CapturedRunner) and runner.mode is GraphMode.FULL and baked[0] != baked[1]:
            self._say("capturing graphs anew, with the kernels of attention that other processes of this run use")
            runner.capture()

    @property
    def score_chunk_rows(self) -> int:
        """Rows of logits held at once. As with `eager_buckets`, another number may change last bits."""
        return self._head.chunk_rows

    @score_chunk_rows.setter
    def score_chunk_rows(self, rows: int) -> None:
        self._head.chunk_rows = rows

    @property
    def catalogue(self) -> Catalogue:
        """The modules of the base that adapters may target, with their shapes."""
        return self._catalogue

    def check(self, request: Request) -> str | None:
        """Why a request cannot be scored, or None if it can. Whatever a caller put into it, nothing is raised.

        Checked are types, the adapter's name, token ids in [0, V), lengths in tokens, `top_k` and `score_from`.
        """
        return check_request(
            request, adapters=self._adapters, vocab_size=self.vocab_size, max_positions=self.max_positions
        )

    def score(self, requests: Iterable[Request], on_progress: Callable[[int, int], None] | None = None) -> list[Result]:
        """Scores all requests, in batches of the engine's making.

        Args:
            requests: In any order and under any adapters; what runs together is chosen so that adapters are loaded
                rarely and batches are full.
            on_progress: Called with (done, total) after every result.

        Returns:
            One result per request, in the order of the requests. Log-probabilities are in nats, reduced in float32.

        Raises:
            RequestError: If a request cannot be scored; nothing has been scored then.
        """
        if isinstance(requests, Request):
            raise RequestError("score takes a list of requests, got a single one")
        requests = list(requests)
        for i, request in enumerate(requests):
            reason = self.check(request)
            if reason:
                raise RequestError(f"request {i}: {reason}")
        results: dict[int, Result] = {}
        for index, result in self._pipeline.run(self._turns(enumerate(requests))):
            results[index] = result
            if on_progress is not None:
                on_progress(len(results), len(requests))
        return [results[i] for i in range(len(requests))]

    def score_stream(self, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
        """Scores requests as they come, for more of them than memory holds.

        Args:
            requests: Read some tens of thousands ahead, which are planned together.

        Yields:
            (index, result) as batches finish, in any order. A bad request yields a result with `error`.
        """
        refused: list[tuple[int, Result]] = []
        for found in self._pipeline.run(self._turns(self._sound(requests, refused))):
            while refused:
                yield refused.pop()
            yield found
        yield from refused

    def _sound(self, requests: Iterable[Request], refused: list[tuple[int, Result]]) -> Iterator[tuple[int, Request]]:
        """The requests that can be scored, with their indices; the others go to `refused`."""
        for index, request in enumerate(requests):
            reason = self.check(request)
            if reason:
                refused.append((index, Result(num_tokens=count_tokens(request), error=reason)))
            else:
                yield index, request

    def _turns(self, numbered: Iterator[tuple[int, Request]]) -> Iterator[Turn]:
        """Plans the requests window by window."""
        while window := list(islice(numbered, WINDOW_REQUESTS)):
            builders = {index: ResultBuilder(index, request) for index, request in window}
            sequences = [s for builder in builders.values() for s in builder.sequences]
            placed = ((batch, self._place(batch)) for batch in plan(sequences, batch_limits(self._capacity)))
            for (batch, placement), following in look_ahead(placed, LOOK_AHEAD):
                yield Turn(
                    sequences=batch.sequences,
                    placement=placement,
                    upcoming=[later for _, later in following],
                    builders=builders,
                )

    def _place(self, planned: PlannedBatch) -> Placement:
        with self._lock:
            return self._residency.place(planned)

    def stop(self) -> bool:
        """Lets `score_stream` end by `KeyboardInterrupt` behind the results of the batches that are under way.

        For signal handlers. Returns False, and changes nothing, if there is none to wait for.
        """
        return self._pipeline.stop()

    def report(self) -> dict[str, Any]:
        """Counts since construction, and what ran where: the `engine` part of the report of `moelora prefill`.

        Returns:
            JSON types alone. `passes`: batches by phase, mode and bucket. `eager_reasons`: batches by reason. `tokens`:
            those that went through the model. `padding_share`: of what ran, in [0, 1]. Sizes ending in `_bytes` are
            in bytes; `peak_device_bytes` is None on the CPU.
        """
        counts, measured = self._pipeline.counts, self._meter.parts
        return {
            "model": str(self._base.folder),
            "architecture": self._base.architecture.model_type,
            "packed": self._base.architecture.packs,
            "packing_reason": self._base.architecture.reason,
            "quantised": self._quantised,
            "device": str(self._device),
            "dtype": str(self._base.dtype).removeprefix("torch."),
            "backend": self._backend.capabilities.name,
            "graph": str(self.options.graph),
            "graphs": self._selection.report(),
            "substitutes": self._substitutes.report(),
            "fused_head": self._head.fused,
            "attention": self._backend.attention_report(),
            "batch_invariant": self.options.batch_invariant,
            "passes": [
                {"phase": str(Phase.PREFILL), "mode": str(mode), "bucket": bucket, "count": count}
                for (mode, bucket), count in sorted(counts.passes.items(), key=str)
            ],
            "eager_reasons": {str(reason): count for reason, count in counts.eager_reasons.items()},
            "tokens": counts.tokens,
            "memory_splits": counts.memory_splits,
            "padded_tokens": counts.padded_tokens,
            "padding_share": counts.padding_share,
            "adapters": len(self._adapters),
            "adapters_kept_on_host": self._adapters.kept,
            "adapter_loads": self._bank.loads,
            "slots": self._capacity.slots,
            "max_tokens": self._capacity.max_tokens,
            "max_requests": self._capacity.max_requests,
            "bytes_per_slot": self._bank.layout.bytes_per_slot(self._catalogue, self._base.dtype),
            "weight_bytes": self._base.nbytes,
            "peak_device_bytes": self._meter.highest(),
            "memory": self._planned_memory.to_json(),
            "memory_measured": measured and {**measured, "needed": together(measured)},
            "score_chunk_rows": self.score_chunk_rows,
            "skipped_checkpoint_tensors": len(self._base.skipped),
            "versions": {name: found for name, found in versions(_REPORTED).items() if found is not None},
        }

    # Construction.

    def _load_adapters(
        self, given: Mapping[str, str | Path | Adapter], source: BaseSource, say: Callable[[str], None]
    ) -> HostAdapters:
        if not isinstance(given, Mapping):
            raise AdapterError(f"adapters must map names to folders, got {type(given).__name__}")
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
        catalogue, lora_b_layout = self._catalogue, self.options.lora_b_layout
        budget = self.options.host_bytes
        if budget is None and (free := free_host_memory()) is not None:
            budget = free // 2

        # Outlives this call, and must not hold the engine.
        def load(name: str, path: Path, allocate: Allocate) -> Adapter:
            return load_adapter(
                path,
                name=name,
                catalogue=catalogue,
                dtype=dtype,
                base_weight=source.stored_tensor,
                lora_b_layout=lora_b_layout,
                allocate=allocate,
            )

        return HostAdapters(sources, load, budget=budget, say=say)

    def _prepare_backend(self) -> None:
        self._backend.init_graph_metadata(Phase.PREFILL, self._capacity, self._device)
        shapes = moe_shapes(self._base.causal_lm, self._base.text_config, self._ranks())
        if shapes:
            self._backend.init_moe_buffers(Phase.PREFILL, self._capacity, self._device, self._base.dtype, shapes)

    def _make_bank(self) -> AdapterBank:
        return AdapterBank(
            self._catalogue,
            BankLayout.of(self._adapters.values()),
            slots=self._capacity.bank_slots,
            device=self._device,
            dtype=self._base.dtype,
        )

    def _make_head(self) -> ScoringHead:
        slots = self._bank.slots.get("lm_head")
        assert slots is None or isinstance(slots, DenseSlots)
        return ScoringHead(
            self._base,
            self._backend,
            chunk_rows=self._planned_memory.score_chunk_rows,
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

    def _settle_attention(self, say: Callable[[str], None]) -> None:
        """Chooses between kernels of attention, before any is baked into a graph."""
        mode, _ = first_mode(
            self.options.graph,
            device=self._device,
            architecture=self._base.architecture,
            has_replacements=bool(self._bank.layout.replaced),
            modes=self._backend.capabilities.graph_modes,
        )
        self._backend.settle_attention(
            longest=self._max_positions or self._capacity.max_tokens,
            full_slots=self._capacity.request_slots(GraphMode.FULL) if mode is GraphMode.FULL else None,
            say=say,
        )

    def _check_installed(self) -> None:
        """One small base-only batch: shows that the model runs and that it reaches every adapted target."""
        length = _prime(min(_PROBE_TOKENS, self._capacity.max_tokens, self._max_positions or _PROBE_TOKENS))
        probe = Tokens(request=0, adapter=BASE_ADAPTER, token_ids=(0,) * length, runs=(), top_k=0)
        eager = EagerRunner(self._base, self._backend, Phase.PREFILL, EagerReason.GRAPH_OFF)
        try:
            with torch.inference_mode():
                hidden_TH = eager.run(pack([probe], {}, self._device)).hidden_TH
                base_row = torch.full((1,), BASE_SLOT, dtype=torch.int32, device=self._device)
                self._head.logits(hidden_TH[-1:], base_row, has_lora=False)
                self._head.recognise(hidden_TH[-2:])
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            model_type, dtype = self._base.architecture.model_type, str(self._base.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"moelora cannot run {model_type} in {dtype} ({type(error).__name__}: {error})"
            ) from error
        self._installed.check_calls()
        depends_on_others = bool(self._base.functions) or bool(self._bank.layout.replaced)
        if depends_on_others and self._capacity.max_requests > 1 and self._capacity.max_tokens > 1:
            self._try_together(eager)
        self._installed.checking = False

    @torch.inference_mode()
    def _try_together(self, eager: EagerRunner) -> None:
        """Two requests in one batch: what cannot tell them apart shows it now.

        Kernels that know boundaries are then used for all batches alike, and modules that some adapter replaces must
        see rows of tokens.
        """
        total = _prime(min(_PROBE_TOKENS, self._capacity.max_tokens))
        second = max(total // 3, 1)
        ids = tuple(i % self.vocab_size for i in range(total))
        requests = [
            Tokens(request=0, adapter=BASE_ADAPTER, token_ids=ids[:n], runs=(), top_k=0)
            for n in (total - second, second)
        ]
        eager.run(pack(requests, {}, self._device))


def _prime(most: int) -> int:
    """The largest prime up to `most`, or 1."""
    return next((n for n in range(most, 1, -1) if all(n % i for i in range(2, n))), 1)
