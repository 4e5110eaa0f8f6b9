"""Token mixers that know nothing of requests: within a packed forward they are called once for each request.

A convolution, a recurrence, an indexer that counts the slots of the row: everything around them stays packed. Which
ones they are, the probe finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from moelora.errors import CheckpointError
from moelora.models.context import ForwardContext, GraphBreak, Segments, current_context, has_context, part_context
from moelora.models.cuts import Dims, Joined, NotCuttable, cut, tensors_of

_WRAPPED = "_moelora_looped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A class of modules that is called once per request. inputs, outputs: where its tensors count tokens."""

    class_name: str
    inputs: Dims = field(default_factory=dict)
    outputs: Dims = field(default_factory=dict)


def install_loops(model: torch.nn.Module, loops: Sequence[Loop]) -> None:
    """Wraps, in place, every module of the classes in `loops`."""
    by_class = {loop.class_name: loop for loop in loops}
    for module in model.modules():
        loop = by_class.get(type(module).__name__)
        if loop is not None and not is_looped(module):
            _wrap(module, loop)


def remove_loops(model: torch.nn.Module) -> None:
    """Undoes `install_loops`."""
    for module in model.modules():
        if is_looped(module):
            del module.forward
            delattr(module, _WRAPPED)


def is_looped(module: torch.nn.Module) -> bool:
    """True for modules that are called once per request."""
    return hasattr(module, _WRAPPED)


def _wrap(module: torch.nn.Module, loop: Loop) -> None:
    original = module.forward
    state = _State(module)
    forms: dict[int, Joined] = {}

    def one(context: ForwardContext, args: Any, kwargs: Any) -> Any:
        state.restore()
        with part_context(context):
            return original(*args, **kwargs)

    def over_requests(segments: Segments, given: Any, joined: Joined | None) -> Joined:
        """Calls the module for each request; writes into `joined`, or into a new whole."""
        for rows, context in current_context().alone(segments):
            args, kwargs = cut(given, loop.inputs, rows)
            part = one(context, args, kwargs)
            if joined is None:
                joined = Joined(part, loop.outputs, _tokens(given, loop.inputs))
            joined.put(rows, part)
        assert joined is not None, "a batch without requests"
        return joined

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not has_context() or (context := current_context()).segments is None:
            return original(*args, **kwargs)
        given = (args, kwargs)
        try:
            if context.graph_break is None:
                if len(context.segments.rows()) == 1 and _is_whole(context.segments, given, loop.inputs):
                    state.restore()
                    return original(*args, **kwargs)
                return over_requests(context.segments, given, None).result
            tokens = _tokens(given, loop.inputs)
            if tokens not in forms:  # a warm-up run, before anything is captured
                joined = over_requests(context.graph_break.segments, given, None)
                forms[tokens] = joined.form()
                return joined.result
        except NotCuttable as error:
            raise CheckpointError(f"{type(module).__name__} cannot be called once per request: {error}") from error
        return _outside_graph(context.graph_break, over_requests, given, forms[tokens])

    setattr(module, _WRAPPED, True)
    module.forward = forward


def _outside_graph(
    graph_break: GraphBreak, over_requests: Callable[[Segments, Any, Joined | None], Joined], given: Any, form: Joined
) -> Any:
    leaves, spec = tree_flatten(given)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    inputs = [leaves[i] for i in places]
    # Zeroed inside the graph: rows behind the live ones would else hand old values to the next part.
    outputs = form.zeros(inputs[0].device)
    # Nothing that `work` keeps may hold the graph's memory, or every layer would have its own.
    plain = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def work(segments: Segments, *tensors: torch.Tensor) -> None:
        filled = list(plain)
        for place, tensor in zip(places, tensors[len(outputs) :], strict=True):
            filled[place] = tensor
        over_requests(segments, tree_unflatten(filled, spec), form.over(tensors[: len(outputs)]))

    graph_break.run(work, [*outputs, *inputs])
    return form.over(outputs).result


def _tokens(given: Any, dims: Dims) -> int:
    """The length of the row, from any tensor that counts it."""
    tensors, _, _ = tensors_of(given)
    for path, x in tensors.items():
        if dims.get(path):
            return x.shape[dims[path][0]]
    raise NotCuttable("no tensor among its arguments counts tokens")


def _is_whole(segments: Segments, given: Any, dims: Dims) -> bool:
    return segments.rows()[0] == slice(0, _tokens(given, dims))


class _State:
    """What a module keeps between calls, put back before each: a row must not depend on what ran before."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | torch.Tensor | None)}
        self._buffers: dict[str, torch.Tensor | None] | None = None

    def restore(self) -> None:
        """Sets plain attributes and buffers as they were at the first call."""
        if self._buffers is None:  # not at construction: the model may yet move to its device
            self._buffers = dict(self._module._buffers)
            return
        vars(self._module).update(self._plain)
        self._module._buffers.update(self._buffers)
