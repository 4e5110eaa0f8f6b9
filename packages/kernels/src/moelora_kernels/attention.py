"""Which kernel of packed attention runs which batch: our own, or FlashAttention 4 where it was measured to be faster.

What was measured comes down to two numbers for each attention of the model, and the kernel of a batch follows from its
shape alone: from the longest of its requests, or, where a graph does not know them, from the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from moelora.backends.base import AttentionChoices
from moelora.errors import ConfigError
from moelora_kernels.ops.attention import attention_tiles, flash4_refusal, pick_attention_config, varlen_attention
from moelora_kernels.ops.attention.flash4 import MOST_SEQUENCES, NOT_INSTALLED
from moelora_kernels.timing import Timer, eager_ms, graph_ms

if TYPE_CHECKING:
    from moelora.models.context import Segments

KERNELS = ("auto", "triton", "fa4")
"""What a user may ask for."""

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens of a request that are timed; longer ones take the kernel of the last."""

TOKENS = 8192
"""Of the batches that are timed."""

_CHECKED = (700, 1, 2000, 17, 128, 129)
"""Tokens of the requests on which both kernels must agree."""

_WORTH = 0.97
"""FlashAttention 4 must take less than this share of our kernel's time."""

# Relative, of 16-bit results: of all values together (1e-3 to 4e-3 are usual), and of any one row and head, whose own
# values may nearly cancel. A row that saw what it must not differs by about its own size.
_MOST_ERROR, _MOST_ROW_ERROR = 1e-2, 6e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One attention of a model, but for the batch. sinks: their dtype, None without any."""

    heads: int
    groups: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None
    sinks: torch.dtype | None
    softcap: float | None

    def __str__(self) -> str:
        widths = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim} and {self.value_dim}"
        words = [f"{self.heads}/{self.groups} heads of {widths}", str(self.dtype).removeprefix("torch.")]
        words += [f"window {self.window}"] if self.window is not None else []
        words += ["sinks"] if self.sinks is not None else []
        words += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTime:
    """Milliseconds of both kernels on TOKENS tokens, or what fits, in requests of one length."""

    length: int
    triton_ms: float
    fa4_ms: float


@dataclass(slots=True)
class Settled:
    """What was found out about one attention. refusal: why FlashAttention 4 cannot run it, None if it can.

    requests, buckets: FlashAttention 4 runs from so many tokens on, of the longest request and of a full graph's
    bucket; None is never. reason: why never.
    """

    device: torch.device
    refusal: str | None = None
    reason: str | None = None
    requests: int | None = None
    buckets: int | None = None
    eager: tuple[LengthTime, ...] = ()
    replayed: tuple[LengthTime, ...] = ()

    def takes_flash4(self, segments: Segments) -> bool:
        """Whether FlashAttention 4 runs this batch."""
        if segments.lengths is None:
            return self.buckets is not None and segments.longest >= self.buckets
        return (
            self.requests is not None and segments.longest >= self.requests and len(segments.lengths) <= MOST_SEQUENCES
        )


def least_length(times: Sequence[LengthTime]) -> int | None:
    """The length from which on FlashAttention 4 was the faster at every one that was timed."""
    least = None
    for time in sorted(times, key=lambda one: -one.length):
        if time.fa4_ms >= _WORTH * time.triton_ms:
            break
        least = time.length
    return least


def least_bucket(times: Sequence[LengthTime]) -> int | None:
    """The bucket from which on FlashAttention 4 took less time over all lengths that fit.

    A full graph is captured for batches of any lengths: the kernel that loses least over all of them is the one to bake
    in.
    """
    ordered = sorted(times, key=lambda one: one.length)
    return least_length(
        [
            LengthTime(
                length=last.length,
                triton_ms=sum(one.triton_ms for one in ordered[: i + 1]),
                fa4_ms=sum(one.fa4_ms for one in ordered[: i + 1]),
            )
            for i, last in enumerate(ordered)
        ]
    )


class PackedAttention:
    """The attention of a backend. Before `settle` every batch runs our own kernel."""

    def __init__(self, *, timers: tuple[Timer, Timer] = (eager_ms, graph_ms)) -> None:
        """timers: of eager calls and of replayed ones."""
        self._timers = timers
        self._settled: dict[AttentionShape, Settled] = {}

    def run(
        self,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        segments: Segments,
        *,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Causal attention within each segment: arguments and result as `varlen_attention`."""
        shape = AttentionShape(
            heads=q_THD.shape[1],
            groups=k_TGD.shape[1],
            head_dim=q_THD.shape[2],
            value_dim=v_TGD.shape[2],
            dtype=q_THD.dtype,
            window=window,
            sinks=None if sinks is None else sinks.dtype,
            softcap=softcap,
        )
        settled = self._settled.get(shape)
        if settled is None:
            settled = self._settled[shape] = Settled(q_THD.device)
        tiles = None
        flash4 = settled.takes_flash4(segments)
        if not flash4:
            longest = segments.longest if segments.lengths is not None else None
            config = pick_attention_config(q_THD.dtype, q_THD.shape[2], v_TGD.shape[2], longest=longest)
            if config not in segments.cache:
                segments.cache[config] = attention_tiles(segments.cu_seqlens_S1, q_THD.shape[0], config)
            tiles = segments.cache[config]
        return varlen_attention(
            q_THD,
            k_TGD,
            v_TGD,
            segments.cu_seqlens_S1,
            segments.longest,
            backend="fa4" if flash4 else "triton",
            tiles=tiles,
            scale=scale,
            window=window,
            sinks_H=sinks,
            softcap=softcap,
        )

    @torch.inference_mode()
    def settle(
        self,
        kernel: str,
        *,
        batch_invariant: bool,
        longest: int,
        full_slots: int | None,
        say: Callable[[str], None],
    ) -> None:
        """Chooses for every attention that ran so far. Arguments as `Backend.settle_attention`; kernel: of KERNELS."""
        if kernel == "fa4" and batch_invariant:
            raise ConfigError("attention fa4 is not batch-invariant; use --attention triton, or leave it to auto")
        for shape, settled in self._settled.items():
            if kernel == "triton":
                settled.refusal = "another kernel was asked for"
            elif batch_invariant:
                settled.refusal = "a row's bits are not known to be the same in any batch"
            else:
                settled.refusal = flash4_refusal(settled.device, shape.dtype, shape.head_dim, shape.value_dim)
                if settled.refusal is None:
                    say(f"compiling and timing FlashAttention 4 for {shape}")
                    settled.refusal = disagreement(shape, settled.device, full_slots)
                if settled.refusal not in (None, NOT_INSTALLED):
                    say(f"FlashAttention 4 is not used for {shape}: {settled.refusal}")
            if kernel == "fa4":
                if settled.refusal is not None:
                    raise ConfigError(f"attention fa4 cannot be used for {shape}: {settled.refusal}")
                settled.requests = settled.buckets = 1
            elif settled.refusal is None:
                self._choose(shape, settled, longest, full_slots)

    def _choose(self, shape: AttentionShape, settled: Settled, longest: int, full_slots: int | None) -> None:
        lengths = [length for length in LENGTHS if length <= longest]
        if not lengths:
            settled.reason = f"requests have at most {longest} tokens"
            return
        eager, replayed = self._timers
        settled.eager = times_of(shape, settled.device, tuple(lengths), None, eager)
        settled.requests = least_length(settled.eager)
        if full_slots is not None:
            settled.replayed = times_of(shape, settled.device, tuple(lengths), full_slots, replayed)
            settled.buckets = least_bucket(settled.replayed)
        if settled.requests is None and settled.buckets is None:
            settled.reason = "it was not faster"

    @property
    def long_request_tokens(self) -> int | None:
        """From where on FlashAttention 4 runs batches of known lengths, while full graphs hold our own kernel."""
        found = [s.requests for s in self._settled.values() if s.requests is not None and s.buckets is None]
        return max(found, default=None)

    @property
    def choices(self) -> AttentionChoices:
        """As `Backend.attention_choice`."""
        return {str(shape): {"requests": one.requests, "buckets": one.buckets} for shape, one in self._settled.items()}

    @choices.setter
    def choices(self, choices: AttentionChoices) -> None:
        for shape, settled in self._settled.items():
            given = choices.get(str(shape), {})
            requests, buckets = given.get("requests"), given.get("buckets")
            if settled.refusal is not None and (requests is not None or buckets is not None):
                raise ConfigError(
                    f"this run uses FlashAttention 4 for {shape}, which cannot be used here: {settled.refusal}; "
                    "begin anew with --attention triton"
                )
            settled.requests, settled.buckets = requests, buckets

    def report(self) -> list[dict[str, Any]]:
        """As `Backend.attention_report`."""
        return [
            {
                "attention": str(shape),
                "fa4_from_request_tokens": settled.requests,
                "fa4_from_bucket": settled.buckets,
                "fa4_unused_because": settled.refusal or settled.reason,
                "times": [
                    {"graph": graph, "length": one.length, "triton_ms": one.triton_ms, "fa4_ms": one.fa4_ms}
                    for graph, times in ((False, settled.eager), (True, settled.replayed))
                    for one in times
                ],
            }
            for shape, settled in self._settled.items()
        ]


@cache
def disagreement(shape: AttentionShape, device: torch.device, full_slots: int | None) -> str | None:
    """What is wrong with FlashAttention 4 beside our own kernel, or None. Tried once in a process.

    full_slots: request slots of full graphs, None if none will be captured.
    """
    batch = RandomBatch(shape, device, sum(_CHECKED) + 97)
    try:
        problem = batch.disagreement(_CHECKED, None)
        if problem is None and full_slots is not None:
            problem = batch.disagreement(_CHECKED[:full_slots], full_slots)
    except Exception as error:  # whatever its compiler or its checks make of this machine and shape
        return f"it fails: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return problem


@cache
def times_of(
    shape: AttentionShape, device: torch.device, lengths: tuple[int, ...], slots: int | None, timer: Timer
) -> tuple[LengthTime, ...]:
    """Both kernels on requests of each of `lengths`, measured once in a process. slots: as in `RandomBatch.time`."""
    batch = RandomBatch(shape, device, max(TOKENS, *lengths))
    return tuple(batch.time(length, slots, timer) for length in lengths)


class RandomBatch:
    """Random rows for one attention, on which kernels are compared and timed."""

    def __init__(self, shape: AttentionShape, device: torch.device, tokens: int) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def draw(*sizes: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator, device=device).to(dtype)

        self._shape = shape
        self._q_THD = draw(tokens, shape.heads, shape.head_dim)
        self._k_TGD = draw(tokens, shape.groups, shape.head_dim)
        self._v_TGD = draw(tokens, shape.groups, shape.value_dim)
        self._sinks_H = None if shape.sinks is None else draw(shape.heads, dtype=shape.sinks)

    def disagreement(self, lengths: Sequence[int], slots: int | None) -> str | None:
        """How FlashAttention 4 differs from our kernel on requests of `lengths`, or None.

        slots: of a full graph, unused ones empty and rows behind the last request padding; None for exact boundaries.
        """
        run = self._runner(lengths, slots)
        got, want = (run(backend).float() for backend in ("fa4", "triton"))
        if bool(got[sum(lengths) :].any()):
            return "rows behind the last request are not zero"
        off = got - want
        error = float(off.norm() / want.norm())
        row_error = float((off.norm(dim=2) / want.norm(dim=2).clamp(min=1e-20)).max())
        if not (error <= _MOST_ERROR and row_error <= _MOST_ROW_ERROR):
            return f"it differs from our kernel by {error:.1e} of all values and {row_error:.1e} of a row"
        if len(lengths) == 1:
            return None
        with self._nan_in(slice(lengths[0], lengths[0] + lengths[1])):
            beside = run("fa4").float()
        others = slice(lengths[0] + lengths[1], None)
        if not (torch.equal(beside[: lengths[0]], got[: lengths[0]]) and torch.equal(beside[others], got[others])):
            return "a request that is not a number changes those beside it"
        return None

    @contextmanager
    def _nan_in(self, rows: slice) -> Iterator[None]:
        kept = [(x, x[rows].clone()) for x in (self._q_THD, self._k_TGD, self._v_TGD)]
        for x, _ in kept:
            x[rows] = float("nan")
        try:
            yield
        finally:
            for x, before in kept:
                x[rows] = before

    def time(self, length: int, slots: int | None, timer: Timer) -> LengthTime:
        """Both kernels on requests of one length: TOKENS in all, or fewer where there are fewer slots."""
        tokens = self._q_THD.shape[0]
        count = max(1, min(tokens // length, tokens if slots is None else slots))
        run = self._runner((length,) * count, slots)
        return LengthTime(length=length, triton_ms=timer(lambda: run("triton")), fa4_ms=timer(lambda: run("fa4")))

    def _runner(self, lengths: Sequence[int], slots: int | None) -> Callable[[str], torch.Tensor]:
        """Attention on requests of `lengths` by a kernel of that name. Tiles are made once, as for all layers."""
        shape = self._shape
        rows = sum(lengths) if slots is None else self._q_THD.shape[0]
        unused = 0 if slots is None else slots - len(lengths)
        cu_S1 = torch.tensor([0, *accumulate(lengths)] + [sum(lengths)] * unused, dtype=torch.int32).to(
            self._q_THD.device
        )
        longest = max(lengths) if slots is None else rows
        config = pick_attention_config(
            shape.dtype, shape.head_dim, shape.value_dim, longest=longest if slots is None else None
        )
        tiles = attention_tiles(cu_S1, rows, config)

        def run(backend: str) -> torch.Tensor:
            return varlen_attention(
                self._q_THD[:rows],
                self._k_TGD[:rows],
                self._v_TGD[:rows],
                cu_S1,
                longest,
                scale=shape.head_dim**-0.5,
                window=shape.window,
                sinks_H=self._sinks_H,
                softcap=shape.softcap,
                backend=backend,
                tiles=tiles,
            )

        return run
