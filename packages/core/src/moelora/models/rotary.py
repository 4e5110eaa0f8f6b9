"""The rotary function of modelling files by the backend's kernel, together with the norms of queries and keys.

It is a name in the architecture's module: replaced there, for forwards of an engine alone. Engines of one process share
that name, so each call takes the ops of its own engine, and only for the dtype and the kind of device on which they
agreed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from moelora.backends.fused_ops import FusedOps, HeadNorms
from moelora.models.context import current_context, has_context, rotary_told_to, tell_of_rotary
from moelora.models.norms import FusedNorm, fused_norm_of

_NAME = "apply_rotary_pos_emb"
_ORIGINAL = "_moelora_original"
_AGREED = "_moelora_agreed"

_Agree = Callable[[torch.Tensor, torch.Tensor], bool]


def install_rotary(namespace: Any, ops: FusedOps, draw: Callable[..., torch.Tensor], agree: _Agree) -> bool | None:
    """Puts the kernel in the place of a module's rotary function if they agree on what `draw` draws, and says so.

    None if the module has no such function.
    """
    original = getattr(namespace, _NAME, None)
    if original is None:
        return None
    # What the comparisons of earlier engines gave, by dtype and kind of device: how often each angle stands, 0 for a
    # function that no kernel replaces.
    agreed: dict[tuple[torch.dtype, str], int] = getattr(original, _AGREED, {})
    original = getattr(original, _ORIGINAL, original)

    def substitute(*args: Any, **kwargs: Any) -> Any:
        own_ops = current_context().backend.fused_ops if has_context() else None
        if own_ops is None or len(args) < 2:
            return original(*args, **kwargs)
        tell_of_rotary(args[0], args[1])
        q_norm, k_norm = (_take_norm(x) for x in args[:2])
        times = 0 if kwargs or not _fits(args) else agreed.get((args[0].dtype, args[0].device.type), 0)
        if times and q_norm is not None and k_norm is not None and _alike(q_norm, k_norm):
            norms = HeadNorms(
                q_weight_D=q_norm.weight, k_weight_D=k_norm.weight, eps=q_norm.eps, variant=q_norm.variant
            )
            return rotate(own_ops, *args, times=times, norms=norms)
        q, k = (x if norm is None else norm.apply(x) for norm, x in ((q_norm, args[0]), (k_norm, args[1])))
        return rotate(own_ops, q, k, *args[2:], times=times) if times else original(q, k, *args[2:], **kwargs)

    setattr(substitute, _ORIGINAL, original)
    setattr(substitute, _AGREED, agreed)
    q = draw(1, 1, 1, 1)
    times = agreed[q.dtype, q.device.type] = times_of_angles(original, ops, draw, agree)
    setattr(namespace, _NAME, substitute if any(agreed.values()) else original)
    return bool(times)


class NormsBeforeRotary:
    """Norms of queries and keys that are left to the rotary kernel while it is on."""

    def __init__(self, norms: Sequence[tuple[str, FusedNorm]]) -> None:
        """norms: each with the name of its module's class."""
        self._norms = norms

    @property
    def labels(self) -> Counter[str]:
        """How many norms of each class there are, for the report."""
        return Counter(f"norms before rotary {name}" for name, _ in self._norms)

    def switch(self, on: bool) -> None:
        """Off: each norm runs by itself."""
        for _, norm in self._norms:
            norm.left_to_rotary = on


@contextmanager
def seeing_norms_before_rotary(model: torch.nn.Module) -> Iterator[list[NormsBeforeRotary]]:
    """While `model` runs once within it, its norms are watched; then the list holds those whose only result went to a
    rotary function, switched off."""
    named = {norm: type(m).__name__ for m in model.modules() if (norm := fused_norm_of(m)) is not None}
    results: list[tuple[torch.Tensor, FusedNorm]] = []
    calls: Counter[FusedNorm] = Counter()
    rotated: Counter[FusedNorm] = Counter()

    def norm_ends(module: torch.nn.Module, args: Any, result: torch.Tensor) -> None:
        norm = fused_norm_of(module)
        assert norm is not None
        calls[norm] += 1
        results.append((result, norm))

    def rotary_begins(q: Any, k: Any) -> None:
        norms = [norm for x in (q, k) for heads, norm in results if _is_turned(x, heads)]
        if len(norms) == 2 and _alike(*norms):
            rotated.update(norms)
        results.clear()

    hooks = [m.register_forward_hook(norm_ends) for m in model.modules() if fused_norm_of(m) is not None]
    found: list[NormsBeforeRotary] = []
    try:
        with rotary_told_to(rotary_begins):
            yield found
    finally:
        for hook in hooks:
            hook.remove()
    alone = [norm for norm, times in rotated.items() if times == calls[norm] == 1]
    found.append(NormsBeforeRotary([(named[norm], norm) for norm in alone]))


def modelling_files(model: torch.nn.Module) -> list[Any]:
    """The Python modules in which the classes of `model`'s modules stand."""
    return [sys.modules[name] for name in sorted({type(module).__module__ for module in model.modules()})]


def times_of_angles(
    original: Callable[..., Any], ops: FusedOps, draw: Callable[..., torch.Tensor], agree: _Agree
) -> int:
    """How often each angle stands in the cos and sin of a rotary function: 2, 1 (gpt-oss), 0 if the kernel differs."""
    heads, width, rows = 3, 16, 37
    q, k = draw(1, heads, rows, width), draw(1, 1, rows, width)
    half = draw(1, rows, width // 2).clamp(-1, 1)
    for times in (2, 1):
        cos, sin = torch.cat([half] * times, dim=-1), torch.cat([half.roll(1, dims=1)] * times, dim=-1)
        try:
            own, made = original(q, k, cos, sin), rotate(ops, q, k, cos, sin, times=times)
            if all(agree(one, other) for one, other in zip(made, own, strict=True)):
                return times
        except (TypeError, RuntimeError, AssertionError):
            continue
    return 0


def rotate(
    ops: FusedOps,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    times: int,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q `[1, Hq, T, D]`, k `[1, Hk, T, D]`, cos and sin `[1, T, times · pairs]`: all angles, or all of them twice."""
    pairs = cos.shape[-1] // times
    q_THD, k_THD = ops.rotary(
        q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0, :, :pairs].to(q.dtype), sin[0, :, :pairs].to(q.dtype), norms
    )
    return q_THD.transpose(0, 1).unsqueeze(0), k_THD.transpose(0, 1).unsqueeze(0)


def _fits(args: tuple[Any, ...]) -> bool:
    """Whether a call has q, k, cos, sin of one dtype, with heads that a kernel can read."""
    if len(args) != 4 or args[0].ndim != 4 or args[0].shape[0] != 1:
        return False
    return all(x.dtype is args[0].dtype for x in args) and args[0].stride(-1) == args[1].stride(-1) == 1


def _take_norm(x: torch.Tensor) -> FusedNorm | None:
    """The norm that was left to whoever is given `x`."""
    waiting = current_context().waiting.norms
    for i, (heads, norm) in enumerate(waiting):
        if _is_turned(x, heads):
            del waiting[i]
            return norm
    return None


def _is_turned(x: Any, heads_1THD: torch.Tensor) -> bool:
    """Whether x is the very memory of heads, as `[1, H, T, D]`."""
    if not isinstance(x, torch.Tensor) or heads_1THD.ndim != 4:
        return False
    turned = heads_1THD.transpose(1, 2)
    return (x.data_ptr(), x.shape, x.stride()) == (turned.data_ptr(), turned.shape, turned.stride())


def _alike(one: FusedNorm, other: FusedNorm) -> bool:
    return (one.eps, one.variant, one.weight.shape) == (other.eps, other.variant, other.weight.shape)
