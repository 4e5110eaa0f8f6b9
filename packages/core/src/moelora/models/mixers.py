"""Token mixers that know nothing of requests: within a packed forward they are called for each request apart.

A convolution, a recurrence, an indexer that counts the slots of the row: everything around them stays packed. Which
ones they are, the probe finds out: functions of a modelling file where that is enough, else modules.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from moelora.errors import CheckpointError
from moelora.models.boundaries import Boundaries
from moelora.models.context import GraphBreak, Segments, active_functions, current_context, has_context, part_context
from moelora.models.cuts import Dims, Joined, NotCuttable, cut, tensors_of
from moelora.models.stacks import Stacks
from moelora.models.together import Together
from moelora.models.weak_methods import weakly

_WRAPPED = "_moelora_looped"
_ORIGINAL = "_moelora_original"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What is called once per request: the modules of a class, or, with a namespace, a function of that Python module.

    inputs, outputs: where its tensors count tokens.
    """

    name: str
    namespace: str = ""
    inputs: Dims = field(default_factory=dict)
    outputs: Dims = field(default_factory=dict)


_Shapes = tuple[tuple[str, torch.Size, torch.dtype], ...]


def _shapes_of(given: Any) -> _Shapes:
    """Where the tensors of a call stand among its arguments, and how large they are."""
    return tuple((path, x.shape, x.dtype) for path, x in tensors_of(given)[0].items())


class LoopedCall:
    """Takes the place of a call: makes it for each request of the running forward apart, and joins the results.

    A function is called for several requests at once where that gave the same when it was tried (`together.py`).

    While a breakable graph is captured, the calls run between two of its parts, on the live rows of each batch.
    """

    def __init__(self, original: Callable[..., Any], loop: Loop, prepare: Callable[[], None] = lambda: None) -> None:
        """prepare: called before each call of `original`."""
        self.original = original
        self._loop = loop
        self._prepare = prepare
        self._forms: dict[_Shapes, Joined] = {}
        """What a call returns, by what it was given: a function may be called at several widths."""
        # A module may keep a state between its calls; functions do not.
        ways = (Boundaries, Stacks) if loop.namespace else ()
        self._ways: list[Together] = [way(original, loop.inputs, loop.outputs) for way in ways]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not has_context() or (context := current_context()).segments is None:
            return self.original(*args, **kwargs)
        given = (args, kwargs)
        try:
            if context.graph_break is None:
                if self._is_alone(context.segments, given):
                    self._prepare()
                    return self.original(*args, **kwargs)
                return self._over_requests(context.segments, given, None).result
            shapes = _shapes_of(given)
            if shapes not in self._forms:  # a warm-up run, before anything is captured
                joined = self._over_requests(context.graph_break.segments, given, None)
                self._forms[shapes] = joined.form()
                return joined.result
        except NotCuttable as error:
            raise CheckpointError(f"{self._loop.name} cannot be called once per request: {error}") from error
        return self._outside_graph(context.graph_break, given, self._forms[shapes])

    def _over_requests(self, segments: Segments, given: Any, joined: Joined | None) -> Joined:
        """Calls for each request, or for several at once; writes into `joined`, or into a new whole."""
        live = slice(0, segments.rows()[-1].stop)
        # What is computed for several at once may round by how many they are.
        ways = [] if current_context().backend.batch_invariant else self._ways
        for way in ways:
            if way.agreed:
                return self._put(joined, live, way.call(cut(given, self._loop.inputs, live), segments), given)
        parts = current_context().alone(segments)
        for rows, context in parts:
            args, kwargs = cut(given, self._loop.inputs, rows)
            self._prepare()
            with part_context(context):
                part = self.original(*args, **kwargs)
            joined = self._put(joined, rows, part, given)
        assert joined is not None, "a batch without requests"
        for way in ways if len(parts) > 1 else []:
            if way.untried:
                expected = cut(joined.result, self._loop.outputs, live)
                way.try_out(cut(given, self._loop.inputs, live), segments, expected)
            if way.agreed:
                break
        return joined

    def _put(self, joined: Joined | None, rows: slice, part: Any, given: Any) -> Joined:
        if joined is None:
            joined = Joined(part, self._loop.outputs, self._tokens(given))
        joined.put(rows, part)
        return joined

    def _outside_graph(self, graph_break: GraphBreak, given: Any, form: Joined) -> Any:
        leaves, spec = tree_flatten(given)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        inputs = [leaves[i] for i in places]
        # Zeroed inside the graph: rows behind the live ones would else hand old values to the next part.
        outputs = form.zeros(inputs[0].device)
        # Nothing that `work` keeps may hold the graph's memory, or every layer would have its own.
        plain = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        made = len(outputs)

        def work(segments: Segments, *tensors: torch.Tensor) -> None:
            filled = list(plain)
            for place, tensor in zip(places, tensors[made:], strict=True):
                filled[place] = tensor
            self._over_requests(segments, tree_unflatten(filled, spec), form.over(tensors[:made]))

        graph_break.run(work, [*outputs, *inputs])
        return form.over(outputs).result

    def _tokens(self, given: Any) -> int:
        """The length of the row, from any tensor that counts it."""
        tensors, _, _ = tensors_of(given)
        for path, x in tensors.items():
            if self._loop.inputs.get(path):
                return x.shape[self._loop.inputs[path][0]]
        raise NotCuttable("no tensor among its arguments counts tokens")

    def _is_alone(self, segments: Segments, given: Any) -> bool:
        """Whether one request fills the row."""
        rows = segments.rows()
        return len(rows) == 1 and rows[0] == slice(0, self._tokens(given))


def install_loops(model: torch.nn.Module, loops: Sequence[Loop]) -> None:
    """Wraps, in place, every module of the classes in `loops`. Functions: see `looped_functions`."""
    by_class = {loop.name: loop for loop in loops if not loop.namespace}
    for module in model.modules():
        loop = by_class.get(type(module).__name__)
        if loop is not None and not is_looped(module):
            setattr(module, _WRAPPED, True)
            module.forward = LoopedCall(weakly(module.forward), loop, _State(module).restore)


def remove_loops(model: torch.nn.Module) -> None:
    """Undoes `install_loops`."""
    for module in model.modules():
        if is_looped(module):
            del module.forward
            delattr(module, _WRAPPED)


def is_looped(module: torch.nn.Module) -> bool:
    """True for modules that are called once per request."""
    return hasattr(module, _WRAPPED)


def looped_functions(loops: Sequence[Loop]) -> dict[str, Callable[..., Any]]:
    """Calls to put in the place of functions, by "namespace:name", for `context.row_of`.

    A modelling file's name is replaced once, for all models of the process, by a function that asks the running
    forward; without one, or for a model whose forward says nothing, it is the original.
    """
    calls: dict[str, Callable[..., Any]] = {}
    for loop in loops:
        if loop.namespace:
            namespace = importlib.import_module(loop.namespace)
            found = getattr(namespace, loop.name)
            original = original_of(found)
            if found is original:
                setattr(namespace, loop.name, _dispatched(f"{loop.namespace}:{loop.name}", original))
            calls[f"{loop.namespace}:{loop.name}"] = LoopedCall(original, loop)
    return calls


def original_of(function: Any) -> Any:
    """The function that a name of a modelling file had before it was replaced, if it was."""
    return getattr(function, _ORIGINAL, function)


def _dispatched(key: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        return active_functions().get(key, original)(*args, **kwargs)

    setattr(dispatched, _ORIGINAL, original)
    return dispatched


class _State:
    """What a module keeps between calls, put back before each: a row must not depend on what ran before."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = ref(module)
        self._plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | torch.Tensor | None)}
        self._buffers: dict[str, torch.Tensor | None] | None = None

    def restore(self) -> None:
        """Sets plain attributes and buffers as they were at the first call."""
        module = self._module()
        assert module is not None, "a module is called after its end"
        if self._buffers is None:  # not at construction: the model may yet move to its device
            self._buffers = dict(module._buffers)
            return
        vars(module).update(self._plain)
        module._buffers.update(self._buffers)
