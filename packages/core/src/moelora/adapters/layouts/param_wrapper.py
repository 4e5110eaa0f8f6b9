"""Layouts W and U: PEFT's ParamWrapper around a 3-D experts parameter, in both orientations and both orders of B."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moelora.adapters.base import Target
from moelora.adapters.layouts.base import Context, Pair, Plan, Reader, Refused, put_scaled

if TYPE_CHECKING:
    import torch

# Experts stored [E, in, out] whose module does not carry the `is_transposed` flag that PEFT looks at.
_UNFLAGGED = ("llama4",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """A wrapped parameter of the file. name: the parameter's name there, by which patterns match it."""

    name: str
    pair: Pair
    target: Target


def assign_parameters(
    path: str, by_depth: Mapping[int, Pair], targets: Sequence[Target], context: Context
) -> list[Wrapped]:
    """Tells which parameter each nested wrapper of the experts module `path` belongs to.

    by_depth: 0 is the outermost wrapper (`experts.lora_A`), 1 the one inside (`experts.base_layer.lora_A`). PEFT nests
    in registration order, first parameter innermost. A lone wrapper is told apart by `target_parameters`, or else by
    its shape. Raises Refused if that leaves a doubt.
    """
    depths = sorted(by_depth, reverse=True)
    if depths != list(range(len(depths) - 1, -1, -1)):
        missing = next(depth for depth in range(depths[0]) if depth not in by_depth)
        raise Refused(
            f"{path}{'.base_layer' * missing}: lora_A and lora_B are missing though a wrapper inside has them"
        )
    names = [f"{path}.{target.name.rpartition('.')[2]}" for target in targets]
    biases = [name for name in names if context.config.wraps_parameter(f"{name}_bias")]
    if biases:
        raise Refused(f"target_parameters includes {biases[0]}_bias: LoRA on biases of experts is not supported")
    listed = [i for i, name in enumerate(names) if context.config.wraps_parameter(name)]
    if len(depths) > len(targets):
        raise Refused(f"{path}: {len(depths)} nested wrappers, the base model has {len(targets)} parameters there")
    if len(listed) == len(depths):
        chosen = listed
    elif len(depths) == len(targets):
        chosen = list(range(len(targets)))
    else:
        chosen = _by_shape(path, by_depth[depths[0]], targets, listed or range(len(targets)))
    return [
        Wrapped(name=names[i], pair=by_depth[depth], target=targets[i]) for depth, i in zip(depths, chosen, strict=True)
    ]


def _by_shape(path: str, pair: Pair, targets: Sequence[Target], candidates: Sequence[int]) -> list[int]:
    fitting = [i for i in candidates if _fits(pair, targets[i], True) or _fits(pair, targets[i], False)]
    if len(fitting) == 1:
        return fitting
    leaves = " or ".join(targets[i].name.rpartition(".")[2] for i in (fitting or candidates))
    verdict = f"fits {leaves} alike" if fitting else f"fits neither {leaves}"
    raise Refused(
        f"{path}: tensor {pair.a.name!r} of shape {list(pair.a.shape)} {verdict}; "
        "list the wrapped parameter in target_parameters"
    )


def plan_param_wrapper(wrapped: Sequence[Wrapped], context: Context) -> list[Plan]:
    """Plans every wrapped parameter of the file at once: its orientation is one for all. Raises Refused."""
    if not wrapped:
        return []
    swapped = _is_swapped(wrapped, context)
    return [_plan(one, swapped, context) for one in wrapped]


def _fits(pair: Pair, target: Target, swapped: bool) -> bool:
    d1, d2 = target.shape[1:]
    into, out = (d2, d1) if swapped else (d1, d2)
    if len(pair.a.shape) != 2 or len(pair.b.shape) != 2:
        return False
    return pair.a.shape[1] == into and pair.b.shape[0] == out


def _is_swapped(wrapped: Sequence[Wrapped], context: Context) -> bool:
    """Whether A belongs to the last dimension of the stored parameter (swapped) or to the middle one (positional)."""
    for one in wrapped:
        _check_fit(one)
    possible = [form for form in (True, False) if all(_fits(one.pair, one.target, form) for one in wrapped)]
    if len(possible) == 1:
        return possible[0]
    if not possible:
        odd = next(one for one in wrapped if not _fits(one.pair, one.target, True))
        raise Refused(
            f"{odd.name}: tensor {odd.pair.a.name!r} of shape {list(odd.pair.a.shape)} has the opposite orientation of "
            "other wrapped parameters in the file"
        )
    # All wrapped parameters are square: only the version tells. formats: 0.19.1 changed it, 0.19.0 for flagged ones.
    version = _parse_version(context.peft_version)
    if version is None:
        raise Refused(
            f"{wrapped[0].name}: its weight is square, so the shapes do not say whether lora_A lies on the input or "
            "the output side, and peft_version is missing in adapter_config.json; add the version that wrote it"
        )
    model_type = context.resolver.catalogue.model_type
    flagged = wrapped[0].target.transposed and not model_type.startswith(_UNFLAGGED)
    if version >= (0, 19, 1):
        return not flagged
    return flagged and version >= (0, 19, 0)


def _check_fit(one: Wrapped) -> None:
    pair, target = one.pair, one.target
    for info in (pair.a, pair.b):
        if len(info.shape) != 2:
            raise Refused(f"tensor {info.name!r} has shape {list(info.shape)}; 2 dimensions are expected here")
    if not _fits(pair, target, True) and not _fits(pair, target, False):
        raise Refused(
            f"{one.name}: lora_A of shape {list(pair.a.shape)} and lora_B of shape {list(pair.b.shape)} do not fit "
            f"{target.name} of shape {list(target.shape)}"
        )
    if pair.a.shape[0] != pair.b.shape[1]:
        raise Refused(
            f"{one.name}: lora_A has {pair.a.shape[0]} rows, lora_B has {pair.b.shape[1]} columns; both must be "
            f"rank × {target.num_experts} experts"
        )
    if pair.a.shape[0] % target.num_experts:
        raise Refused(
            f"{one.name}: lora_A has {pair.a.shape[0]} rows, not a multiple of the base model's "
            f"{target.num_experts} experts"
        )


def _plan(one: Wrapped, swapped: bool, context: Context) -> Plan:
    target, pair = one.target, one.pair
    experts = target.num_experts
    rank = pair.a.shape[0] // experts
    scale = context.scale(one.name, rank)
    grouped = context.b_layout == "grouped_by_expert"
    # Stored [E, out, in]: swapped puts A on the input. Stored [E, in, out]: positional does.
    a_on_input = swapped != target.transposed

    def fill(reader: Reader, a: torch.Tensor, b: torch.Tensor) -> None:
        first = reader.read(pair.a).reshape(experts, rank, -1)
        second = reader.read(pair.b)
        if grouped:
            second = second.reshape(-1, experts, rank).permute(1, 0, 2)
        else:
            second = second.reshape(-1, rank, experts).permute(2, 0, 1)
        if a_on_input:
            a.copy_(first)
            put_scaled(b, second, scale)
        else:
            a.copy_(second.transpose(1, 2))
            put_scaled(b, first.transpose(1, 2), scale)

    return Plan(
        target=target,
        layout="U" if grouped else "W",
        a_shape=(experts, rank, target.in_features),
        b_shape=(experts, target.out_features, rank),
        fill=fill,
        sources=(pair.a, pair.b),
        ranks=(rank,),
        scales=(scale,),
    )


def _parse_version(text: str | None) -> tuple[int, ...] | None:
    numbers = []
    for part in (text or "").split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip(string.digits))]
        if not digits:
            break
        numbers.append(int(digits))
    return (*numbers, 0, 0)[:3] if len(numbers) >= 2 else None
