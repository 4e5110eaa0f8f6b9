"""Layouts P and G: a pair of 2-D factors for every projection of every routed expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moelora.adapters.base import Target
from moelora.adapters.layouts.base import (
    Context,
    Pair,
    Plan,
    Read,
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

# Where the ranks of a part begin in a fused parameter: gate and up have factors of their own, side by side.
_ORDER = ("gate", "up", "gate_up", "down")


class _Piece(NamedTuple):
    """The pair of one expert's projection, and what is known of it."""

    pair: Pair
    expert: int
    part: str
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class _Part:
    """A projection ("gate", "up", "gate_up" or "down") of an experts module: its parameter, and the rows it fills."""

    target: Target
    rows: slice
    height: int


def plan_per_expert(
    path: str, members: Sequence[tuple[ExpertName, Pair]], targets: Sequence[Target], context: Context
) -> list[Plan]:
    """Plans the 3-D parameters of one experts module from the pairs of its experts.

    A fused gate-and-up parameter gets rank r_gate + r_up: A stacked, B block-diagonal over gate rows and up rows.
    Experts and projections that the file leaves out, and ranks below the largest one, are zero in B.
    Raises Refused if a pair does not fit.
    """
    parts: dict[str, _Part] = {}
    pieces: dict[str, list[_Piece]] = {}
    layout = "P"
    for name, pair in members:
        part = parts.get(name.part) or parts.setdefault(name.part, _find_part(name.part, pair, targets))
        target = part.target
        if name.expert >= target.num_experts:
            raise Refused(
                f"{pair.module}: expert {name.expert} does not exist; {path} has {target.num_experts} experts "
                f"(0..{target.num_experts - 1})"
            )
        if name.numbered_last:
            layout = "G"
        elif name.part == "gate_up" and target.interleaved:
            raise Refused(f"{pair.module}: the row order of a fused gate_up_proj per expert is not known here")
        rank = rank_of(pair)
        check_widths(pair, target, target.in_features, part.height)
        piece = _Piece(pair, name.expert, name.part, rank, context.scale(pair.module, rank))
        pieces.setdefault(target.name, []).append(piece)
    by_name = {part.target.name: part.target for part in parts.values()}
    return [_plan_target(by_name[name], found, parts, layout) for name, found in pieces.items()]


def _find_part(part: str, pair: Pair, targets: Sequence[Target]) -> _Part:
    target = part_target(targets, part)
    if target is None:
        raise Refused(f"{pair.module}: the experts of the base model have no {part} projection")
    rows = part_rows(target, part)
    return _Part(target, rows, num_rows(rows))


def _plan_target(target: Target, pieces: Sequence[_Piece], parts: Mapping[str, _Part], layout: str) -> Plan:
    seen: dict[tuple[int, str], str] = {}
    widths: dict[str, int] = {}
    for piece in pieces:
        before = seen.setdefault((piece.expert, piece.part), piece.pair.module)
        if before != piece.pair.module or ("gate_up" in widths and piece.part in ("gate", "up")):
            raise Refused(f"{piece.pair.module}: its expert projection is given twice (also as {before})")
        widths[piece.part] = max(widths.get(piece.part, 0), piece.rank)
    if "gate_up" in widths and len(widths) > 1:
        raise Refused(f"{target.name}: given both as a fused gate_up projection and as gate or up")
    starts = _starts(widths)
    rank = sum(widths.values())

    def fill(read: Read, a: torch.Tensor, b: torch.Tensor) -> None:
        groups = _alike(pieces)
        covered = sum(len(group) * group[0].rank for group in groups) == target.num_experts * rank
        if not covered:
            a.zero_()
        if not covered or parts[pieces[0].part].height < target.out_features:
            b.zero_()  # outside the blocks
        for group in groups:
            first = group[0]
            columns = slice(starts[first.part], starts[first.part] + first.rank)
            some = len(group) < target.num_experts
            experts = torch.tensor([piece.expert for piece in group]) if some else None
            rows = parts[first.part].rows
            of_a, of_b = [read(piece.pair.a) for piece in group], [read(piece.pair.b) for piece in group]
            if experts is None:
                torch.stack(of_a, out=a[:, columns])
                put_scaled(b[:, rows, columns], torch.stack(of_b), first.scale)
            else:
                a[experts, columns] = torch.stack(of_a).to(a.dtype)
                b[experts, rows, columns] = (torch.stack(of_b).float() * first.scale).to(b.dtype)

    return Plan(
        target=target,
        layout=layout,
        a_shape=(target.num_experts, rank, target.in_features),
        b_shape=(target.num_experts, target.out_features, rank),
        fill=fill,
        sources=tuple(info for piece in pieces for info in (piece.pair.a, piece.pair.b)),
        ranks=distinct_ranks(piece.rank for piece in pieces),
        scales=distinct(piece.scale for piece in pieces),
    )


def _alike(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Pieces that can be stacked, in the order of their experts: nearly always all of one projection."""
    groups: dict[tuple[object, ...], list[_Piece]] = {}
    for piece in sorted(pieces, key=lambda one: one.expert):
        key = (piece.part, piece.rank, piece.scale, piece.pair.a.dtype, piece.pair.b.dtype)
        groups.setdefault(key, []).append(piece)
    return list(groups.values())


def _starts(widths: Mapping[str, int]) -> dict[str, int]:
    starts: dict[str, int] = {}
    position = 0
    for part in _ORDER:
        if part in widths:
            starts[part] = position
            position += widths[part]
    return starts
