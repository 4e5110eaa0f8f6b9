"""Fused substitutes for small modules of the base: each is used only where it agreed with the module at load.

The modules' own code stays the truth. A substitute runs beside it on random input in the model's dtype; if the two
differ by more than the last place, the original stays and the report says so.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from moelora.backends.base import FusedOps
from moelora.models.context import current_context, has_context
from moelora.models.experts import activation_name
from moelora.models.routers import looks_like_router, route, router_form
from moelora.models.top_k import install_top_k
from moelora.models.weak_methods import weakly

_ROWS = 37
_NORM_VARIANTS = ("model", "float", "one_plus")
_ROTARY = "apply_rotary_pos_emb"
_ORIGINAL = "_moelora_original"
_AGREED = "_moelora_agreed"


@dataclass(slots=True)
class Substitutes:
    """What was put in place, and what was kept, counted by kind and class."""

    used: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, dict[str, int]]:
        """For the report and `moelora env`."""
        return {"used": dict(self.used), "kept": dict(self.kept)}


@torch.inference_mode()
def install_substitutes(model: torch.nn.Module, ops: FusedOps, dtype: torch.dtype, device: torch.device) -> Substitutes:
    """Tries a substitute for every RMSNorm, gated MLP, rotary function and top k of `model`."""
    done = Substitutes()
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    verdicts: dict[Any, Any] = {}
    routers: set[torch.nn.Module] = set()
    for module in model.modules():
        if _looks_like_rms_norm(module):
            _try_norm(module, ops, draw, verdicts, done)
        elif _looks_like_gated_mlp(module):
            _try_gated_mlp(module, ops, draw, verdicts, done)
        elif looks_like_router(module) and _try_router(module, ops, draw, verdicts, done):
            routers.add(module)
    for name in sorted({type(m).__module__ for m in model.modules()}):
        _try_rotary(name, ops, draw, done)
    _try_top_k(model, routers, ops, draw, done)
    return done


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


def _looks_like_rms_norm(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return "RMSNorm" in type(module).__name__ and isinstance(weight, torch.nn.Parameter) and weight.ndim == 1


def _eps(module: torch.nn.Module) -> float | None:
    return next((float(getattr(module, n)) for n in ("variance_epsilon", "eps") if hasattr(module, n)), None)


def _try_norm(
    module: torch.nn.Module,
    ops: FusedOps,
    draw: Callable[..., torch.Tensor],
    verdicts: dict[Any, str | None],
    done: Substitutes,
) -> None:
    eps, weight, label = _eps(module), module.get_parameter("weight"), f"norm {type(module).__name__}"
    takes_more = len(inspect.signature(module.forward).parameters) > 1  # a gate
    if eps is None or takes_more or weight.dtype != draw(1).dtype:
        done.kept[label] += 1
        return
    key = (type(module), eps, weight.shape)
    if key not in verdicts:
        x = draw(1, _ROWS, weight.shape[0]) * 3
        try:
            own = module(x)
            agreeing = [v for v in _NORM_VARIANTS if _agree(ops.rms_norm(x, weight, eps, v), own)]
        except Exception:  # not the norm that it looks like
            agreeing = []
        verdicts[key] = agreeing[0] if agreeing else None
    variant = verdicts[key]
    if variant is None:
        done.kept[label] += 1
        return

    original = weakly(module.forward)

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype is not weight.dtype:  # a model that keeps some of its layers in fp32
            normed: torch.Tensor = original(hidden_states)
            return normed
        return ops.rms_norm(hidden_states, weight, eps, variant)

    module.forward = forward
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
    settings = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
    key = (type(module), weight.shape, *sorted(settings.items()))
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


def _try_rotary(module_name: str, ops: FusedOps, draw: Callable[..., torch.Tensor], done: Substitutes) -> None:
    """The rotary function is a name in the architecture's module: replaced there, for forwards of an engine alone.

    Engines of one process share that name, so each call takes the ops of its own engine, and only for the dtype and
    the kind of device on which they agreed.
    """
    namespace = sys.modules[module_name]
    original = getattr(namespace, _ROTARY, None)
    if original is None:
        return
    # What the comparisons of earlier engines gave, by dtype and kind of device: how often each angle stands, 0 for a
    # function that no kernel replaces.
    agreed: dict[tuple[torch.dtype, str], int] = getattr(original, _AGREED, {})
    original = getattr(original, _ORIGINAL, original)
    label = f"rotary {module_name.rsplit('.', 1)[-1]}"

    def substitute(*args: Any, **kwargs: Any) -> Any:
        own_ops = current_context().backend.fused_ops if has_context() else None
        if own_ops is None or kwargs or len(args) != 4 or args[0].ndim != 4 or args[0].shape[0] != 1:
            return original(*args, **kwargs)
        several_dtypes = any(x.dtype is not args[0].dtype for x in args)
        times = agreed.get((args[0].dtype, args[0].device.type), 0)
        if several_dtypes or not times:
            return original(*args, **kwargs)
        if args[0].stride(-1) != 1 or args[1].stride(-1) != 1:  # no kernel reads heads that are not contiguous
            return original(*args, **kwargs)
        return _rotate(own_ops, *args, times=times)

    setattr(substitute, _ORIGINAL, original)
    setattr(substitute, _AGREED, agreed)
    q = draw(1, 1, 1, 1)
    times = agreed[q.dtype, q.device.type] = _times_of_angles(original, ops, draw)
    setattr(namespace, _ROTARY, substitute if any(agreed.values()) else original)
    (done.used if times else done.kept)[label] += 1


def _times_of_angles(original: Callable[..., Any], ops: FusedOps, draw: Callable[..., torch.Tensor]) -> int:
    """How often each angle stands in the cos and sin of a rotary function: 2, 1 (gpt-oss), 0 if the kernel differs."""
    heads, width = 3, 16
    q, k = draw(1, heads, _ROWS, width), draw(1, 1, _ROWS, width)
    half = draw(1, _ROWS, width // 2).clamp(-1, 1)
    for times in (2, 1):
        cos, sin = torch.cat([half] * times, dim=-1), torch.cat([half.roll(1, dims=1)] * times, dim=-1)
        try:
            own, made = original(q, k, cos, sin), _rotate(ops, q, k, cos, sin, times=times)
            if all(_agree(one, other) for one, other in zip(made, own, strict=True)):
                return times
        except (TypeError, RuntimeError, AssertionError):
            continue
    return 0


def _rotate(
    ops: FusedOps, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, times: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q `[1, Hq, T, D]`, k `[1, Hk, T, D]`, cos and sin `[1, T, times · pairs]`: all angles, or all of them twice."""
    pairs = cos.shape[-1] // times
    q_THD, k_THD = ops.rotary(
        q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0, :, :pairs].to(q.dtype), sin[0, :, :pairs].to(q.dtype)
    )
    return q_THD.transpose(0, 1).unsqueeze(0), k_THD.transpose(0, 1).unsqueeze(0)
