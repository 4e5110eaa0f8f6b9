"""The one forward context: what the functions plugged into transformers read while a batch runs. No other global.

Each thread has its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import local
from typing import TYPE_CHECKING, Any

from moelora.models.invariant import InvariantProducts

if TYPE_CHECKING:
    import torch

    from moelora.backends.base import Backend, LoraMetadata
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

    @staticmethod
    def of(batch: PackedBatch) -> Segments:
        """The live segments of a batch."""
        return Segments(cu_seqlens_S1=batch.cu_seqlens_S1, lengths=batch.lengths, longest=max(batch.lengths))


class AttentionBreak(ABC):
    """Where a breakable graph ends: takes over each attention of the forward that is being captured."""

    @abstractmethod
    def attend(
        self, backend: Backend, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Runs `backend.attention(q, k, v, live segments, **options)` outside the graph, now and at every replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """What one forward needs besides its inputs.

    segments: None while the scoring head runs on loose rows. attention_break: set while a breakable graph is captured.
    """

    backend: Backend
    meta: LoraMetadata
    segments: Segments | None
    attention_break: AttentionBreak | None = None


class _Current(local):
    """By thread: what another thread runs meanwhile, an engine or a plain model, must not see it."""

    context: ForwardContext | None = None


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
    """Makes `context` the current one for the enclosed forward. Contexts do not nest."""
    assert _current.context is None, "forward contexts do not nest"
    _current.context = context
    ops = context.backend.fused_ops
    try:
        with InvariantProducts(ops) if context.backend.batch_invariant and ops is not None else nullcontext():
            yield
    finally:
        _current.context = None
