"""The calls of a packed run, module by module, and which of them mix requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from moelora.models.context import ForwardContext, forward_context, part_context
from moelora.models.cuts import Dims, NotCuttable, cut, learn_dims, merge_dims, narrow, tensors_of
from moelora.models.mixers import Loop


@dataclass(slots=True)
class Call:
    """One call of a module: what it got, what it gave (None if it failed), and the calls around it, innermost first."""

    name: str
    module: nn.Module
    given: Any
    result: Any = None
    finished: bool = False
    mixes: bool = False
    inputs: Dims = field(default_factory=dict)


class Calls:
    """The first call of every module in a packed run, and which of them mix requests."""

    def __init__(self, body: nn.Module, context: ForwardContext, tolerance: float) -> None:
        """context: of the run that is recorded. tolerance: of the largest value of a result."""
        self._tolerance = tolerance
        self._body = body
        self._context = context
        assert context.segments is not None
        self._segments = context.segments
        self._tokens = context.meta.token_slot_T.shape[0]
        self.by_name: dict[str, Call] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records until it is left."""
        hooks = []
        for name, module in self._body.named_modules():
            if name:
                hooks.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
                hooks.append(module.register_forward_hook(self._after(name), with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in self.by_name:
                self.by_name[name] = Call(name, module, copied((args, kwargs)))

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            call = self.by_name[name]
            if not call.finished:
                call.result, call.finished = copied(result), True

        return hook

    def mixing(self) -> list[list[Call]]:
        """For each innermost module that mixes requests: itself and the modules around it, up to the decoder layer."""
        with forward_context(self._context):
            for call in self.by_name.values():
                call.mixes = self._mixes(call)
        chains = []
        for name, call in self.by_name.items():
            inner = any(c.mixes for n, c in self.by_name.items() if n.startswith(f"{name}."))
            if call.mixes and not inner:
                chains.append(self._around(name))
        return chains

    def _around(self, name: str) -> list[Call]:
        chain = []
        while name:
            call = self.by_name.get(name)
            parent = name.rpartition(".")[0]
            if call is not None and not self._is_layer(name):
                chain.append(call)
            name = parent
        return chain

    def _is_layer(self, name: str) -> bool:
        """A decoder layer: calling it once per request would leave nothing packed."""
        parent = name.rpartition(".")[0]
        owner = self._body.get_submodule(parent)
        return isinstance(owner, nn.ModuleList) and "." not in parent

    def _mixes(self, call: Call) -> bool:
        call.inputs = learn_dims(call.given, self._tokens)
        if not any(call.inputs.values()):
            return False
        if not call.finished:
            return True
        try:
            return mixes_requests(call.module, call.given, call.result, self._context, self._tolerance)
        except Exception:  # a module that cannot be called on a part: what is around it may be
            return True

    def loops(self, class_names: set[str]) -> tuple[Loop, ...] | None:
        """How to call the modules of these classes once per request; None if it is not known."""
        found = []
        for class_name in sorted(class_names):
            inputs: Dims = {}
            outputs: Dims = {}
            try:
                for call in self.by_name.values():
                    if type(call.module).__name__ == class_name:
                        inputs = merge_dims(inputs, learn_dims(call.given, self._tokens))
                        outputs = merge_dims(outputs, self._outputs(call))
            except NotCuttable:
                return None
            if not any(inputs.values()) or not any(outputs.values()):
                return None
            found.append(Loop(name=class_name, inputs=inputs, outputs=outputs))
        return tuple(found)

    def _outputs(self, call: Call) -> Dims:
        """Learned from its result, or, where the packed call failed, from the result for one request."""
        if call.finished:
            return learn_dims(call.result, self._tokens)
        rows, context = max(self._context.alone(self._segments), key=lambda one: one[0].stop - one[0].start)
        try:
            args, kwargs = cut(copied(call.given), call.inputs, rows)
            with forward_context(self._context), part_context(context):
                return learn_dims(call.module(*args, **kwargs), rows.stop - rows.start)
        except Exception as error:
            raise NotCuttable(str(error)) from error


def mixes_requests(
    callee: Callable[..., Any], given: Any, result: Any, context: ForwardContext, tolerance: float
) -> bool:
    """Whether a call gives something else when it is made on the rows of each request alone.

    given, result: of the call on the whole row of `context`, which must be the running forward's. Raises whatever the
    callee raises for a part.
    """
    assert context.segments is not None
    tokens = context.meta.token_slot_T.shape[0]
    inputs, outputs = learn_dims(given, tokens), learn_dims(result, tokens)
    together, _, _ = tensors_of(result)
    for rows, part in context.alone(context.segments):
        args, kwargs = cut(copied(given), inputs, rows)
        with part_context(part):
            apart, _, _ = tensors_of(callee(*args, **kwargs))
        for path, whole in together.items():
            if not _alike(apart[path], narrow(whole, outputs[path], rows), bool(outputs[path]), tolerance):
                return True
    return False


def _alike(apart: torch.Tensor, together: torch.Tensor, by_row: bool, tolerance: float) -> bool:
    if apart.shape != together.shape:
        return not by_row
    if not by_row or not apart.numel():
        return True
    if not apart.is_floating_point():
        return bool((apart == together).all())
    scale = float(together.float().abs().nan_to_num(posinf=0.0, neginf=0.0).clamp(max=1e6).max())
    return torch.allclose(apart.float(), together.float(), rtol=0.0, atol=tolerance * scale + 1e-7, equal_nan=True)


def copied(tree: Any) -> Any:
    """The tree with copies of its tensors: modules may write into what they get."""
    return tree_map_only(torch.Tensor, torch.clone, tree)
