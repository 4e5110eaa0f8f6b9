"""Layouts P and G: a pair of 2-D factors for every projection of every routed expert."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from moelora.adapters.base import Target
from moelora.adapters.layouts.base import (
    Context,
    Pair,
    Plan,
    Reader,
    Refused,
    check_widths,
    distinct,
    distinct_ranks,
    num_rows,
    part_rows,
    part_target,
    put_scaled,
    rank_of,
)
from moelora.adapters.names import ExpertName
from moelora.safetensors_file import TensorInfo

# Where the ranks of a part begin in a fused parameter: gate and up have factors of their own, side by side.
_ORDER = ("gate", "up", "gate_up", "down")

Members = Sequence[tuple[ExpertName, Pair]]
"""The pairs of one experts module, in the order of the file."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A projection ("gate", "up", "gate_up" or "down") of an experts module: its parameter, and the rows it fills."""

    name: str
    target: Target
    rows: slice
    height: int


@dataclass(slots=True)
class _Stack:
    """Pairs of one part that differ in nothing but the expert, so that they are read together: nearly always all."""

    part: _Part
    rank: int
    scale: float
    experts: list[int] = field(default_factory=list)
    a: list[TensorInfo] = field(default_factory=list)
    b: list[TensorInfo] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Where a stack lies in its parameter's factors: its rows of B, its ranks; experts in ascending order."""

    rows: slice
    columns: slice
    scale: float
    experts: Sequence[int]
    a: Sequence[TensorInfo]
    b: Sequence[TensorInfo]


def plan_per_expert(path: str, members: Members, targets: Sequence[Target], context: Context) -> list[Plan]:
    """Plans the 3-D parameters of one experts module from the pairs of its experts.

    A fused gate-and-up parameter gets rank r_gate + r_up: A stacked, B block-diagonal over gate rows and up rows.
    Experts and projections that the file leaves out, and ranks below the largest one, are zero in B.
    Raises Refused if a pair does not fit.
    """
    parts: dict[str, _Part] = {}
    ranks: dict[tuple[object, ...], int] = {}  # by part and shapes: what decides whether a pair fits
    stacks: dict[tuple[object, ...], _Stack] = {}
    layout = "P"
    for name, pair in members:
        _, expert, projection, numbered_last = name
        module, a, b, _ = pair
        part = parts.get(projection) or parts.setdefault(projection, _find_part(projection, pair, targets))
        target = part.target
        if expert >= target.num_experts:
            raise Refused(
                f"{module}: expert {expert} does not exist; {path} has {target.num_experts} experts "
                f"(0..{target.num_experts - 1})"
            )
        if numbered_last:
            layout = "G"
        elif projection == "gate_up" and target.interleaved:
            raise Refused(f"{module}: the row order of a fused gate_up_proj per expert is not known here")
        shapes = (projection, a.shape, b.shape)
        rank = ranks.get(shapes)
        if rank is None:
            rank = ranks[shapes] = rank_of(pair)
            check_widths(pair, target, target.in_features, part.height)
        scale = context.scale(module, rank)
        alike = (projection, rank, scale, a.dtype, b.dtype)
        stack = stacks.get(alike) or stacks.setdefault(alike, _Stack(part, rank, scale))
        stack.experts.append(expert)
        stack.a.append(a)
        stack.b.append(b)
    by_target: dict[str, list[_Stack]] = defaultdict(list)
    for stack in stacks.values():
        by_target[stack.part.target.name].append(stack)
    return [_plan_target(found[0].part.target, found, members, parts, layout) for found in by_target.values()]


def _find_part(name: str, pair: Pair, targets: Sequence[Target]) -> _Part:
    target = part_target(targets, name)
    if target is None:
        raise Refused(f"{pair.module}: the experts of the base model have no {name} projection")
    rows = part_rows(target, name)
    return _Part(name, target, rows, num_rows(rows))


def _plan_target(
    target: Target, stacks: Sequence[_Stack], members: Members, parts: Mapping[str, _Part], layout: str
) -> Plan:
    its_own = [(name, pair) for name, pair in members if parts[name.part].target is target]
    _check_once(target, its_own)
    widths: dict[str, int] = {}
    for stack in stacks:
        widths[stack.part.name] = max(widths.get(stack.part.name, 0), stack.rank)
    starts = _starts(widths)
    rank = sum(widths.values())
    covers_a = sum(len(stack.experts) * stack.rank for stack in stacks) == target.num_experts * rank
    covers_b = covers_a and stacks[0].part.height == target.out_features
    blocks = [_block(stack, starts[stack.part.name]) for stack in stacks]

    def fill(reader: Reader, a: torch.Tensor, b: torch.Tensor) -> None:
        if not covers_a:
            a.zero_()
        if not covers_b:
            b.zero_()  # outside the blocks
        for block in blocks:
            _fill_block(reader, block, a[:, block.columns], b[:, block.rows, block.columns])

    return Plan(
        target=target,
        layout=layout,
        a_shape=(target.num_experts, rank, target.in_features),
        b_shape=(target.num_experts, target.out_features, rank),
        fill=fill,
        sources=tuple(info for _, pair in its_own for info in (pair.a, pair.b)),
        ranks=distinct_ranks(stack.rank for stack in stacks),
        scales=distinct(stack.scale for stack in stacks),
    )


def _check_once(target: Target, members: Members) -> None:
    """Raises Refused where a projection of an expert is given twice, by two spellings or fused and apart."""
    given = {(name.part, name.expert) for name, _ in members}
    fused = "gate_up" in {part for part, _ in given}
    if len(given) == len(members) and not (fused and len({part for part, _ in given}) > 1):
        return
    seen: dict[tuple[int, str], str] = {}
    fused = False
    for name, pair in members:
        before = seen.setdefault((name.expert, name.part), pair.module)
        if before != pair.module or (fused and name.part in ("gate", "up")):
            raise Refused(f"{pair.module}: its expert projection is given twice (also as {before})")
        fused = fused or name.part == "gate_up"
    if fused and len({part for part, _ in given}) > 1:
        raise Refused(f"{target.name}: given both as a fused gate_up projection and as gate or up")


def _block(stack: _Stack, start: int) -> _Block:
    experts, of_a, of_b = zip(*sorted(zip(stack.experts, stack.a, stack.b, strict=True)), strict=True)
    columns = slice(start, start + stack.rank)
    return _Block(rows=stack.part.rows, columns=columns, scale=stack.scale, experts=experts, a=of_a, b=of_b)


def _fill_block(reader: Reader, block: _Block, a: torch.Tensor, b: torch.Tensor) -> None:
    """Writes a block to its ranks and rows of all experts: a `[E, r, in]`, b `[E, height, r]`."""
    if len(block.experts) == len(a):
        reader.stack(block.a, a)
        put_scaled(b, reader.stack(block.b), block.scale)
    else:
        some = torch.tensor(block.experts)
        a[some] = reader.stack(block.a).to(a.dtype)
        b[some] = (reader.stack(block.b).float() * block.scale).to(b.dtype)


def _starts(widths: Mapping[str, int]) -> dict[str, int]:
    starts: dict[str, int] = {}
    position = 0
    for part in _ORDER:
        if part in widths:
            starts[part] = position
            position += widths[part]
    return starts
