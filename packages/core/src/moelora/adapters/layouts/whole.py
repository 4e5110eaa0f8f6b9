"""Tensors stored in full: `modules_to_save` replacements, and copies of base weights that PEFT saves beside LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moelora.adapters.base import Target, TargetKind
from moelora.adapters.layouts.base import Context, Refused

if TYPE_CHECKING:
    from moelora.safetensors_file import TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A tensor stored in full. parameter: the name it has in the model.

    target: what it replaces, or None if it may only be a copy of the base. otherwise: why a tensor that is not equal to
    the base's is refused; empty if it replaces the target then. needs_base: refused as well if the base is not known.
    """

    info: TensorInfo
    parameter: str
    target: Target | None = None
    otherwise: str = ""
    needs_base: bool = False


def plan_plain(info: TensorInfo, name: str, context: Context) -> Whole | None:
    """Plans the tensor of a parameter by its name in the file; None if the model has no such module.

    Raises Refused where the shapes differ.
    """
    module, _, leaf = name.rpartition(".")
    experts = context.resolver.target(name)
    if experts is not None and experts.kind is TargetKind.EXPERTS:
        reason = "replaces routed experts as a whole, which is not supported"
        return Whole(info=info, parameter=experts.name, otherwise=reason, needs_base=True)
    target = context.resolver.target(module)
    parameter = context.resolver.parameter_name(name)
    if target is not None and leaf == "weight" and target.kind is not TargetKind.EXPERTS:
        _check_shape(info, target)
        return Whole(info=info, parameter=parameter, target=target)
    if target is not None or leaf in ("bias", "e_score_correction_bias", "sinks"):
        reason = "replaces a parameter of the base model other than a weight, which is not supported"
        return Whole(info=info, parameter=parameter, otherwise=reason, needs_base=True)
    return None


def plan_copy(info: TensorInfo, name: str, context: Context) -> Whole | None:
    """Plans the copy of a base weight (`X.base_layer.weight`); None if the model has no such module. Raises Refused."""
    module, _, leaf = name.rpartition(".")
    target = context.resolver.target(module)
    if target is None:
        return None
    if leaf == "weight":
        _check_shape(info, target)
    # A bias beside the weight may have been trained; a weight under an adapted layer cannot have been.
    reason = f"is a copy of {target.name} that differs from the base model's: the adapter was trained on another base"
    return Whole(info=info, parameter=f"{target.name}.{leaf}", otherwise=reason, needs_base=leaf != "weight")


def _check_shape(info: TensorInfo, target: Target) -> None:
    if info.shape != target.shape:
        hint = ""
        if target.kind is TargetKind.EMBEDDING or target.name.endswith("lm_head"):
            hint = "; the adapter was made after the vocabulary was resized"
        raise Refused(
            f"tensor {info.name!r} has shape {list(info.shape)}, {target.name} of the base model has "
            f"{list(target.shape)}{hint}"
        )
