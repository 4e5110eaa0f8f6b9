"""A faster `torch.topk` inside routers, where torch's own takes as long as a projection.

Found by reading: the methods that say `topk(`, in whatever class an architecture has them, of a module that holds
experts or stands beside them. Only calls of the usual form are taken, over the last dimension, the largest ones; all
others reach torch. Nothing but routers: where scores are often equal, as those of an attention's indexer after a ReLU,
which of the equals is taken decides what a token sees, and that is torch's to say.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moelora.backends.fused_ops import FusedOps
from moelora.models.experts import is_experts_module
from moelora.models.weak_methods import weakly

_CALL = "topk("
_BEYOND = ("torch.", "transformers.generation.", "transformers.modeling_utils")
"""Modules of classes that are no part of an architecture: generation picks tokens, which is no router's work."""


def install_top_k(model: torch.nn.Module, ops: FusedOps, skip: Collection[torch.nn.Module] = ()) -> list[str]:
    """Wraps every method of `model`'s routers that calls topk; returns the class of each module that has one."""
    modules = [module for module in _around_experts(model) if module not in skip]
    methods = {cls: _methods(cls) for cls in {type(module) for module in modules}}
    for module in modules:
        for name in methods[type(module)]:
            setattr(module, name, _wrapped(weakly(getattr(module, name)), ops))
    return [type(module).__name__ for module in modules if methods[type(module)]]


def _around_experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that hold an experts module, and those beside it."""
    found: dict[torch.nn.Module, None] = {}
    for module in model.modules():
        children = list(module.children())
        if any(is_experts_module(child) for child in children):
            found.update(dict.fromkeys((module, *children)))
    return list(found)


def _methods(cls: type) -> tuple[str, ...]:
    """Names of the methods that a class, or a base of its architecture, defines around a call of topk."""
    bases = [base for base in cls.__mro__ if not base.__module__.startswith(_BEYOND)]
    names = dict.fromkeys(name for base in bases for name, value in vars(base).items() if inspect.isfunction(value))
    return tuple(name for name in names if _calls_top_k(getattr(cls, name)))


def _calls_top_k(function: Any) -> bool:
    try:
        return _CALL in inspect.getsource(function)
    except (OSError, TypeError):  # no source to read
        return False


def _wrapped(original: Callable[..., Any], ops: FusedOps) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        with _TopK(ops):
            return original(*args, **kwargs)

    return method


class _TopK(TorchFunctionMode):
    """Sends `torch.topk` of rows to the kernel that can do it."""

    def __init__(self, ops: FusedOps) -> None:
        self._ops = ops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = None
        if func is torch.topk or func is torch.Tensor.topk:
            made = _by_kernel(self._ops, *args, **kwargs)
        return func(*args, **kwargs) if made is None else made


def _by_kernel(
    ops: FusedOps,
    input: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    **others: Any,
) -> Any:
    """What topk gives for the largest of the last dimension; None for any other call, or what the kernel cannot do.

    A k that is no plain int, such as a tensor, is torch's to read, and one that the dimension has not its to refuse.
    """
    usual = largest and not others and input.numel() and input.ndim > 0 and dim in (-1, input.ndim - 1)
    if not usual or type(k) is not int or not 0 < k <= input.shape[-1]:
        return None
    made = ops.top_k(input.reshape(-1, input.shape[-1]), k)
    if made is None:
        return None
    values, indices = (one.view(*input.shape[:-1], k) for one in made)
    return torch.return_types.topk((values, indices))
