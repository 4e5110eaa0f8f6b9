"""RMSNorms by the backend's kernel, which may take in the sum before it or leave itself to the rotary kernel behind it.

Which of them may is found out by `residual_sums` and `rotary`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from moelora.backends.fused_ops import NORM_GATES, NORM_VARIANTS, FusedOps
from moelora.models.context import current_context
from moelora.models.weak_methods import weakly

_Form = TypeVar("_Form")


class FusedNorm:
    """The forward of an RMSNorm with which the kernel agreed.

    left_to_rotary: it returns its input as it is, and the rotary function norms what it is given.
    """

    def __init__(self, module: torch.nn.Module, ops: FusedOps, eps: float, variant: str) -> None:
        self.weight = module.get_parameter("weight")
        self.eps = eps
        self.variant = variant
        self.left_to_rotary = False
        self._ops = ops
        self._original = weakly(module.forward)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype is not self.weight.dtype:  # a model that keeps some of its layers in fp32
            own: torch.Tensor = self._original(hidden_states)
            return own
        waiting = current_context().waiting
        if self.left_to_rotary:
            waiting.norms.append((hidden_states, self))
            return hidden_states
        return self.of_sum(hidden_states, waiting.take_summand(hidden_states))

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x, at once."""
        return self._ops.rms_norm(x, self.weight, self.eps, self.variant)

    def of_sum(self, x: torch.Tensor, summand: torch.Tensor | None) -> torch.Tensor:
        """The norm of x + summand, which is left in x; without a summand of x alone."""
        if summand is None:
            return self.apply(x)
        return self._ops.add_rms_norm(summand, x, self.weight, self.eps, self.variant)


def looks_like_rms_norm(module: torch.nn.Module) -> bool:
    """By its name, and its one weight."""
    weight = getattr(module, "weight", None)
    return "RMSNorm" in type(module).__name__ and isinstance(weight, torch.nn.Parameter) and weight.ndim == 1


def norm_form(
    module: torch.nn.Module, ops: FusedOps, x: torch.Tensor, agree: Callable[[torch.Tensor, torch.Tensor], bool]
) -> tuple[float, str] | None:
    """(eps, variant) with which the kernel gives what `module` gives for x `[1, rows, W]`; None if there is none."""
    eps, weight = _eps(module), module.get_parameter("weight")
    takes_more = len(inspect.signature(module.forward).parameters) > 1  # a gate
    if eps is None or takes_more or weight.dtype != x.dtype:
        return None
    try:
        forms = {(eps, variant): ops.rms_norm(x, weight, eps, variant) for variant in NORM_VARIANTS}
        return _closest(forms, module(x), agree)
    except Exception:  # not the norm that it looks like
        return None


class FusedGatedNorm:
    """The forward of an RMSNorm with a gate behind it, with which the kernel agreed."""

    def __init__(self, module: torch.nn.Module, ops: FusedOps, eps: float, variant: str, kind: str) -> None:
        self._weight = module.get_parameter("weight")
        self._eps = eps
        self._variant = variant
        self._kind = kind
        self._ops = ops
        self._original = weakly(module.forward)

    def __call__(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        alike = gate is not None and gate.shape == hidden_states.shape and gate.dtype is hidden_states.dtype
        if gate is None or not alike or hidden_states.dtype is not self._weight.dtype:
            own: torch.Tensor = self._original(hidden_states, gate)
            return own
        return self._ops.gated_rms_norm(hidden_states, gate, self._weight, self._eps, self._variant, self._kind)


def gated_norm_form(
    module: torch.nn.Module,
    ops: FusedOps,
    x: torch.Tensor,
    gate: torch.Tensor,
    agree: Callable[[torch.Tensor, torch.Tensor], bool],
) -> tuple[float, str, str] | None:
    """(eps, variant, kind) with which the kernel gives what `module` gives for x and gate; None if there is none."""
    eps, weight = _eps(module), module.get_parameter("weight")
    if eps is None or list(inspect.signature(module.forward).parameters)[1:] != ["gate"] or weight.dtype != x.dtype:
        return None
    try:
        forms = {
            (eps, variant, kind): ops.gated_rms_norm(x, gate, weight, eps, variant, kind)
            for variant in NORM_VARIANTS
            for kind in NORM_GATES
        }
        return _closest(forms, module(x, gate), agree)
    except Exception:  # not the norm that it looks like
        return None


def _closest(
    made: Mapping[_Form, torch.Tensor], own: torch.Tensor, agree: Callable[[torch.Tensor, torch.Tensor], bool]
) -> _Form | None:
    """The form whose result agrees with the module's own; None if there is none.

    In 16 bits one that rounds elsewhere may agree up to the last place too, but more rarely gives the very same.
    """
    equal = {form: int((one == own).sum()) for form, one in made.items() if agree(one, own)}
    return max(equal, key=lambda form: equal[form], default=None)


def fused_norm_of(module: Any) -> FusedNorm | None:
    """What took the place of a module's forward, if nothing else did so after it."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, FusedNorm) else None


def _eps(module: torch.nn.Module) -> float | None:
    return next((float(getattr(module, n)) for n in ("variance_epsilon", "eps") if hasattr(module, n)), None)
