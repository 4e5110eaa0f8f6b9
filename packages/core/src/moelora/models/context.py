"""The one forward context: what the functions plugged into transformers read while a batch runs. No other global.

Each thread has its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from threading import local
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from moelora.models.invariant import InvariantProducts

if TYPE_CHECKING:
    import torch

    from moelora.backends.base import Backend, LoraMetadata
    from moelora.models.norms import FusedNorm
    from moelora.types import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Where each sequence of the packed row begins and ends.

    cu_seqlens_S1: int32 on the device. lengths: the same on the host, or None inside a captured graph, where nothing
    may depend on them. longest: no sequence has more tokens; exact on live lengths, the bucket inside a graph. Rows
    behind the last boundary are padding.
    """

    cu_seqlens_S1: torch.Tensor
    lengths: tuple[int, ...] | None
    longest: int
    cache: dict[Any, Any] = field(default_factory=dict)
    """For what a backend derives from the boundaries once and uses in every layer of this forward."""

    def rows(self) -> list[slice]:
        """The rows of each sequence. Reads the boundaries where their lengths are not known, which synchronises."""
        lengths = self.lengths if self.lengths is not None else tuple(self.cu_seqlens_S1.diff().tolist())
        ends = list(accumulate(lengths))
        return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True) if length]

    @staticmethod
    def of(batch: PackedBatch) -> Segments:
        """The live segments of a batch."""
        return Segments(cu_seqlens_S1=batch.cu_seqlens_S1, lengths=batch.lengths, longest=max(batch.lengths))


class GraphBreak(ABC):
    """Where a breakable graph ends: takes over each piece of the captured forward that needs exact lengths."""

    @property
    @abstractmethod
    def segments(self) -> Segments:
        """The live segments of the batch that runs now."""

    @abstractmethod
    def run(self, work: Callable[..., None], tensors: Sequence[torch.Tensor]) -> None:
        """Runs `work(segments, *tensors)` outside the graph, now and at every replay, on the live segments then.

        tensors: memory of the graph, inputs and outputs alike; `work` must hold on to no other. Its writes are what
        the graph goes on with.
        """


@dataclass(slots=True)
class Waiting:
    """What one module of a forward left to the kernel of the next.

    norms: heads `[1, T, H, D]` whose norm the rotary function applies, with that norm. summand: a contiguous
    tensor of nobody else's, and what is still to be added to it. projected: what several projections of one input
    (`projections.py`) were computed from, and the outputs of those that are still to be called.
    """

    norms: list[tuple[torch.Tensor, FusedNorm]] = field(default_factory=list)
    summand: tuple[torch.Tensor, torch.Tensor] | None = None
    projected: tuple[torch.Tensor, dict[Any, torch.Tensor]] | None = None

    def take_summand(self, x: torch.Tensor) -> torch.Tensor | None:
        """What is to be added to x, which then waits no more."""
        if self.summand is None or self.summand[0] is not x:
            return None
        _, summand = self.summand
        self.summand = None
        return summand

    def take_projection(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """The output of `layer` for x if it was computed with that of another, which then waits no more."""
        if self.projected is None or self.projected[0] is not x:
            return None
        outs = self.projected[1]
        out = outs.pop(layer, None)
        if not outs:
            self.projected = None
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """What one forward needs besides its inputs.

    segments: None while the scoring head runs on loose rows. graph_break: set while a breakable graph is captured.
    """

    backend: Backend
    meta: LoraMetadata
    segments: Segments | None
    graph_break: GraphBreak | None = None
    waiting: Waiting = field(default_factory=Waiting)

    def alone(self, segments: Segments) -> list[tuple[slice, ForwardContext]]:
        """For each of `segments`: its rows, and the context of a forward that holds nothing else."""
        key = ("alone", self.meta.has_lora)
        if key not in segments.cache:
            segments.cache[key] = [(rows, self._narrowed(rows, segments)) for rows in segments.rows()]
        found: list[tuple[slice, ForwardContext]] = segments.cache[key]
        return found

    def _narrowed(self, rows: slice, segments: Segments) -> ForwardContext:
        length = rows.stop - rows.start
        boundaries = segments.cu_seqlens_S1.new_tensor([0, length])
        return ForwardContext(
            backend=self.backend,
            meta=self.backend.rows_metadata(self.meta.token_slot_T[rows], has_lora=self.meta.has_lora),
            segments=Segments(cu_seqlens_S1=boundaries, lengths=(length,), longest=length),
        )


class _Current(local):
    """By thread: what another thread runs meanwhile, an engine or a plain model, must not see it."""

    context: ForwardContext | None = None
    positions_1T: torch.Tensor | None = None
    functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    sees_rotary: Callable[[Any, Any], None] | None = None


_current = _Current()


def current_context() -> ForwardContext:
    """The context of the running forward."""
    context = _current.context
    assert context is not None, "a moelora function was called outside a forward of the engine"
    return context


def has_context() -> bool:
    """True while a forward of the engine runs."""
    return _current.context is not None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Makes `context` the current one for the enclosed forward. Forwards do not nest."""
    assert _current.context is None, "forward contexts do not nest"
    ops = context.backend.fused_ops
    products = InvariantProducts(ops) if context.backend.batch_invariant and ops is not None else nullcontext()
    with products, _current_is(context):
        yield


@contextmanager
def part_context(context: ForwardContext) -> Iterator[None]:
    """Within a forward: makes the context of a part of its rows the current one."""
    assert _current.context is not None, "a part of no forward"
    with _current_is(context):
        yield


@contextmanager
def _current_is(context: ForwardContext) -> Iterator[None]:
    before = _current.context
    _current.context = context
    try:
        yield
    finally:
        _current.context = before


@contextmanager
def row_of(
    positions_1T: torch.Tensor, functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> Iterator[None]:
    """While the body runs on a row.

    positions_1T: int64 `[1, T]`, restarting at 0 with each request. functions: what to call in the place of functions
    of modelling files, by "namespace:name" (`mixers.looped_functions`).
    """
    _current.positions_1T, _current.functions = positions_1T, functions
    try:
        yield
    finally:
        _current.positions_1T, _current.functions = None, MappingProxyType({})


def active_functions() -> Mapping[str, Callable[..., Any]]:
    """What the running body calls in the place of functions of modelling files."""
    return _current.functions


def row_positions() -> torch.Tensor | None:
    """The positions of the row that the body runs on, or None outside it."""
    return _current.positions_1T


@contextmanager
def rotary_told_to(see: Callable[[Any, Any], None]) -> Iterator[None]:
    """Within it `see` is called with the queries and keys of every call of a rotary function that a kernel replaces."""
    _current.sees_rotary = see
    try:
        yield
    finally:
        _current.sees_rotary = None


def tell_of_rotary(q: Any, k: Any) -> None:
    """Says that such a function is called."""
    if _current.sees_rotary is not None:
        _current.sees_rotary(q, k)
