"""Adapters of random numbers that take no disk and hardly any memory: all factors are views of one pool."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from moelora.adapters.base import Adapter, Catalogue, Factors, Target, TargetKind
from moelora.errors import ConfigError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The linear layers that a dummy adapter targets, besides all experts."""

_STD = 0.02
"""Of all factors: at rank 16 the delta is then a tenth of the base's own output, at init scale."""


def dummy_adapters(
    catalogue: Catalogue, *, count: int, rank: int, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> dict[str, Adapter]:
    """`count` adapters of `rank` on q, k, v, o and all experts, on the device, no two alike.

    Raises `ConfigError` for a model that has none of these.
    """
    targets = [target for target in catalogue if _is_target(target)]
    if not targets:
        raise ConfigError(
            f"{catalogue.model_type} has no {', '.join(PROJECTIONS)} and no routed experts: nothing to adapt"
        )
    shapes = {target.name: (_a_shape(target, rank), _b_shape(target, rank)) for target in targets}
    largest = max(math.prod(shape) for pair in shapes.values() for shape in pair)
    generator = torch.Generator(device=device).manual_seed(seed)
    # Twice the largest factor: any of them finds room from any place in the first half on.
    pool = torch.empty(2 * largest, dtype=dtype, device=device).normal_(std=_STD, generator=generator)
    places = torch.Generator().manual_seed(seed)

    def view(shape: tuple[int, ...]) -> torch.Tensor:
        start = int(torch.randint(largest + 1, (), generator=places))
        return pool[start : start + math.prod(shape)].view(shape)

    return {
        name: Adapter(
            name=name,
            path=Path(name),
            factors={target: Factors(a=view(a), b=view(b)) for target, (a, b) in shapes.items()},
        )
        for name in (f"dummy-{i}" for i in range(count))
    }


def _is_target(target: Target) -> bool:
    if target.kind is TargetKind.EXPERTS:
        return True
    return target.kind is TargetKind.LINEAR and target.name.rpartition(".")[2] in PROJECTIONS


def _a_shape(target: Target, rank: int) -> tuple[int, ...]:
    return (*_experts(target), rank, target.in_features)


def _b_shape(target: Target, rank: int) -> tuple[int, ...]:
    return (*_experts(target), target.out_features, rank)


def _experts(target: Target) -> tuple[int, ...]:
    return (target.num_experts,) if target.kind is TargetKind.EXPERTS else ()
