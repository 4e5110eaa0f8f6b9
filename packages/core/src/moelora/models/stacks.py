"""Requests of like length side by side, along the batch dimension that a packed row leaves at 1: a few calls for all.

Right for whatever looks at earlier rows alone, as a convolution or a recurrence does: a request's own rows come first,
and what is computed for the rows that fill it up is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from moelora.models.context import ForwardContext, Segments, current_context, part_context
from moelora.models.cuts import NotCuttable
from moelora.models.together import Together


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """B requests filled up to L rows. rows_N: int64 on the device, the row of the batch at each of the B·L places."""

    count: int
    length: int
    rows_N: torch.Tensor
    context: ForwardContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacking:
    """All requests of a batch. places_T: int64 on the device, where each live row lies in the stacks, end to end."""

    stacks: tuple[Stack, ...]
    places_T: torch.Tensor


def alike_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Requests by number, in groups whose shortest has at least half the rows of the longest: few, at most 2·T rows."""
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not lengths[i]:
            continue
        if not groups or 2 * lengths[i] < longest:
            groups.append([])
            longest = lengths[i]
        groups[-1].append(i)
    return groups


class Stacks(Together):
    """Calls a function for requests of like length at once."""

    def call(self, given: Any, segments: Segments) -> Any:
        stacking = _stacking(segments)
        results = []
        for stack in stacking.stacks:
            args, kwargs = self._stacked(given, stack)
            with part_context(stack.context):
                results.append(self._function(*args, **kwargs))
        return self._unstacked(results, stacking)

    def _stacked(self, given: Any, stack: Stack) -> Any:
        with_paths, spec = tree_flatten_with_path(given)
        leaves = []
        for path, leaf in with_paths:
            dims = self._inputs.get(keystr(path), ()) if isinstance(leaf, torch.Tensor) else ()
            if dims:
                dim = _token_dim(keystr(path), leaf, dims, 1)
                rows = leaf[0].movedim(dim - 1, 0).index_select(0, stack.rows_N)
                leaf = rows.unflatten(0, (stack.count, stack.length)).movedim(1, dim)
            leaves.append(leaf)
        return tree_unflatten(leaves, spec)

    def _unstacked(self, results: list[Any], stacking: Stacking) -> Any:
        with_paths, spec = tree_flatten_with_path(results[0])
        columns = zip(*(tree_flatten_with_path(result)[0] for result in results), strict=True)
        leaves = []
        for (path, leaf), column in zip(with_paths, columns, strict=True):
            if isinstance(leaf, torch.Tensor):
                dims = self._outputs.get(keystr(path), ())
                dim = 0
                rows = []
                for (_, part), stack in zip(column, stacking.stacks, strict=True):
                    dim = _token_dim(keystr(path), part, dims, stack.count)
                    rows.append(part.movedim(dim, 1).flatten(0, 1))
                leaf = torch.cat(rows).index_select(0, stacking.places_T).movedim(0, dim - 1).unsqueeze(0)
            leaves.append(leaf)
        return tree_unflatten(leaves, spec)


def _token_dim(name: str, x: torch.Tensor, dims: tuple[int, ...], batch: int) -> int:
    if len(dims) != 1 or dims[0] == 0 or x.shape[0] != batch:
        raise NotCuttable(f"{name} of shape {list(x.shape)} has no batch dimension beside that of tokens")
    return dims[0]


def _stacking(segments: Segments) -> Stacking:
    """Of the batch with these boundaries; made once a forward, with a single copy to the device."""
    context = current_context()
    key = ("stacks", context.meta.has_lora)
    if key not in segments.cache:
        rows = segments.rows()
        groups = alike_lengths([one.stop - one.start for one in rows])
        places = torch.empty(rows[-1].stop, dtype=torch.int64)
        taken: list[torch.Tensor] = []
        begin = 0
        for group in groups:
            starts = torch.tensor([rows[i].start for i in group])
            lengths = torch.tensor([rows[i].stop - rows[i].start for i in group])
            steps = torch.arange(int(lengths[0]))
            # Filled up with a request's last row: what follows a row does not reach it, and this one is finite.
            taken.append((starts[:, None] + torch.minimum(steps, lengths[:, None] - 1)).flatten())
            for number, i in enumerate(group):
                length = rows[i].stop - rows[i].start
                first = begin + number * int(lengths[0])
                places[rows[i]] = torch.arange(first, first + length)
            begin += taken[-1].shape[0]
        sizes = [places.shape[0], *(one.shape[0] for one in taken)]
        places_T, *on_device = torch.cat([places, *taken]).to(segments.cu_seqlens_S1.device).split(sizes)
        stacks = tuple(_stack(context, len(group), rows_N) for group, rows_N in zip(groups, on_device, strict=True))
        segments.cache[key] = Stacking(stacks=stacks, places_T=places_T)
    made: Stacking = segments.cache[key]
    return made


def _stack(context: ForwardContext, count: int, rows_N: torch.Tensor) -> Stack:
    """The stack, and the context of a forward that holds its rows alone."""
    length = rows_N.shape[0] // count
    boundaries = torch.arange(0, rows_N.shape[0] + 1, length, dtype=torch.int32, device=rows_N.device)
    slots = context.meta.token_slot_T.index_select(0, rows_N)
    return Stack(
        count=count,
        length=length,
        rows_N=rows_N,
        context=ForwardContext(
            backend=context.backend,
            meta=context.backend.rows_metadata(slots, has_lora=context.meta.has_lora),
            segments=Segments(cu_seqlens_S1=boundaries, lengths=(length,) * count, longest=length),
        ),
    )
