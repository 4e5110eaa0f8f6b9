"""Functions of modelling files that mix requests: a convolution, a scan, a recurrence with projections around it.

Calling one of them once per request leaves its module's projections packed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from types import FunctionType
from typing import Any

from torch import nn

from moelora.models.calls import copied, mixes_requests
from moelora.models.context import ForwardContext, forward_context
from moelora.models.cuts import Dims, NotCuttable, learn_dims, merge_dims
from moelora.models.mixers import Loop, original_of

_MODELLING = "transformers.models."


@dataclass(slots=True)
class _Called:
    """One function: its first call, where all its calls count tokens, and the functions that it calls itself."""

    original: Callable[..., Any]
    given: Any
    result: Any = None
    inputs: Dims = field(default_factory=dict)
    outputs: Dims = field(default_factory=dict)
    within: set[str] = field(default_factory=set)
    uniform: bool = True


@contextmanager
def torch_functions(body: nn.Module) -> Iterator[None]:
    """While it lasts, the modelling files of `body` compute in plain torch what a kernel package would compute.

    transformers puts a package's kernel (flash-linear-attention, causal-conv1d) in the place of a function of its own
    where the package is installed, for every device; on the CPU such a kernel fails.
    """
    replaced = []
    for name in _namespaces(body):
        namespace = sys.modules[name]
        for key, found in list(vars(namespace).items()):
            original = original_of(found)
            if _is_of_a_model(original) and hasattr(original, "__wrapped__"):
                replaced.append((namespace, key, found))
                setattr(namespace, key, _plain(inspect.unwrap(original)))
    try:
        yield
    finally:
        for namespace, key, found in replaced:
            setattr(namespace, key, found)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, without arguments that only its kernels know."""
    known = inspect.signature(function).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())

    @wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{k: v for k, v in kwargs.items() if takes_all or k in known})

    return plain


def _namespaces(body: nn.Module) -> list[str]:
    """The modelling files of the modules of `body`."""
    names = {type(module).__module__ for module in body.modules()}
    return sorted(name for name in names if name.startswith(_MODELLING))


def _is_of_a_model(function: Any) -> bool:
    return isinstance(function, FunctionType) and function.__module__.startswith(_MODELLING)


class FunctionCalls:
    """What a packed run calls of the functions in the modelling files of `body`."""

    def __init__(self, body: nn.Module, context: ForwardContext, tolerance: float) -> None:
        """context: of the run that is recorded. tolerance: of the largest value of a result."""
        self._context = context
        self._tolerance = tolerance
        self._tokens = context.meta.token_slot_T.shape[0]
        self._namespaces = _namespaces(body)
        self._called: dict[str, _Called] = {}
        self._running: list[str] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records until it is left."""
        replaced = []
        for name in self._namespaces:
            namespace = sys.modules[name]
            for key, found in list(vars(namespace).items()):
                original = original_of(found)
                if _is_of_a_model(original):
                    replaced.append((namespace, key, found))
                    setattr(namespace, key, self._recorder(f"{name}:{key}", original))
        try:
            yield
        finally:
            for namespace, key, found in replaced:
                setattr(namespace, key, found)

    def _recorder(self, key: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def recorder(*args: Any, **kwargs: Any) -> Any:
            first = key not in self._called
            if first:
                self._called[key] = _Called(original, copied((args, kwargs)))
            for outer in self._running:
                self._called[outer].within.add(key)
            given = learn_dims((args, kwargs), self._tokens)
            self._running.append(key)
            try:
                result = original(*args, **kwargs)
            finally:
                self._running.pop()
            self._note(self._called[key], given, result, first)
            return result

        return recorder

    def _note(self, called: _Called, given: Dims, result: Any, first: bool) -> None:
        if first:
            called.result = copied(result)
        try:
            called.inputs = merge_dims(called.inputs, given)
            called.outputs = merge_dims(called.outputs, learn_dims(result, self._tokens))
        except NotCuttable:
            called.uniform = False

    def loops(self) -> tuple[Loop, ...]:
        """The innermost functions that mix requests, as calls to make once per request; none if there is none."""
        with forward_context(self._context):
            mixing = {key for key, called in self._called.items() if self._mixes(called)}
        found = []
        for key in sorted(mixing):
            called = self._called[key]
            if not called.within & mixing:
                namespace, _, name = key.partition(":")
                found.append(Loop(name=name, namespace=namespace, inputs=called.inputs, outputs=called.outputs))
        return tuple(found)

    def _mixes(self, called: _Called) -> bool:
        if not called.uniform or not any(called.inputs.values()) or not any(called.outputs.values()):
            return False
        try:
            return mixes_requests(called.original, called.given, called.result, self._context, self._tolerance)
        except Exception:  # one that cannot be called on a part: its module may be
            return False
