"""Layouts P and G: a pair of 2-D factors for every projection of every routed expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    rank_of,
)
from moelora.adapters.names import ExpertName

if TYPE_CHECKING:
    import torch

# Where the ranks of a part begin in a fused parameter: gate and up have factors of their own, side by side.
_ORDER = ("gate", "up", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class _Piece:
    pair: Pair
    expert: int
    part: str
    rank: int
    scale: float


def plan_per_expert(
    path: str, members: Sequence[tuple[ExpertName, Pair]], targets: Sequence[Target], context: Context
) -> list[Plan]:
    """Plans the 3-D parameters of one experts module from the pairs of its experts.

    A fused gate-and-up parameter gets rank r_gate + r_up: A stacked, B block-diagonal over gate rows and up rows.
    Experts and projections that the file leaves out, and ranks below the largest one, are zero in B.
    Raises Refused if a pair does not fit.
    """
    pieces: dict[str, list[_Piece]] = {}
    by_target: dict[str, Target] = {}
    layout = "P"
    for name, pair in members:
        target = part_target(targets, name.part)
        if target is None:
            raise Refused(f"{pair.module}: the experts of the base model have no {name.part} projection")
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
        check_widths(pair, target, target.in_features, num_rows(part_rows(target, name.part)))
        piece = _Piece(pair, name.expert, name.part, rank, context.scale(pair.module, rank))
        by_target[target.name] = target
        pieces.setdefault(target.name, []).append(piece)
    return [_plan_target(by_target[name], found, layout) for name, found in pieces.items()]


def _plan_target(target: Target, pieces: Sequence[_Piece], layout: str) -> Plan:
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
    scales = distinct(piece.scale for piece in pieces)
    common_scale = scales[0] if len(scales) == 1 else None

    def fill(read: Read, a: torch.Tensor, b: torch.Tensor) -> None:
        for piece in pieces:
            columns = slice(starts[piece.part], starts[piece.part] + piece.rank)
            a[piece.expert, columns] = read(piece.pair.a)
            rows = b[piece.expert, part_rows(target, piece.part), columns]
            rows.copy_(read(piece.pair.b))
            if common_scale is None:
                rows.mul_(piece.scale)
        if common_scale is not None:  # one pass instead of one per expert
            b.mul_(common_scale)

    return Plan(
        target=target,
        layout=layout,
        a_shape=(target.num_experts, rank, target.in_features),
        b_shape=(target.num_experts, target.out_features, rank),
        fill=fill,
        sources=tuple(info for piece in pieces for info in (piece.pair.a, piece.pair.b)),
        ranks=distinct_ranks(piece.rank for piece in pieces),
        scales=scales,
    )


def _starts(widths: Mapping[str, int]) -> dict[str, int]:
    starts: dict[str, int] = {}
    position = 0
    for part in _ORDER:
        if part in widths:
            starts[part] = position
            position += widths[part]
    return starts
