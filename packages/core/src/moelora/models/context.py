"""The one forward context: what the functions plugged into transformers read while a batch runs. No other global."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from moelora.backends.base import Backend, LoraMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Where each sequence of the packed row begins and ends.

    cu_seqlens_S1: int32 on the device. lengths: the same on the host. Rows behind the last boundary are padding.
    """

    cu_seqlens_S1: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; at least 1."""
        return max(self.lengths, default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """What one forward needs besides its inputs. `segments` is None while the scoring head runs on loose rows."""

    backend: Backend
    meta: LoraMetadata
    segments: Segments | None


_current: ForwardContext | None = None


def current_context() -> ForwardContext:
    """The context of the running forward."""
    assert _current is not None, "a moelora function was called outside a forward of the engine"
    return _current


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Makes `context` the current one for the enclosed forward. Contexts do not nest."""
    global _current
    assert _current is None, "forward contexts do not nest"
    _current = context
    try:
        yield
    finally:
        _current = None
