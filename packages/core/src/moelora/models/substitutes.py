"""Fused substitutes for small modules of the base: each is used only where it agreed with the module at load.

The modules' own code stays the truth. A substitute runs beside it on random input in the model's dtype; if the two
differ by more than the last place, the original stays and the report says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from moelora.backends.fused_ops import FusedOps
from moelora.models.convolutions import packed_convolutions
from moelora.models.experts import activation_name
from moelora.models.norms import FusedGatedNorm, FusedNorm, gated_norm_form, looks_like_rms_norm, norm_form
from moelora.models.rotary import install_rotary, modelling_files
from moelora.models.routers import looks_like_router, route, router_form
from moelora.models.top_k import install_top_k

_ROWS = 37


@dataclass(slots=True)
class Substitutes:
    """What was put in place, and what was kept, counted by kind and class."""

    used: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, dict[str, int]]:
        """For the report and `moelora env`."""
        return {"used": dict(self.used), "kept": dict(self.kept)}


@torch.inference_mode()
def install_substitutes(
    model: torch.nn.Module,
    ops: FusedOps,
    dtype: torch.dtype,
    device: torch.device,
    functions: MutableMapping[str, Callable[..., Any]],
) -> Substitutes:
    """Tries a substitute for every RMSNorm, gated MLP, rotary function, convolution and top k of `model`.

    functions: what the model calls in the place of functions of modelling files, by "namespace:name".
    """
    done = Substitutes()
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    verdicts: dict[Any, Any] = {}
    routers: set[torch.nn.Module] = set()
    for module in model.modules():
        if looks_like_rms_norm(module):
            _try_norm(module, ops, draw, verdicts, done)
        elif _looks_like_gated_mlp(module):
            _try_gated_mlp(module, ops, draw, verdicts, done)
        elif looks_like_router(module) and _try_router(module, ops, draw, verdicts, done):
            routers.add(module)
    for namespace in modelling_files(model):
        used = install_rotary(namespace, ops, draw, _agree)
        if used is not None:
            _count(done, used, "rotary", namespace.__name__)
    for name, used in packed_convolutions(functions, ops, draw, _agree):
        _count(done, used, "convolution", name)
    _try_top_k(model, routers, ops, draw, done)
    return done


def _count(done: Substitutes, used: bool, kind: str, namespace: str) -> None:
    (done.used if used else done.kept)[f"{kind} {namespace.rsplit('.', 1)[-1]}"] += 1


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal up to the last place: sums and exponentials may be rounded otherwise than torch's, nothing else may differ.

    16-bit results hide all that but a rare last bit; in fp32 a sum over a row differs by a few units.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    units = 16 if one.dtype is torch.float32 else 2
    got, want = one.float(), other.float()
    scale = want.abs().clamp(min=float(want.abs().mean()))
    return bool(((got - want).abs() <= units * torch.finfo(one.dtype).eps * scale).all())


def _try_top_k(
    model: torch.nn.Module,
    routers: set[torch.nn.Module],
    ops: FusedOps,
    draw: Callable[..., torch.Tensor],
    done: Substitutes,
) -> None:
    """For all but `routers`, which have a kernel of their own.

    Equal to torch's, index by index, where no two are equal; of equals torch leaves open which it takes.
    """
    x, k = draw(_ROWS, 64).float(), 5
    x = x.argsort(-1).argsort(-1) * x.abs().amax(-1, keepdim=True)  # no two of a row are equal
    made, want = ops.top_k(x, k), x.topk(k)
    agrees = made is not None and torch.equal(made[0], want.values) and torch.equal(made[1], want.indices)
    if agrees:
        done.used.update(f"top k {name}" for name in install_top_k(model, ops, skip=routers))
    else:
        done.kept["top k"] += 1


def _try_norm(
    module: torch.nn.Module,
    ops: FusedOps,
    draw: Callable[..., torch.Tensor],
    verdicts: dict[Any, Any],
    done: Substitutes,
) -> None:
    weight = module.get_parameter("weight")
    key = (type(module), weight.shape, weight.dtype, *_settings(module))
    if key not in verdicts:
        x = draw(1, _ROWS, weight.shape[0]) * 3
        verdicts[key] = norm_form(module, ops, x, _agree) or gated_norm_form(module, ops, x, draw(*x.shape), _agree)
    form, label = verdicts[key], f"norm {type(module).__name__}"
    if form is None:
        done.kept[label] += 1
        return
    module.forward = FusedNorm(module, ops, *form) if len(form) == 2 else FusedGatedNorm(module, ops, *form)
    done.used[label] += 1


def _looks_like_gated_mlp(module: torch.nn.Module) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj")
    return hasattr(module, "act_fn") and all(isinstance(getattr(module, p, None), torch.nn.Linear) for p in parts)


def _try_gated_mlp(
    module: Any,
    ops: FusedOps,
    draw: Callable[..., torch.Tensor],
    verdicts: dict[Any, str | None],
    done: Substitutes,
) -> None:
    label = f"gated MLP {type(module).__name__}"
    kind = activation_name(module.act_fn)
    if kind is None:
        done.kept[label] += 1
        return

    gate_proj, up_proj, down_proj = module.gate_proj, module.up_proj, module.down_proj

    def forward(x: torch.Tensor) -> torch.Tensor:
        gate, up = gate_proj(x), up_proj(x)
        hidden = ops.gated_activation(gate.view(-1, gate.shape[-1]), up.view(-1, up.shape[-1]), kind)
        out: torch.Tensor = down_proj(hidden.view(gate.shape))
        return out

    key = (type(module), kind)
    if key not in verdicts:
        x = draw(1, _ROWS, gate_proj.in_features)
        inner = module.act_fn(gate_proj(x)) * up_proj(x)
        gate, up = gate_proj(x)[0], up_proj(x)[0]
        # The module must be what it looks like, and the activation must round alike.
        own = module(x)
        same = isinstance(own, torch.Tensor) and torch.equal(down_proj(inner), own)
        verdicts[key] = kind if same and _agree(ops.gated_activation(gate, up, kind), inner[0]) else None
    if verdicts[key] is None:
        done.kept[label] += 1
        return
    module.forward = forward
    done.used[label] += 1


def _try_router(
    module: torch.nn.Module,
    ops: FusedOps,
    draw: Callable[..., torch.Tensor],
    verdicts: dict[Any, Any],
    done: Substitutes,
) -> bool:
    """True if the kernel took the router's place."""
    label, weight = f"router {type(module).__name__}", module.get_parameter("weight")
    key = (type(module), weight.shape, *_settings(module))
    if key not in verdicts:
        x = draw(_ROWS, weight.shape[1])
        verdicts[key] = router_form(module, ops, x, _agree) if weight.dtype == x.dtype else None
    form = verdicts[key]
    if form is None:
        done.kept[label] += 1
        return False
    module.forward = partial(route, weight, ops, form)
    done.used[label] += 1
    return True


def _settings(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """The plain values that a module holds: two of one class with other ones may compute other things."""
    return sorted((name, value) for name, value in vars(module).items() if isinstance(value, (bool, int, float, str)))
