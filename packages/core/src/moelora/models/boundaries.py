"""Kernels that know boundaries: one call for all requests of a row, where it gives what one call for each gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from moelora.models.context import Segments
from moelora.models.cuts import Dims, cut, narrow, tensors_of

_AGREES = 2e-2
"""Of the largest value of a result. Kernels keep 16-bit products or fp32 in TF32."""

_LEAKS = 2e-2
"""Of what a neighbour changes in a call without boundaries; with them it changes nothing but roundings."""


class Boundaries:
    """Tries, once, whether a function takes boundaries under the names that kernel packages use for them.

    `cu_seqlens` is what flash-linear-attention takes, `seq_idx` causal-conv1d and mamba-ssm. Without such a package
    transformers' own function refuses them, or takes no notice.
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

    def try_out(self, given: Any, dims: tuple[Dims, Dims], segments: Segments, expected: Any) -> None:
        """Compares with `expected`, the joined results of single calls, and looks for what neighbours change.

        given: (args, kwargs) of the live rows of several requests. dims: where inputs and outputs count tokens. Both
        looks are needed: a state that decays within a few tokens leaks less than a kernel rounds.
        """
        self.untried = False
        first, *_, last = segments.rows()
        changed = _with_halved_rows(given, dims[0], first)
        others = slice(first.stop, last.stop)
        try:
            told, told_changed = (self.call(args, kwargs, segments) for args, kwargs in (given, changed))
        except (TypeError, ValueError, RuntimeError, AssertionError):
            return  # it does not take them
        if not _alike(told, expected):
            return
        untold, untold_changed = (self._function(*args, **kwargs) for args, kwargs in (given, changed))
        without = _difference(untold, untold_changed, dims[1], others)
        self.agreed = without > 0 and _difference(told, told_changed, dims[1], others) <= _LEAKS * without


def _with_halved_rows(given: Any, dims: Dims, rows: slice) -> Any:
    """Arguments whose values are halved in `rows`, where they count tokens."""
    tensors, leaves, spec = tensors_of(given)
    halved = []
    for path, x in tensors.items():
        if dims.get(path) and x.is_floating_point():
            x = x.clone()
            narrow(x, dims[path], rows).mul_(0.5)
        halved.append(x)
    in_order = iter(halved)
    return tree_unflatten([next(in_order) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)


def _difference(one: Any, other: Any, dims: Dims, rows: slice) -> float:
    """The largest in `rows`, of the largest value of each result that counts tokens."""
    ours, theirs = (tensors_of(cut(tree, dims, rows))[0] for tree in (one, other))
    relative = [
        (ours[path].float() - theirs[path].float()).abs().max() / ours[path].float().abs().max().clamp(min=1e-30)
        for path in ours
        if dims[path]
    ]
    return float(torch.stack(relative).max())


def _alike(got: Any, want: Any) -> bool:
    """The same tensors with the same values, but for roundings."""
    ours, theirs = tensors_of(got)[0], tensors_of(want)[0]
    return ours.keys() == theirs.keys() and all(_close(ours[path], theirs[path]) for path in theirs)


def _close(got: torch.Tensor, want: torch.Tensor) -> bool:
    if got.shape != want.shape or not want.is_floating_point():
        return got.shape == want.shape and bool((got == want).all())
    return bool(((got - want).abs().max() <= _AGREES * want.abs().max()).item())
