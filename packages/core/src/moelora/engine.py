"""`PrefillEngine`: the one place where the rooms meet. Loads base and adapters once, then scores batch by batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from moelora.adapters.bank import AdapterBank, BankLayout
from moelora.adapters.base import Adapter, Catalogue
from moelora.adapters.given import host_adapters
from moelora.adapters.residency import LOOK_AHEAD, Placement, Residency
from moelora.backends.base import AttentionChoices, DenseSlots
from moelora.batching.planner import PlannedBatch, plan
from moelora.batching.slots import look_ahead
from moelora.capacity import EagerReason
from moelora.checks import check_request, count_tokens, vocab_size_of
from moelora.engine_report import engine_report
from moelora.environment import release_importers, resolve_device
from moelora.errors import ConfigError, RequestError
from moelora.graphs.captured import CapturedRunner
from moelora.graphs.eager import EagerRunner
from moelora.graphs.select import RunnerRequest, Selection, first_mode, select_runner
from moelora.memory import Sizing, choose_capacity
from moelora.meter import DeviceMeter, measure_largest_batch
from moelora.models.base_model import load_base, open_base, resolve_dtype
from moelora.models.catalogue import build_catalogue
from moelora.models.experts import moe_shapes
from moelora.models.lora import install_lora
from moelora.models.substitutes import Substitutes, install_substitutes
from moelora.options import WINDOW_REQUESTS, EngineOptions, batch_limits, choose_backend, derive_buckets
from moelora.pipeline import BatchPipeline, Turn
from moelora.scoring.head import ScoringHead
from moelora.scoring.results import ResultBuilder
from moelora.self_check import check_installed
from moelora.types import GraphMode, Phase, Request, Result


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
        if not isinstance(options, EngineOptions):
            raise ConfigError(f"options must be EngineOptions, got {type(options).__name__}")
        modules = len(sys.modules)
        say = self._say = on_event or (lambda text: None)
        self.options = options
        self._device = resolve_device(options.device)
        self._lock = RLock()
        torch.manual_seed(options.seed)
        self._backend = choose_backend(options, self._device)
        source = open_base(model, load_format=options.load_format)
        skeleton = source.skeleton()
        self._catalogue = build_catalogue(skeleton)
        dtype = resolve_dtype(options.dtype, source.config, self._device)
        # Adapters come first: a bad one is refused before minutes are spent on the base.
        self._adapters = host_adapters(
            adapters or {},
            catalogue=self._catalogue,
            dtype=dtype,
            base_weight=source.stored_tensor,
            lora_b_layout=options.lora_b_layout,
            budget=options.host_bytes,
            say=say,
        )
        sizing = Sizing(
            skeleton=skeleton,
            catalogue=self._catalogue,
            architecture=source.architecture,
            adapters=self._adapters.values(),
            device=self._device,
            dtype=dtype,
        )
        self._capacity, self._planned_memory = choose_capacity(options, sizing, say)
        meter = self._meter = DeviceMeter(self._device)
        say(f"loading base model {model}")
        self._base = meter.kept("base", lambda: load_base(source, device=self._device, dtype=options.dtype))
        self._quantised = source.quantisation.told(source.files, self._base.nbytes) if source.quantisation else None
        if self._quantised:
            say(self._quantised)
        # Asked for every request, and transformers' configs answer slowly.
        self._vocab_size = vocab_size_of(self._base.text_config)
        self._max_positions: int | None = getattr(self._base.text_config, "max_position_embeddings", None)
        meter.kept("static", self._prepare_backend)
        # Before LoRA is hooked in: a substitute is compared with the bare module.
        ops = self._backend.fused_ops
        self._substitutes = (
            install_substitutes(self._base.causal_lm, ops, self._base.dtype, self._device, self._base.functions)
            if ops
            else Substitutes()
        )
        self._bank = meter.kept("bank", self._make_bank)
        if self._device.type == "cuda" and len(self._adapters) > self._bank.num_slots:
            self._adapters.pin(self._bank.num_slots)  # they take turns in the slots, and are copied while batches run
        self._residency = Residency(self._adapters, self._bank)
        installed = install_lora(self._base.causal_lm, self._catalogue, self._bank)
        self._head = self._make_head()
        eager = EagerRunner(self._base, self._backend, Phase.PREFILL, EagerReason.GRAPH_OFF)
        check_installed(
            installed,
            base=self._base,
            runner=eager,
            head=self._head,
            layout=self._bank.layout,
            capacity=self._capacity,
            max_positions=self._max_positions,
            substitutes=self._substitutes,
        )
        self._settle_attention(say)
        if self._device.type == "cuda":
            measure_largest_batch(meter, eager, self._head, self._capacity, self._max_positions, say)
        self._selection = meter.pooled("graphs", lambda: self._select_runner(say))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of pieces that warming up and timing left, which no batch may fit into
        self._runner = self._selection.runner
        self._pipeline = BatchPipeline(
            self._runner, self._head, self._residency, device=self._device, lock=self._lock, say=say
        )
        release_importers(modules)

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

        Set it to what another process measured, and both choose the same kernels and give the same bits. Raises
        `ConfigError` for what are no such pairs.
        """
        found = self._runner.eager_buckets if isinstance(self._runner, CapturedRunner) else {}
        return [[bucket, tokens] for bucket, tokens in sorted(found.items())]

    @eager_buckets.setter
    def eager_buckets(self, buckets: Iterable[list[int]]) -> None:
        pairs = list(buckets)
        if not all(isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair) for pair in pairs):
            raise ConfigError(
                f"eager buckets are pairs of a bucket and tokens, like [[64, 1]], not {pairs}. If another version of "
                "moelora measured them, begin the run anew with --overwrite"
            )
        if isinstance(self._runner, CapturedRunner):
            self._runner.eager_buckets = {pair[0]: pair[1] for pair in pairs}

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

    def score_stream(
        self, requests: Iterable[Request], on_batch: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Result]]:
        """Scores requests as they come, for more of them than memory holds.

        Args:
            requests: Read some tens of thousands ahead, which are planned together.
            on_batch: Called when all results of a batch have been taken, before the next batch is waited for.

        Yields:
            (index, result) as batches finish, in any order. A bad request yields a result with `error`.
        """
        refused: list[tuple[int, Result]] = []
        for found in self._pipeline.run(self._turns(self._sound(requests, refused)), on_batch):
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
        return engine_report(
            options=self.options,
            base=self._base,
            quantised=self._quantised,
            catalogue=self._catalogue,
            backend=self._backend,
            substitutes=self._substitutes,
            selection=self._selection,
            head=self._head,
            adapters=self._adapters,
            bank=self._bank,
            capacity=self._capacity,
            planned=self._planned_memory,
            meter=self._meter,
            pipeline=self._pipeline,
        )

    # Construction.

    def _prepare_backend(self) -> None:
        self._backend.init_graph_metadata(Phase.PREFILL, self._capacity, self._device)
        ranks = BankLayout.of(self._adapters.values()).ranks  # the largest by target
        shapes = moe_shapes(self._base.causal_lm, self._base.text_config, dict(ranks))
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
