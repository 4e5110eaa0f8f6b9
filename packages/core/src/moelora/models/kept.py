"""Which weights a model keeps in float32 whatever dtype it is loaded in: some routers, norms, indexers, heads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch


def kept_in_float32(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Tells, by its full name, whether transformers loads a weight of `model` in float32 when asked for `dtype`.

    The model's class says so, with patterns that may match anywhere in a name. The meta device is enough.
    """
    plan = model._get_dtype_plan(dtype)
    wide = [re.compile(pattern.replace("*", ".*")) for pattern, kept in plan.items() if kept is torch.float32]
    return lambda name: any(pattern.search(name) for pattern in wide)


def widen_kept(model: Any, dtype: torch.dtype) -> None:
    """Brings to float32, in place, what loading would have: a model that is made in `dtype` has all of it in that."""
    is_kept = kept_in_float32(model, dtype)
    for name, parameter in model.named_parameters():
        if is_kept(name):
            parameter.data = parameter.data.float()
