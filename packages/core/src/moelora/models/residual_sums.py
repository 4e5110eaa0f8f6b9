"""The sums in decoder layers, each taken by the kernel of the norm behind it.

A layer that is nothing but halves, x + f(norm(x)), is recognised by the values of one forward, not by its name: each
half's norm gets the sum so far, f gets what the norm gave, and the layer returns the last sum. Such a layer can leave
that last sum to the norm of the next layer, or to the one behind all layers.

All sums of a stack of layers are taken in one tensor, the one that its first layer is given: a new one for each would
stay as long as the callers hold what they gave or got. Not where that is a piece of another, which has gaps between its
rows, and with one row alone cannot be told from a whole.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from moelora.models.context import current_context
from moelora.models.norms import FusedNorm, fused_norm_of

_HIDDEN = "hidden_states"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """Where an argument of f comes from: the layer's argument `name`. _HIDDEN: what the norm gave. None: it is None."""

    name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Half:
    """x + f(norm(x)). in_tuple: f returns a tuple, whose first is meant."""

    norm: FusedNorm
    f: torch.nn.Module
    args: tuple[_Argument, ...]
    kwargs: dict[str, _Argument]
    in_tuple: bool

    def run(self, normed: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
        """f of what the norm gave. given: the arguments of the layer, by name."""

        def value(argument: _Argument) -> Any:
            if argument.name is None:
                return None
            return normed if argument.name == _HIDDEN else given[argument.name]

        out = self.f(*map(value, self.args), **{name: value(one) for name, one in self.kwargs.items()})
        hidden: torch.Tensor = out[0] if self.in_tuple else out
        return hidden


class _LayerOfHalves:
    """The forward of such a layer. hands_on: it leaves its last sum to the norm that its result goes to."""

    def __init__(self, halves: tuple[_Half, ...], defaults: dict[str, Any], hands_on: bool) -> None:
        self._halves = halves
        self._defaults = defaults
        self._hands_on = hands_on

    def __call__(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        given = {**self._defaults, **kwargs}
        waiting = current_context().waiting
        summand = waiting.take_summand(hidden_states)
        x = hidden_states.contiguous() if summand is not None or hidden_states.shape[-2] > 1 else hidden_states.clone()
        for half in self._halves:
            normed = half.norm.of_sum(x, summand)
            summand = None  # it is in x, and as large
            summand = half.run(normed, given)
            del normed
        assert summand is not None, "a layer without halves"
        if not self._hands_on:
            return x + summand
        waiting.summand = (x, summand)
        return x


class ResidualSums:
    """The layers of halves of a model, and their forwards, which take their places while it is on."""

    def __init__(self, found: Sequence[tuple[torch.nn.Module, _LayerOfHalves]]) -> None:
        self._found = found

    @property
    def labels(self) -> Counter[str]:
        """How many layers of each class there are, for the report."""
        return Counter(f"residual sums {type(layer).__name__}" for layer, _ in self._found)

    def switch(self, on: bool) -> None:
        """Off: the layers' own code runs."""
        for layer, forward in self._found:
            if on:
                layer.forward = forward
            else:
                vars(layer).pop("forward", None)


@contextmanager
def seeing_residual_sums(model: torch.nn.Module) -> Iterator[list[ResidualSums]]:
    """While `model` runs once within it, its layers are watched; then the list holds what was found, switched off."""
    watch = _Watch(model)
    found: list[ResidualSums] = []
    try:
        yield found
    finally:
        watch.end()
    found.append(ResidualSums(watch.layers()))


class _Watch:
    """Hooks on every module that has norms among its children, for one forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._seen: list[_SeenLayer] = []
        self._hooks: list[Any] = []
        self._last: tuple[torch.Tensor, _SeenLayer] | None = None
        """What the layer that ran last returned."""
        for module in model.modules():
            if fused_norm_of(module) is not None:
                self._hooks.append(module.register_forward_pre_hook(self._norm_begins))
            if "forward" not in vars(module) and any(map(fused_norm_of, module.children())):
                self._follow(_SeenLayer(module))

    def end(self) -> None:
        """Watches no more."""
        for hook in self._hooks:
            hook.remove()

    def layers(self) -> list[tuple[torch.nn.Module, _LayerOfHalves]]:
        """The layers of halves, with what takes the place of their forwards."""
        return [
            (seen.layer, _LayerOfHalves(tuple(seen.halves), seen.defaults, seen.is_read_by_norm))
            for seen in self._seen
            if seen.is_of_halves
        ]

    def _follow(self, seen: _SeenLayer) -> None:
        self._seen.append(seen)

        def begins(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs.get(_HIDDEN)
            if self._last is not None and self._last[0] is hidden:
                self._last[1].readers.append(seen)
            seen.begin(args, kwargs)

        def ends(module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            seen.end(result)
            if isinstance(result, torch.Tensor):
                self._last = (result, seen)

        self._hooks += [
            seen.layer.register_forward_pre_hook(begins, with_kwargs=True),
            seen.layer.register_forward_hook(ends, with_kwargs=True),
        ]
        for child in seen.layer.children():
            self._hooks += [
                child.register_forward_pre_hook(seen.child_begins, with_kwargs=True),
                child.register_forward_hook(seen.child_ends, with_kwargs=True),
            ]

    def _norm_begins(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if self._last is not None and args and self._last[0] is args[0] and not self._last[1].readers:
            self._last[1].readers.append(None)


class _SeenLayer:
    """One module that has norms, as one forward of it went."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.layer = layer
        self.halves: list[_Half] = []
        self.readers: list[_SeenLayer | None] = []
        """Who was called with the very tensor that it returned: other layers, or None for a norm in no layer."""
        parameters = list(inspect.signature(type(layer).forward).parameters.values())[1:]
        self.defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        self._broken = not parameters or parameters[0].name != _HIDDEN
        self._ended = False
        self._given: dict[str, Any] = {}
        self._sum: torch.Tensor | None = None
        """Of the halves so far; its own memory, since a layer may add in place."""
        self._normed: tuple[FusedNorm, torch.Tensor, torch.Tensor] | None = None
        """The norm that was called last, its result, and a copy of it; None once f was called with it."""
        self._call: tuple[FusedNorm, tuple[_Argument, ...], dict[str, _Argument]] | None = None
        """What f was called with, until it returns."""

    @property
    def is_of_halves(self) -> bool:
        """Whether that forward was halves and nothing else."""
        return self._ended and not self._broken and bool(self.halves)

    @property
    def is_read_by_norm(self) -> bool:
        """Whether its result went to one norm alone, which can take a sum."""
        return len(self.readers) == 1 and (self.readers[0] is None or self.readers[0].is_of_halves)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The layer is called."""
        hidden = args[0] if args else kwargs.get(_HIDDEN)
        if self._broken or self._ended or len(args) > 1 or not isinstance(hidden, torch.Tensor):
            self._give_up()
        else:
            self._given = {name: value for name, value in {**self.defaults, **kwargs}.items() if name != _HIDDEN}
            self._sum = hidden.clone()

    def child_begins(self, child: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One of its parts is called: a norm with the sum so far, or f with what the norm gave."""
        if self._broken or self._ended:
            return
        norm = fused_norm_of(child)
        if norm is not None:
            plain = len(args) == 1 and not kwargs and self._normed is None and self._call is None
            in_dtype = self._sum is not None and self._sum.dtype is norm.weight.dtype
            if not (plain and in_dtype and _equal(args[0], self._sum)):
                self._give_up()
            return
        arguments = self._arguments(args, kwargs) if self._normed is not None and self._call is None else None
        if arguments is None:
            self._give_up()
        else:
            assert self._normed is not None
            self._call, self._normed = (self._normed[0], *arguments), None

    def child_ends(self, child: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """One of its parts returns."""
        if self._broken or self._ended:
            return
        norm = fused_norm_of(child)
        if norm is not None:
            self._normed = (norm, result, result.clone())
            return
        hidden = result[0] if isinstance(result, tuple) and result else result
        # Zeros would hide whatever the layer multiplies them by.
        if self._call is None or self._sum is None or not _adds(hidden, self._sum):
            self._give_up()
            return
        called_norm, call_args, call_kwargs = self._call
        in_tuple = isinstance(result, tuple)
        self.halves.append(_Half(norm=called_norm, f=child, args=call_args, kwargs=call_kwargs, in_tuple=in_tuple))
        self._sum, self._call = self._sum + hidden, None

    def end(self, result: Any) -> None:
        """The layer returns."""
        if self._normed is not None or self._call is not None or not _equal(result, self._sum):
            self._give_up()
        self._ended, self._sum, self._given = True, None, {}

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[_Argument, ...], dict[str, _Argument]] | None:
        """Where each argument of f comes from; None if one is of f's own making."""
        by_place = [self._source(None, value) for value in args]
        by_name = {name: self._source(name, value) for name, value in kwargs.items()}
        found = [one for one in (*by_place, *by_name.values()) if one is not None]
        takes_norm = sum(one.name == _HIDDEN for one in found) == 1
        if not takes_norm or len(found) < len(by_place) + len(by_name):
            return None
        return tuple(one for one in by_place if one), {name: one for name, one in by_name.items() if one}

    def _source(self, name: str | None, value: Any) -> _Argument | None:
        assert self._normed is not None
        _, normed, copy = self._normed
        if value is normed:
            return _Argument(name=_HIDDEN) if _equal(value, copy) else None
        if name is not None and name in self._given and self._given[name] is value:
            return _Argument(name=name)
        if value is None:
            return _Argument(name=None)
        if isinstance(value, (bool, int, float, str)):  # it may be one of this batch, and the same object none the less
            return None
        return next((_Argument(name=key) for key, given in self._given.items() if given is value), None)

    def _give_up(self) -> None:
        self._broken = True
        self._sum = self._normed = self._call = None


def _equal(x: Any, other: torch.Tensor | None) -> bool:
    return isinstance(x, torch.Tensor) and other is not None and x.dtype is other.dtype and torch.equal(x, other)


def _adds(x: Any, total: torch.Tensor) -> bool:
    same = isinstance(x, torch.Tensor) and x.dtype is total.dtype and x.shape == total.shape
    return same and bool(x.any())
