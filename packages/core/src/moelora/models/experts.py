"""The routed experts, plugged into transformers' registry, and what their module tells of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from moelora.backends.base import ExpertSlots, ExpertsWeights, MoeShape
from moelora.errors import CheckpointError
from moelora.models.context import current_context
from moelora.models.weak_methods import weakly

EXPERTS = "moelora"
"""The name under which the experts function is registered."""

_SLOTS = "_moelora_slots"
_WEIGHTS = "_moelora_weights"

# transformers' activation classes and functions, by the name that kernels know them under.
_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "silu": "silu",
    "GELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
    "ReLUSquaredActivation": "relu2",
}


def register_experts() -> None:
    """Adds the experts function to transformers' registry. May be called any number of times."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, moelora_experts)


def is_experts_module(module: torch.nn.Module) -> bool:
    """True for modules that transformers decorates with `use_experts_implementation`."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "down_proj")


def up_parameter(module: torch.nn.Module) -> str:
    """The name of an experts module's first parameter: `gate_up_proj`, or `up_proj` where there is no gate."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def attach_slots(
    module: torch.nn.Module, *, up: ExpertSlots | None, down: ExpertSlots | None, reached: Callable[[], None]
) -> None:
    """Gives an experts module the bank of its two parameters; None where no adapter of the run targets one.

    `reached` is called whenever the experts function runs for this module.
    """
    setattr(module, _SLOTS, (up, down, reached))


def attached_slots(module: torch.nn.Module) -> tuple[ExpertSlots | None, ExpertSlots | None]:
    """The bank of the first and the second parameter. To be asked for only where both are then applied."""
    up, down, reached = getattr(module, _SLOTS, (None, None, None))
    if reached is not None:
        reached()
    return up, down


def moelora_experts(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function: x `[T, H]`, ids `[T, K]`, weights `[T, K]` → `[T, H]`, LoRA included."""
    context = current_context()
    up_slots, down_slots = attached_slots(module)
    return context.backend.experts(
        hidden_states, top_k_index, top_k_weights, experts_weights(module), up_slots, down_slots, context.meta
    )


def experts_weights(module: Any) -> ExpertsWeights:
    """What the module tells of itself, read once. Raises `CheckpointError` for experts split over devices."""
    known = getattr(module, _WEIGHTS, None)
    if known is not None and known.up.data_ptr() == getattr(module, up_parameter(module)).data_ptr():
        return known
    if getattr(module, "_is_expert_parallel", False):
        raise CheckpointError(f"{type(module).__name__} is split over devices; moelora runs whole layers on one device")
    weights = ExpertsWeights(
        up=getattr(module, up_parameter(module)).detach(),
        down=module.down_proj.detach(),
        up_bias=getattr(module, f"{up_parameter(module)}_bias").detach() if module.has_bias else None,
        down_bias=module.down_proj_bias.detach() if module.has_bias else None,
        transposed=module.is_transposed,
        gated=module.has_gate,
        interleaved=not module.is_concatenated,
        activation=weakly(module._apply_gate) if module.has_gate else module.act_fn,
        activation_name=_activation_name(module),
        limit=getattr(module, "limit", None),
        alpha=getattr(module, "alpha", None),
        post_norm=weakly(module.post_expert_norm) if getattr(module, "has_post_expert_norm", False) else None,
    )
    setattr(module, _WEIGHTS, weights)
    return weights


def _activation_name(module: torch.nn.Module) -> str | None:
    """The kernels' name of the activation, or None where only the module's own function is sure to be right."""
    gate = getattr(type(module), "_apply_gate", None)
    if module.has_gate and getattr(gate, "__name__", "") != "_default_apply_gate":
        if type(module).__name__ == "GptOssExperts" and hasattr(module, "alpha") and hasattr(module, "limit"):
            return "gpt_oss"
        return None
    return activation_name(module.act_fn)


def activation_name(act_fn: Any) -> str | None:
    """The kernels' name of one of transformers' activations, or None."""
    return _ACTIVATIONS.get(type(act_fn).__name__) or _ACTIVATIONS.get(getattr(act_fn, "__name__", ""))


def moe_shapes(model: torch.nn.Module, config: Any, ranks: Mapping[str, int]) -> list[MoeShape]:
    """The distinct widths of the model's experts layers. config: its text config. ranks: largest rank by target."""
    names = ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk")
    top_k = next((value for n in names if isinstance(value := getattr(config, n, None), int)), 1)
    shapes = set()
    for name, module in model.named_modules():
        if is_experts_module(module):
            up, down = getattr(module, up_parameter(module)), module.down_proj
            out_dim, in_dim = (2, 1) if module.is_transposed else (1, 2)
            shapes.add(
                MoeShape(
                    num_experts=up.shape[0],
                    top_k=top_k,
                    hidden=up.shape[in_dim],
                    up_out=up.shape[out_dim],
                    inter=down.shape[in_dim],
                    max_rank_up=ranks.get(f"{name}.{up_parameter(module)}", 0),
                    max_rank_down=ranks.get(f"{name}.down_proj", 0),
                )
            )
    return sorted(shapes, key=str)
