"""Cutting the tensors of a call along the tokens of the row, and joining what the pieces return.

Which dimensions count tokens is learned once, from a call on a row whose length no other dimension has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

Dims = dict[str, tuple[int, ...]]
"""By the path of a tensor within a call's arguments or results: the dimensions that count tokens."""


class NotCuttable(Exception):  # noqa: N818 - not an error of the user's; the probe then looks further up
    """The arguments or the result of a call cannot be told apart into requests."""


def tensors_of(tree: Any) -> tuple[dict[str, torch.Tensor], list[Any], TreeSpec]:
    """The tensors of a tree by path, all its leaves, and its structure."""
    with_paths, spec = tree_flatten_with_path(tree)
    tensors = {keystr(path): leaf for path, leaf in with_paths if isinstance(leaf, torch.Tensor)}
    return tensors, [leaf for _, leaf in with_paths], spec


def learn_dims(tree: Any, tokens: int) -> Dims:
    """The dimensions of size `tokens` of every tensor in `tree`."""
    tensors, _, _ = tensors_of(tree)
    return {path: tuple(i for i, n in enumerate(x.shape) if n == tokens) for path, x in tensors.items()}


def merge_dims(known: Dims, more: Dims) -> Dims:
    """Both, for calls of one class. Raises `NotCuttable` where they disagree."""
    for path, dims in more.items():
        if known.get(path, dims) != dims:
            raise NotCuttable(f"{path} counts tokens in other dimensions elsewhere")
    return known | more


def cut(tree: Any, dims: Dims, rows: slice) -> Any:
    """`tree` with every tensor narrowed to `rows`. Raises `NotCuttable` for a tensor that `dims` does not know."""
    with_paths, spec = tree_flatten_with_path(tree)
    leaves = []
    for path, leaf in with_paths:
        if isinstance(leaf, torch.Tensor):
            name = keystr(path)
            if name not in dims:
                raise NotCuttable(f"a tensor {name} of shape {list(leaf.shape)} that the probe has not seen")
            leaf = narrow(leaf, dims[name], rows)
        leaves.append(leaf)
    return tree_unflatten(leaves, spec)


def narrow(x: torch.Tensor, dims: Sequence[int], rows: slice) -> torch.Tensor:
    """The part of `x` that belongs to `rows`, in every one of `dims`."""
    for dim in dims:
        x = x.narrow(dim, rows.start, rows.stop - rows.start)
    return x


class Joined:
    """The result of a call on a row of `tokens` tokens, put together from results on parts of it.

    Rows that no part covers are zero. What does not count tokens is taken from the last part.
    """

    def __init__(self, like: Any, dims: Dims, tokens: int) -> None:
        """like: the result of any one part."""
        with_paths, self._spec = tree_flatten_with_path(like)
        self._dims = dims
        self._leaves: list[Any] = []
        self._paths = [keystr(path) for path, _ in with_paths]
        for name, (_, leaf) in zip(self._paths, with_paths, strict=True):
            if self._moves(name, leaf):
                shape = [tokens if i in dims[name] else n for i, n in enumerate(leaf.shape)]
                leaf = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
            self._leaves.append(leaf)

    def put(self, rows: slice, part: Any) -> None:
        """Writes the result of one part. Raises `NotCuttable` if it is of another form."""
        with_paths, spec = tree_flatten_with_path(part)
        if spec != self._spec:
            raise NotCuttable("the results of two requests have different forms")
        for i, (name, (_, leaf)) in enumerate(zip(self._paths, with_paths, strict=True)):
            if self._moves(name, leaf) != self._moves(name, self._leaves[i]):
                raise NotCuttable(f"{name} is a tensor in the results of some requests alone")
            if self._moves(name, leaf):
                narrow(self._leaves[i], self._dims[name], rows).copy_(leaf)
            else:
                self._leaves[i] = leaf

    @property
    def moving(self) -> list[torch.Tensor]:
        """The tensors that count tokens, in a fixed order."""
        return [leaf for name, leaf in zip(self._paths, self._leaves, strict=True) if self._moves(name, leaf)]

    @property
    def result(self) -> Any:
        """The whole."""
        return tree_unflatten(self._leaves, self._spec)

    def over(self, moving: Sequence[torch.Tensor]) -> Joined:
        """The same form over other memory, for the tensors of `moving`."""
        other = object.__new__(Joined)
        other._spec, other._dims, other._paths = self._spec, self._dims, self._paths
        given = iter(moving)
        other._leaves = [
            next(given) if self._moves(name, leaf) else leaf
            for name, leaf in zip(self._paths, self._leaves, strict=True)
        ]
        return other

    def _moves(self, name: str, leaf: Any) -> bool:
        """Whether a leaf counts tokens. The same place of a result may be None in another layer of the same class."""
        return isinstance(leaf, torch.Tensor) and bool(self._dims.get(name))

    def form(self) -> Joined:
        """The form alone: nothing that counts tokens is kept in memory."""
        return self.over([x.to("meta") for x in self.moving])

    def zeros(self, device: torch.device) -> list[torch.Tensor]:
        """Zeroed tensors for `over`."""
        return [torch.zeros_like(x, device=device) for x in self.moving]
