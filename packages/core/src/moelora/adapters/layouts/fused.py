"""Layout F: dense projections that are fused in the file and apart in the model, or the other way round. No experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moelora.adapters.base import Target, TargetKind
from moelora.adapters.layouts.base import (
    Context,
    Pair,
    Plan,
    Reader,
    Refused,
    check_widths,
    distinct,
    distinct_ranks,
    put_scaled,
    rank_of,
)

if TYPE_CHECKING:
    import torch

# Fused in the file: the rows of B belong to these modules, in this order.
_SPLIT = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}

_JOINED = "in_proj_qkv"
_PIECES = ("in_proj_q", "in_proj_k", "in_proj_v")


def split_targets(module: str, context: Context) -> list[Target]:
    """The linear layers of the model whose rows a fused module of the file holds; empty if it is none."""
    parent, _, leaf = module.rpartition(".")
    found = [context.resolver.target(f"{parent}.{part}") for part in _SPLIT.get(leaf, ())]
    linear = [target for target in found if target is not None and target.kind is TargetKind.LINEAR]
    return linear if len(linear) == len(found) else []


def plan_split(pair: Pair, targets: list[Target], context: Context) -> list[Plan]:
    """Plans each of `targets` with all of A and its own rows of B. Raises Refused if the rows do not add up."""
    rank = rank_of(pair)
    total = sum(target.out_features for target in targets)
    if pair.b.shape[0] != total:
        names = " + ".join(target.name.rpartition(".")[2] for target in targets)
        raise Refused(
            f"tensor {pair.b.name!r} of shape {list(pair.b.shape)} has {pair.b.shape[0]} outputs; {names} of the base"
            f" model have {total}"
        )
    scale = context.scale(pair.module, rank)
    plans = []
    start = 0
    for target in targets:
        if pair.a.shape[1] != target.in_features:
            check_widths(pair, target, target.in_features, pair.b.shape[0])
        plans.append(_plan_rows(pair, target, slice(start, start + target.out_features), rank, scale))
        start += target.out_features
    return plans


def _plan_rows(pair: Pair, target: Target, rows: slice, rank: int, scale: float) -> Plan:
    def fill(reader: Reader, a: torch.Tensor, b: torch.Tensor) -> None:
        a.copy_(reader.read(pair.a))
        put_scaled(b, reader.read(pair.b)[rows], scale)

    return Plan(
        target=target,
        layout="F",
        a_shape=(rank, target.in_features),
        b_shape=(target.out_features, rank),
        fill=fill,
        sources=(pair.a, pair.b),
        ranks=(rank,),
        scales=(scale,),
    )


def joined_target(module: str, context: Context) -> Target | None:
    """The model's fused `in_proj_qkv` if `module` is one of its pieces in the file, else None."""
    parent, _, leaf = module.rpartition(".")
    return context.resolver.target(f"{parent}.{_JOINED}") if leaf in _PIECES else None


def plan_joined(target: Target, pairs: Mapping[str, Pair], context: Context) -> list[Plan]:
    """Plans a fused target from its pieces by leaf name: A stacked, B block-diagonal. Raises Refused if they misfit.

    Queries and keys of a gated delta net are equally wide, so any one piece tells the widths of all three.
    """
    given = {leaf: pair.b.shape[0] for leaf, pair in pairs.items() if len(pair.b.shape) == 2}
    key = given.get(_PIECES[0], given.get(_PIECES[1]))
    if key is None:
        key = (target.out_features - given.get(_PIECES[2], 0)) // 2
    widths = dict(zip(_PIECES, (key, key, target.out_features - 2 * key), strict=True))
    pieces: list[tuple[Pair, slice, slice, float]] = []
    ranks: list[int] = []
    position = 0
    for leaf in _PIECES:
        rows = slice(position, position + widths[leaf])
        position += widths[leaf]
        if leaf in pairs:
            rank = rank_of(pairs[leaf])
            check_widths(pairs[leaf], target, target.in_features, widths[leaf])
            columns = slice(sum(ranks), sum(ranks) + rank)
            pieces.append((pairs[leaf], rows, columns, context.scale(pairs[leaf].module, rank)))
            ranks.append(rank)

    def fill(reader: Reader, a: torch.Tensor, b: torch.Tensor) -> None:
        b.zero_()  # outside the blocks
        for pair, rows, columns, scale in pieces:
            a[columns] = reader.read(pair.a)
            put_scaled(b[rows, columns], reader.read(pair.b), scale)

    plan = Plan(
        target=target,
        layout="F",
        a_shape=(sum(ranks), target.in_features),
        b_shape=(target.out_features, sum(ranks)),
        fill=fill,
        sources=tuple(info for pair, *_ in pieces for info in (pair.a, pair.b)),
        ranks=distinct_ranks(ranks),
        scales=distinct(scale for *_, scale in pieces),
    )
    return [plan]
