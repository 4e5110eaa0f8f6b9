"""An adapter merged into the weights of a plain transformers model: W + B·A per target, and back again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moelora.adapters.base import Adapter, Catalogue, Factors, Target, TargetKind


@contextmanager
def merged(model: Any, adapter: Adapter, catalogue: Catalogue) -> Iterator[None]:
    """Within the context, `model` computes with the adapter's weights; afterwards with its own, bit for bit.

    The sum is made in fp32 and rounded once to the model's dtype.
    """
    changed = [*adapter.factors, *adapter.replacements]
    with _untied(model, changed):
        originals: dict[str, torch.Tensor] = {}
        try:
            for name in changed:
                weight = _weight(model, catalogue.targets[name])
                originals[name] = weight.to("cpu", copy=True)
                if name in adapter.replacements:
                    weight.copy_(adapter.replacements[name])
                else:
                    _add(weight, adapter.factors[name], catalogue.targets[name])
            yield
        finally:
            for name, original in originals.items():
                _weight(model, catalogue.targets[name]).copy_(original)


def _weight(model: Any, target: Target) -> torch.Tensor:
    name = target.name if target.kind is TargetKind.EXPERTS else f"{target.name}.weight"
    return model.get_parameter(name).data


def _add(weight: torch.Tensor, factors: Factors, target: Target) -> None:
    """Expert by expert, so that no second copy of all experts is made."""
    if target.kind is not TargetKind.EXPERTS:
        delta = _product(factors.b, factors.a, weight.device)
        weight.copy_(weight.float() + (delta.T if target.kind is TargetKind.EMBEDDING else delta))
        return
    for expert in range(target.num_experts):
        b, a = factors.b[expert % factors.b.shape[0]], factors.a[expert % factors.a.shape[0]]
        delta = _product(b, a, weight.device)
        weight[expert] = weight[expert].float() + (delta.T if target.transposed else delta)


def _product(b: torch.Tensor, a: torch.Tensor, device: torch.device) -> torch.Tensor:
    return b.to(device).float() @ a.to(device).float()


@contextmanager
def _untied(model: Any, changed: list[str]) -> Iterator[None]:
    """Gives a tied head a weight of its own if either side changes: an adapter changes the side it names alone."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    names = {name for name, module in model.named_modules() if module is head or module is embedding}
    if not tied or not names & set(changed):
        yield
        return
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    try:
        yield
    finally:
        head.weight = embedding.weight
