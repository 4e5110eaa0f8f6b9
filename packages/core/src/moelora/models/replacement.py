"""Whole modules of some adapters: run once more with each adapter's own weight, on the rows of its tokens alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_unflatten

from moelora.adapters.bank import AdapterBank
from moelora.errors import AdapterError
from moelora.models.context import ForwardContext, current_context, part_context
from moelora.models.cuts import tensors_of
from moelora.models.weak_methods import weakly

if TYPE_CHECKING:
    from moelora.models.lora import InstalledLora


def install_replacement(module: torch.nn.Module, name: str, bank: AdapterBank, installed: InstalledLora) -> None:
    """Takes over the forward of `module`.

    Installed last: the rows of a slot that replaces a target have no factors there, so they skip its LoRA.
    """
    module.forward = _Replacement(module, name, bank, installed)


class _Replacement:
    """The forward of a replaced module: that of the base, and over it the rows of each slot that has its own weight.

    Which dimension of each tensor counts tokens is seen at the first call, for which the engine takes a length that no
    other dimension has. Norms may see `[1, T, heads, D]`, `[1, heads, T, D]` or `[T·heads, D]`.
    """

    def __init__(self, module: torch.nn.Module, name: str, bank: AdapterBank, installed: InstalledLora) -> None:
        self._name = name
        self._bank = bank
        self._installed = installed
        self._weight = module.get_parameter("weight")
        self._base = weakly(module.forward)
        self._plain = weakly(MethodType(type(module).forward, module))
        self._dims: dict[str, int | None] = {}
        self._has_parts = next(module.children(), None) is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._installed.called.add(self._name)
        context = current_context()
        meta = context.meta
        out = self._base(*args, **kwargs)
        tokens = meta.token_slot_T.shape[0]
        self._learn((args, kwargs), "in", tokens)
        self._learn(out, "out", tokens)
        if not meta.has_lora:
            several = context.segments is not None and len(context.segments.lengths or ()) > 1
            if several and self._installed.checking:
                self._check_rows((args, kwargs), out, tokens)
            return out
        for slot, weight in self._bank.replaced_slots(self._name):
            rows = (meta.token_slot_T == slot).nonzero()[:, 0]
            if rows.shape[0] == tokens:
                return self._run(weight, args, kwargs)
            if rows.numel():
                args_of_rows, kwargs_of_rows = self._take((args, kwargs), rows, tokens)
                with self._parts_see(rows, context):
                    part = self._run(weight, args_of_rows, kwargs_of_rows)
                self._put(out, part, rows, tokens)
        return out

    def _parts_see(self, rows: torch.Tensor, context: ForwardContext) -> AbstractContextManager[None]:
        """For a run on `rows` alone, of which the module's parts may be adapted or replaced themselves."""
        if not self._has_parts:
            return nullcontext()
        meta = context.backend.rows_metadata(context.meta.token_slot_T[rows], has_lora=True)
        return part_context(ForwardContext(backend=context.backend, meta=meta, segments=None))

    def _check_rows(self, given: Any, out: Any, tokens: int) -> None:
        """Raises `AdapterError` if requests of two adapters could not be told apart here."""
        for side, tree in (("in", given), ("out", out)):
            for path, x in tensors_of(tree)[0].items():
                known = side + path in self._dims  # unless another dimension has as many as the batch has tokens
                if known and (side == "out" or self._dims[side + path] is not None):
                    self._rows_of(x, side + path, tokens)

    def _run(self, weight: torch.Tensor, args: Any, kwargs: Any) -> Any:
        own = self._weight.data
        self._weight.data = weight
        try:
            return self._plain(*args, **kwargs)
        finally:
            self._weight.data = own

    def _learn(self, tree: Any, side: str, tokens: int) -> None:
        """Remembers which dimension of each tensor of `tree` counts tokens, None where none does."""
        if tokens == 1:  # as many as a batch dimension has; nothing is ever cut then
            return
        for path, x in tensors_of(tree)[0].items():
            dims = [i for i, size in enumerate(x.shape) if size == tokens]
            if not dims and x.ndim and x.shape[0] and x.shape[0] % tokens == 0:
                dims = [0]
            if len(dims) < 2:
                self._dims.setdefault(side + path, dims[0] if dims else None)

    def _rows_of(self, x: torch.Tensor, key: str, tokens: int) -> tuple[torch.Tensor, int]:
        """A view of `x` with a dimension of `tokens` alone, and that dimension."""
        dim = self._dims.get(key)
        if dim is None or x.shape[dim] % tokens:
            raise AdapterError(
                f"{self._name} sees a tensor of shape {list(x.shape)} in a batch of {tokens} tokens, which cannot be "
                "told apart by adapter; it cannot be replaced"
            )
        return x.unflatten(dim, (tokens, -1)), dim

    def _take(self, given: Any, rows: torch.Tensor, tokens: int) -> Any:
        """The arguments of `rows`. What counts no tokens, as the biases that some routers are given, stays whole."""
        tensors, leaves, spec = tensors_of(given)
        parts = []
        for path, x in tensors.items():
            if self._dims.get("in" + path, 0) is not None:
                view, dim = self._rows_of(x, "in" + path, tokens)
                x = view.index_select(dim, rows).flatten(dim, dim + 1)
            parts.append(x)
        in_order = iter(parts)
        return tree_unflatten([next(in_order) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)

    def _put(self, out: Any, part: Any, rows: torch.Tensor, tokens: int) -> None:
        """Writes `part` over the rows of `out`, through the tuples that routers return."""
        whole, parts = tensors_of(out)[0], tensors_of(part)[0]
        for path, x in whole.items():
            view, dim = self._rows_of(x, "out" + path, tokens)
            view.index_copy_(dim, rows, parts[path].unflatten(dim, (rows.shape[0], -1)))
