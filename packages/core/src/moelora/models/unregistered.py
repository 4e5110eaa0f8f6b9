"""Experts that transformers leaves outside its registry of experts functions, brought in by their form.

Two forms are known: experts that take (x, ids, weights) like the registered ones, and experts that take every expert's
rows one behind the other, already multiplied by their routing weight. Whether that is what a module does, the probe
finds out by comparing with the module's own forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch

from moelora.models.context import current_context, has_context
from moelora.models.experts import attached_slots, experts_weights, is_experts_module
from moelora.models.weak_methods import weakly

_ADOPTED = "_moelora_adopted"
_CHOSEN = "_moelora_chosen_per_token"


def adopt_experts(model: torch.nn.Module, *, on: bool = True) -> None:
    """Sends, in place, experts modules outside the registry to the experts function, or (on=False) no longer."""
    for parent in model.modules():
        for module in parent.children():
            if hasattr(module, _ADOPTED):
                setattr(module, _ADOPTED, on)
            elif on and _has_known_form(module):
                _adopt(module)
                setattr(module, _CHOSEN, getattr(parent, "top_k", None))


def experts_layout(module: torch.nn.Module) -> tuple[str, bool] | None:
    """The first parameter of an experts module by its shapes, and whether both are stored `[E, in, out]`; else None."""
    down = module._parameters.get("down_proj")
    if sum(p is not None and p.ndim == 3 for p in module._parameters.values()) != 2:
        return None
    for name, parts in (("gate_up_proj", 2), ("up_proj", 1)):
        up = module._parameters.get(name)
        if up is None or down is None or up.ndim != 3 or down.ndim != 3:
            continue
        (_, u1, u2), (_, d1, d2) = up.shape, down.shape
        if (u2, u1) == (d1, parts * d2):
            return name, False
        if (u1, u2) == (d2, parts * d1):
            return name, True
    return None


def _has_known_form(module: torch.nn.Module) -> bool:
    if is_experts_module(module) or experts_layout(module) is None or not hasattr(module, "act_fn"):
        return False
    return len(inspect.signature(module.forward).parameters) in (1, 3)


def _adopt(module: Any) -> None:
    layout = experts_layout(module)
    assert layout is not None
    up, transposed = layout
    module.has_gate = up == "gate_up_proj"
    module.has_bias = False
    module.is_transposed = transposed
    module.is_concatenated = True
    if module.has_gate and not hasattr(module, "_apply_gate"):
        module._apply_gate = partial(_plain_gate, module.act_fn)
    routed = len(inspect.signature(module.forward).parameters) == 3
    run = _run_routed if routed else _run_presorted
    original = weakly(module.forward)
    setattr(module, _ADOPTED, True)

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not getattr(self, _ADOPTED) or not has_context():
            own: torch.Tensor = original(*args, **kwargs)
            return own
        return run(self, *args, **kwargs)

    module.forward = weakly(MethodType(forward, module))


def _plain_gate(act_fn: Callable[[torch.Tensor], torch.Tensor], rows_PI: torch.Tensor) -> torch.Tensor:
    gate, up = rows_PI.chunk(2, dim=-1)
    return act_fn(gate) * up


def _run_routed(module: Any, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Like a registered one. Ids beyond the second parameter's experts, where the first has more, hand x through."""
    context = current_context()
    up_slots, down_slots = attached_slots(module)
    base = experts_weights(module)
    experts = module.down_proj.shape[0]
    identity = ids_TK >= experts if base.num_experts > experts else None
    if identity is not None:
        base = replace(base, up=base.up[:experts])
    out_TH = context.backend.experts(x_TH, ids_TK, weights_TK, base, up_slots, down_slots, context.meta)
    if identity is None:
        return out_TH
    through_T = (weights_TK.float() * identity).sum(dim=1)
    return out_TH + (x_TH.float() * through_T.unsqueeze(1)).to(out_TH.dtype)


def _run_presorted(module: Any, x_NH: torch.Tensor) -> torch.Tensor:
    """`[E·T, H]`: the rows of each expert, zero where a token did not choose it. The same shape, zero elsewhere.

    Its caller sums over experts, so that the sum of all pairs may stand in the rows of the first one.
    """
    context = current_context()
    up_slots, down_slots = attached_slots(module)
    base = experts_weights(module)
    x_ETH = x_NH.view(base.num_experts, -1, x_NH.shape[-1])
    tokens = x_ETH.shape[1]
    chosen_ET = (x_ETH != 0).any(dim=-1)
    top_k = _chosen_per_token(module, base.num_experts)
    ids_KT = chosen_ET.to(torch.int8).topk(top_k, dim=0).indices
    ones_T1 = torch.ones(tokens, 1, dtype=x_NH.dtype, device=x_NH.device)
    out_ETH = torch.zeros_like(x_ETH)
    rows_T = torch.arange(tokens, device=x_NH.device)
    for ids_T in ids_KT:  # one expert of each token at a time: each has its own input
        x_TH = x_ETH[ids_T, rows_T]
        out_ETH[0] += context.backend.experts(
            x_TH, ids_T.unsqueeze(1), ones_T1, base, up_slots, down_slots, context.meta
        )
    return out_ETH.view_as(x_NH)


def _chosen_per_token(module: Any, experts: int) -> int:
    """As its parent says; else any expert may be among them."""
    chosen = getattr(module, _CHOSEN)
    return chosen if isinstance(chosen, int) else experts
