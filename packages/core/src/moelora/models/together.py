"""Calls of a function for several requests at once, each tried against calls for each alone before it is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from moelora.models.context import Segments
from moelora.models.cuts import Dims, NotCuttable, cut, narrow, tensors_of

_AGREES = 2e-2
"""Of the largest value of a result. Kernels keep 16-bit products or fp32 in TF32."""

_LEAKS = 2e-2
"""Of what a neighbour changes in a call without boundaries; with them it changes nothing but roundings."""


class Together(ABC):
    """A way to call a function for all requests of a row. inputs, outputs: where its tensors count tokens."""

    def __init__(self, function: Callable[..., Any], inputs: Dims, outputs: Dims) -> None:
        self._function = function
        self._inputs = inputs
        self._outputs = outputs
        self.untried = True
        self.agreed = False

    @abstractmethod
    def call(self, given: Any, segments: Segments) -> Any:
        """The result for the live rows of all requests; given: (args, kwargs) of these rows."""

    def try_out(self, given: Any, segments: Segments, expected: Any) -> None:
        """Compares with `expected`, the joined results of single calls, and looks for what neighbours change.

        given: (args, kwargs) of the live rows of several requests. Both looks are needed: a state that decays within a
        few tokens leaks less than a kernel rounds.
        """
        self.untried = False
        first, *_, last = segments.rows()
        changed = _with_halved_rows(given, self._inputs, first)
        others = slice(first.stop, last.stop)
        try:
            together, together_changed = (self.call(one, segments) for one in (given, changed))
        except (NotCuttable, TypeError, ValueError, IndexError, RuntimeError, AssertionError):
            return  # it does not take them
        if not _alike(together, expected):
            return
        mixed, mixed_changed = (self._function(*args, **kwargs) for args, kwargs in (given, changed))
        without = _difference(mixed, mixed_changed, self._outputs, others)
        within = _difference(together, together_changed, self._outputs, others)
        self.agreed = without > 0 and within <= _LEAKS * without


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
