"""Routers whose softmax, top k and normalisation one kernel can do, where a model has six of torch's.

A router is what returns (logits, weights, indices) of its one weight's product with the tokens, and agrees with one of
the usual forms on random tokens. All else keeps its own code: sigmoids, groups of experts, biases of the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from moelora.backends.fused_ops import FusedOps


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterForm:
    """top_k: experts of a token. normed: their weights are divided by their sum. dtype: of the weights."""

    top_k: int
    normed: bool
    dtype: torch.dtype


def looks_like_router(module: torch.nn.Module) -> bool:
    """A module with one matrix alone that names how many experts a token takes."""
    parameters = dict(module.named_parameters())
    alone = set(parameters) == {"weight"} and not list(module.children())
    return alone and parameters["weight"].ndim == 2 and hasattr(module, "top_k")


def router_form(
    module: torch.nn.Module,
    ops: FusedOps,
    x_TH: torch.Tensor,
    agree: Callable[[torch.Tensor, torch.Tensor], bool],
) -> RouterForm | None:
    """The form in which the kernel gives what `module` gives for random tokens; None if there is none.

    agree: whether two tensors are equal but for roundings. Of experts with equal logits either may be taken.
    """
    try:
        own = module(x_TH)
    except (AttributeError, IndexError, RuntimeError, TypeError):  # it wants more, or other things
        return None
    if not (isinstance(own, tuple) and len(own) == 3 and all(isinstance(one, torch.Tensor) for one in own)):
        return None
    logits, weights, indices = own
    for normed in (True, False):
        form = RouterForm(top_k=indices.shape[-1], normed=normed, dtype=weights.dtype)
        made = route(module.get_parameter("weight"), ops, form, x_TH)
        if made is None or any(one.shape != other.shape for one, other in zip(made, own, strict=True)):
            return None
        same_choice = torch.equal(logits.gather(1, made[2]), logits.gather(1, indices.long()))
        if torch.equal(made[0], logits) and same_choice and agree(made[1], weights):
            return form
    return None


def route(weight_EH: torch.Tensor, ops: FusedOps, form: RouterForm, hidden_states: torch.Tensor) -> Any:
    """(logits `[T, E]`, weights `[T, k]`, int64 indices `[T, k]`), or None for what the kernel cannot do."""
    logits_TE = functional.linear(hidden_states.reshape(-1, weight_EH.shape[1]), weight_EH)
    chosen = ops.top_k_softmax(logits_TE, form.top_k, normed=form.normed, dtype=form.dtype)
    return None if chosen is None else (logits_TE, *chosen)
