"""Causal convolutions over tokens, which know nothing of requests, by the backend's kernel, which does.

Modelling files have a function of one name for them. Where the kernel gives what it gives for each request alone, one
call does a whole row, inside a graph too; elsewhere the function is called for each request (`mixers.LoopedCall`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from moelora.backends.fused_ops import FusedOps
from moelora.models.context import row_positions
from moelora.models.mixers import LoopedCall

_NAME = "causal_conv1d_fn"


class PackedConvolution:
    """Takes the place of such a function's calls for each request, for whole rows of the running forward."""

    def __init__(self, looped: LoopedCall, ops: FusedOps) -> None:
        self._looped = looped
        self._ops = ops
        self._signature = inspect.signature(looped.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        positions_1T = row_positions()
        out = None if positions_1T is None else self._over_row(positions_1T, args, kwargs)
        return self._looped(*args, **kwargs) if out is None else out

    def _over_row(self, positions_1T: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self._signature.bind(*args, **kwargs).arguments
        x_1CT, weight_CK = given["hidden_states"], given["weight"]
        if x_1CT.shape[::2] != positions_1T.shape or x_1CT.dtype is not weight_CK.dtype:  # a part of a row; a cast
            return None
        return convolve(self._ops, x_1CT, weight_CK, given.get("bias"), positions_1T, given.get("activation"))


def packed_convolutions(
    functions: MutableMapping[str, Callable[..., Any]],
    ops: FusedOps,
    draw: Callable[..., torch.Tensor],
    agree: Callable[[torch.Tensor, torch.Tensor], bool],
) -> Iterator[tuple[str, bool]]:
    """Puts the kernel into `functions`, where it agrees with what stands there on what `draw` draws.

    functions: by "namespace:name". Gives the namespace of each such function, and whether the kernel took its place.
    """
    for key, looped in functions.items():
        namespace, _, name = key.rpartition(":")
        if name == _NAME and isinstance(looped, LoopedCall):
            agrees = _agrees(looped.original, ops, draw, agree)
            if agrees:
                functions[key] = PackedConvolution(looped, ops)
            yield namespace, agrees


def convolve(
    ops: FusedOps,
    x_1CT: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    positions_1T: torch.Tensor,
    activation: str | None,
) -> torch.Tensor | None:
    """`[1, C, T]`, by the kernel; None for what it cannot do."""
    out_TC = ops.causal_conv(x_1CT[0].t(), weight_CK, bias_C, positions_1T[0], activation)
    return None if out_TC is None else out_TC.t().unsqueeze(0)


def _agrees(
    original: Callable[..., Any],
    ops: FusedOps,
    draw: Callable[..., torch.Tensor],
    agree: Callable[[torch.Tensor, torch.Tensor], bool],
) -> bool:
    """Whether the kernel gives for two requests in a row what the function gives for each of them."""
    channels, lengths = 24, (5, 32)
    for taps, with_bias, activation in ((4, False, "silu"), (3, True, None)):
        x, weight = draw(1, channels, sum(lengths)), draw(channels, taps)
        bias = draw(channels) if with_bias else None
        positions = torch.cat([torch.arange(n, device=x.device) for n in lengths]).unsqueeze(0)
        try:
            own = [original(part, weight, bias, activation=activation) for part in x.split(lengths, dim=2)]
            made = convolve(ops, x, weight, bias, positions, activation)
        except (AttributeError, AssertionError, RuntimeError, TypeError, ValueError):  # not the function it looks like
            return False
        if made is None or not agree(made, torch.cat(own, dim=2)):
            return False
    return True
