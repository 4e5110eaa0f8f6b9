"""Adapted linear layers, several of one input at once: q, k, v; gate, up; whatever a model feeds the same tensor.

Which layers share an input is seen, not listed: the first forward after installation shows it. From then on the first
layer of a group that is called computes them all, and the others hand out what is ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from moelora.adapters.base import Target
from moelora.backends.base import DenseSlots, LoraMetadata
from moelora.errors import AdapterError
from moelora.models.context import current_context


@dataclass(eq=False, slots=True)
class _Member:
    """One adapted layer. group: the number of the group that it was last seen in; -1 if it was never called.

    Neither the layer nor its group is held: both hold this, and a model is to be freed with its last reference.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    target: Target
    slots: DenseSlots
    group: int = -1


class Projections:
    """The adapted linear layers of a model: takes over their forwards."""

    def __init__(self, called: set[str]) -> None:
        """called: takes in the name of every layer that the model calls."""
        self.called = called
        self._members: list[_Member] = []
        self._groups: list[list[_Member]] = []
        """Layers that are called with the same tensor, in their order."""
        self._input: torch.Tensor | None = None
        """What the last layer was called with, while groups are learned."""
        self._before = torch.empty(0)
        self._last: _Member | None = None
        self._learning = True
        self._spreads = False
        self.rows_apart = False
        """Whether the model reads outputs whose rows lie apart, as a single product of a group leaves them."""

    def add(self, module: torch.nn.Linear, target: Target, slots: DenseSlots) -> None:
        """Takes over the forward of `module`."""
        member = _Member(module.weight, module.bias, target, slots)
        self._members.append(member)
        module.forward = partial(self._forward, member)  # type: ignore[method-assign]

    def finish(self) -> None:
        """Ends learning after the first forward, and lays the weights of each group behind one another.

        On an accelerator alone: a kernel can then run a group as one product. Each weight stays a parameter of its
        module, as a view, and so do the factors A of the group's slots, which lie behind the weights.
        """
        self._learning, self._input, self._last, self._before = False, None, None, torch.empty(0)
        for number, group in enumerate(self._groups):
            if group[0].group == number and _joins(group[0].weight):  # not called again in another group
                weights, factors = [one.weight for one in group], [one.slots.a_LRI for one in group]
                _join([*weights, *factors] if all(_alike(weights[0], a) for a in factors) else weights)
                biases = [one.bias for one in group if one.bias is not None]
                if len(biases) == len(group):
                    _join(biases)

    @property
    def any_joined(self) -> bool:
        """Whether some weights lie behind one another."""
        return not self._learning and any(_joins(member.weight) for member in self._members)

    @contextmanager
    def spreading(self) -> Iterator[None]:
        """Within it all outputs have rows that lie apart, for a trial."""
        self._spreads = True
        try:
            yield
        finally:
            self._spreads = False

    def _led_by(self, member: _Member) -> list[_Member]:
        """The layers that a call of `member` computes: its group if it is the first of it, else itself alone."""
        group = self._groups[member.group] if member.group >= 0 and not self._learning else [member]
        return group if group[0] is member else [member]

    def _forward(self, member: _Member, x: torch.Tensor) -> torch.Tensor:
        self.called.add(member.target.name)
        if self._learning:
            self._learn(member, x)
        context = current_context()
        ready = context.waiting.take_projection(member, x)
        if ready is not None:
            return ready
        group = self._led_by(member)
        if not x.numel():  # a part of a request that the shortest ones do not have
            return torch.nn.functional.linear(x, member.weight, member.bias)
        x_TI, meta = rows_of(member.target, x)
        outs = context.backend.projections(
            x_TI,
            [one.weight for one in group],
            [one.bias for one in group],
            [one.slots for one in group],
            meta,
            rows_apart=self.rows_apart,
        )
        if self._spreads:
            outs = [_spread(out) for out in outs]
        shaped = [out.view(*x.shape[:-1], out.shape[1]) for out in outs]
        if len(group) > 1:
            context.waiting.projected = (x, dict(zip(group[1:], shaped[1:], strict=True)))
        return shaped[0]

    def _learn(self, member: _Member, x: torch.Tensor) -> None:
        """A layer called with the very tensor that the one before it was called with joins its group."""
        last, before = self._last, self._before
        if last is not None and self._input is x and _alike(last.weight, member.weight) and torch.equal(before, x):
            member.group = last.group
            self._groups[member.group].append(member)
        else:
            member.group = len(self._groups)
            self._groups.append([member])
            # A model may change it in place between two layers.
            self._before = x.clone()
        self._input, self._last = x, member


def rows_of(target: Target, tensor: torch.Tensor) -> tuple[torch.Tensor, LoraMetadata]:
    """Flattens `[1, T, …]` or `[T, …]` to `[T, width]`, and says which slot each row has.

    A module that sees other rows than those of the batch can be adapted only where all are of one request.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    if rows.stride(-1) != 1:  # a state-space model hands over its channels transposed; kernels read whole rows
        rows = rows.contiguous()
    context = current_context()
    meta = context.meta
    if rows.shape[0] == meta.token_slot_T.shape[0]:
        return rows, meta
    if context.segments is None or context.segments.lengths is None or len(context.segments.lengths) > 1:
        raise AdapterError(
            f"{target.name} sees {rows.shape[0]} rows of a batch of {meta.token_slot_T.shape[0]}; it cannot be adapted"
        )
    return rows, context.backend.rows_metadata(meta.token_slot_T[:1].expand(rows.shape[0]), has_lora=meta.has_lora)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and one.device == other.device


def _spread(out_TO: torch.Tensor) -> torch.Tensor:
    """The same rows with gaps between them."""
    wide = out_TO.new_zeros(out_TO.shape[0], 2 * out_TO.shape[1])
    wide[:, : out_TO.shape[1]] = out_TO
    return wide[:, : out_TO.shape[1]]


def _joins(weight: torch.Tensor) -> bool:
    """Whether there is a kernel that runs a group as one product."""
    return weight.device.type != "cpu"


def _join(tensors: Sequence[torch.Tensor]) -> None:
    """Moves tensors of one width, or biases, into one storage, in their order."""
    whole = torch.cat([tensor.data.flatten() for tensor in tensors])
    begin = 0
    for tensor in tensors:
        tensor.data = whole[begin : begin + tensor.numel()].view(tensor.shape)
        begin += tensor.numel()
