"""Layouts S and T: 3-D factors over all experts, one of whose expert dimensions may be 1 (shared by all experts)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    import torch

_ORDER = {"gate": 0, "up": 1, "gate_up": 2, "down": 3}


@dataclass(frozen=True, slots=True)
class _Piece:
    pair: Pair
    part: str
    rank: int
    scale: float


def plan_stacked(members: Sequence[tuple[ExpertName, Pair]], targets: Sequence[Target], context: Context) -> list[Plan]:
    """Plans the 3-D parameters of one experts module from stacked factors A `[E|1, r, in]`, B `[E|1, out, r]`.

    A dimension of 1 stays 1 if all parts of the parameter have it, else it is expanded. Raises Refused if a pair does
    not fit.
    """
    pieces: dict[str, list[_Piece]] = {}
    by_target: dict[str, Target] = {}
    for name, pair in members:
        target = part_target(targets, name.part)
        if target is None:
            raise Refused(f"{pair.module}: the experts of the base model have no {name.part} projection")
        rank = rank_of(pair, dims=3)
        for info in (pair.a, pair.b):
            if info.shape[0] not in (1, target.num_experts):
                raise Refused(
                    f"tensor {info.name!r} of shape {list(info.shape)} is for {info.shape[0]} experts, "
                    f"{target.name} has {target.num_experts}"
                )
        check_widths(pair, target, target.in_features, num_rows(part_rows(target, name.part)))
        by_target[target.name] = target
        pieces.setdefault(target.name, []).append(_Piece(pair, name.part, rank, context.scale(pair.module, rank)))
    return [_plan_target(by_target[name], found) for name, found in pieces.items()]


def _plan_target(target: Target, pieces: Sequence[_Piece]) -> Plan:
    parts = [piece.part for piece in pieces]
    if len(set(parts)) < len(parts) or ("gate_up" in parts and len(parts) > 1):
        raise Refused(f"{target.name}: a projection is given twice, as {', '.join(p.pair.module for p in pieces)}")
    ordered = sorted(pieces, key=lambda piece: _ORDER[piece.part])
    rank = sum(piece.rank for piece in ordered)
    experts_a = max(piece.pair.a.shape[0] for piece in ordered)
    experts_b = max(piece.pair.b.shape[0] for piece in ordered)

    def fill(reader: Reader, a: torch.Tensor, b: torch.Tensor) -> None:
        b.zero_()  # outside the blocks
        start = 0
        for piece in ordered:
            columns = slice(start, start + piece.rank)
            a[:, columns] = reader.read(piece.pair.a)
            put_scaled(b[:, part_rows(target, piece.part), columns], reader.read(piece.pair.b), piece.scale)
            start += piece.rank

    shared = any(1 in (piece.pair.a.shape[0], piece.pair.b.shape[0]) for piece in ordered)
    return Plan(
        target=target,
        layout="T" if shared and target.num_experts > 1 else "S",
        a_shape=(experts_a, rank, target.in_features),
        b_shape=(experts_b, target.out_features, rank),
        fill=fill,
        sources=tuple(info for piece in ordered for info in (piece.pair.a, piece.pair.b)),
        ranks=distinct_ranks(piece.rank for piece in ordered),
        scales=distinct(piece.scale for piece in ordered),
    )
