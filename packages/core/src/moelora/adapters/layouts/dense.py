"""Layouts D, E and W2: one pair of 2-D factors for a linear layer, a router or the embedding. No experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moelora.adapters.base import Target, TargetKind
from moelora.adapters.layouts.base import Context, Pair, Plan, Reader, Refused, check_widths, put_scaled, rank_of

if TYPE_CHECKING:
    import torch


def plan_dense(pair: Pair, target: Target, context: Context) -> list[Plan]:
    """Plans ΔW = s·B·A for LINEAR and ROUTER, Δrow(id) = s·B·A[:, id] for EMBEDDING. Raises Refused if it misfits."""
    if pair.is_embedding != (target.kind is TargetKind.EMBEDDING):
        wanted = "lora_embedding_A and lora_embedding_B" if target.kind is TargetKind.EMBEDDING else "lora_A and lora_B"
        raise Refused(f"{pair.module}: tensor {pair.a.name!r} does not suit {target.name}, which takes {wanted}")
    rank = rank_of(pair)
    check_widths(pair, target, target.in_features, target.out_features)
    # A matrix that PEFT wrapped as a parameter is matched by the patterns under the parameter's name.
    wrapped = context.config.wraps_parameter(f"{pair.module}.weight")
    scale = context.scale(f"{pair.module}.weight" if wrapped else pair.module, rank)

    def fill(reader: Reader, a: torch.Tensor, b: torch.Tensor) -> None:
        a.copy_(reader.read(pair.a))
        put_scaled(b, reader.read(pair.b), scale)

    plan = Plan(
        target=target,
        layout="E" if pair.is_embedding else "W2" if wrapped else "D",
        a_shape=(rank, target.in_features),
        b_shape=(target.out_features, rank),
        fill=fill,
        sources=(pair.a, pair.b),
        ranks=(rank,),
        scales=(scale,),
    )
    return [plan]
