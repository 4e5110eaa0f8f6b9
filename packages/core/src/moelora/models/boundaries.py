"""Kernels that know boundaries: one call for all requests of a row, where it gives what one call for each gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moelora.models.context import Segments
from moelora.models.cuts import tensors_of

_AGREES = 2e-2
"""Of the largest value of a result. Kernels keep 16-bit products or fp32 in TF32; a leak is larger by far."""


class Boundaries:
    """Tries, once, whether a function takes boundaries under the names that kernel packages use for them.

    `cu_seqlens` is what flash-linear-attention takes, `seq_idx` causal-conv1d and mamba-ssm. Without such a package
    transformers' own function refuses them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.untried = True
        self.agreed = False

    def call(self, args: Any, kwargs: Any, segments: Segments) -> Any:
        """One call on the live rows of all requests."""
        key = "seq_idx"
        if key not in segments.cache:
            ends = segments.cu_seqlens_S1[1:].contiguous()
            rows = torch.arange(sum(segments.lengths or ()), device=ends.device, dtype=ends.dtype)
            segments.cache[key] = torch.searchsorted(ends, rows, right=True).to(torch.int32).unsqueeze(0)
        told = {"cu_seqlens": segments.cu_seqlens_S1, "seq_idx": segments.cache[key]}
        return self._function(*args, **{**kwargs, **told})

    def try_out(self, args: Any, kwargs: Any, segments: Segments, expected: Any) -> None:
        """Compares with `expected`, the joined results of single calls."""
        self.untried = False
        try:
            got, _, _ = tensors_of(self.call(args, kwargs, segments))
        except (TypeError, ValueError, RuntimeError, AssertionError):
            return  # it does not take them
        want, _, _ = tensors_of(expected)
        self.agreed = got.keys() == want.keys() and all(_alike(got[path], want[path]) for path in want)


def _alike(got: torch.Tensor, want: torch.Tensor) -> bool:
    if got.shape != want.shape or not want.is_floating_point():
        return got.shape == want.shape and bool((got == want).all())
    return bool(((got - want).abs().max() <= _AGREES * want.abs().max()).item())
