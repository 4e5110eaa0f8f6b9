"""Which modules and parameters of a transformers model an adapter can change. Reads no files and no weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moelora.adapters.base import Catalogue, Target, TargetKind
from moelora.models.decoder import other_modalities
from moelora.models.kept import kept_in_float32
from moelora.models.unregistered import experts_layout

# Linear layers whose weight another module reads directly: a delta added to their forward would never be computed, so
# they are no targets and an adapter on them is refused.
_READ_BY_WEIGHT = {"longcat_flash": ("router.classifier",), "jamba": ("mamba.dt_proj",)}

_ROUTER_WORDS = ("Router", "Gate", "TopK", "Gating")


def build_catalogue(model: nn.Module) -> Catalogue:
    """Lists the targets of `model`, a transformers 5 causal LM; the meta device is enough.

    Linear layers are LINEAR and the input embedding EMBEDDING. Routers that hold their own 2-D `weight`, or subclass a
    linear layer, are ROUTER. The 3-D parameters of experts modules are EXPERTS, in registration order. Norms are
    WHOLE. Encoders of other modalities and modules of other kinds (convolutions, grouped linears, recurrences) are left
    out: nothing can adapt them.
    """
    config: Any = model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    model_type = str(getattr(text_config, "model_type", getattr(config, "model_type", "")))
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    hidden = _READ_BY_WEIGHT.get(model_type, ())
    elsewhere = {id(m) for parent, name in other_modalities(model) for m in parent.get_submodule(name).modules()}
    is_kept = {dtype: kept_in_float32(model, dtype) for dtype in (torch.bfloat16, torch.float16)}
    targets: dict[str, Target] = {}
    for name, module in model.named_modules():
        if id(module) in elsewhere or any(name.endswith(suffix) for suffix in hidden):
            continue
        for target in _targets_of(name, module, is_embedding=module is embedding):
            parameter = target.name if target.kind is TargetKind.EXPERTS else f"{target.name}.weight"
            kept_from = frozenset(dtype for dtype, kept in is_kept.items() if kept(parameter))
            targets[target.name] = replace(target, kept_from=kept_from)
    return Catalogue(
        model_type=model_type,
        targets=targets,
        num_layers=int(getattr(text_config, "num_hidden_layers", 0)),
        tied_lm_head=_is_tied(model, text_config),
    )


def _targets_of(name: str, module: nn.Module, *, is_embedding: bool) -> Iterator[Target]:
    class_name = type(module).__name__
    weight = module._parameters.get("weight")
    if is_embedding and weight is not None:
        yield _matrix(name, TargetKind.EMBEDDING, weight)
    elif type(module) is nn.Linear:
        yield _matrix(name, TargetKind.LINEAR, module.weight)
    elif hasattr(module, "is_transposed"):
        yield from _experts(name, module, bool(module.is_transposed), not getattr(module, "is_concatenated", True))
    elif (layout := experts_layout(module)) is not None:
        yield from _experts(name, module, layout[1], False)
    elif weight is not None and weight.dim() == 2 and any(word in class_name for word in _ROUTER_WORDS):
        yield _matrix(name, TargetKind.ROUTER, weight)
    elif weight is not None and weight.dim() == 1 and "Norm" in class_name:
        yield Target(name=name, kind=TargetKind.WHOLE, in_features=0, out_features=0, shape=tuple(weight.shape))


def _matrix(name: str, kind: TargetKind, weight: Tensor) -> Target:
    rows, columns = weight.shape
    # An embedding looks up rows: its "input" is the vocabulary, which a linear layer has as its output.
    into, out = (rows, columns) if kind is TargetKind.EMBEDDING else (columns, rows)
    return Target(name=name, kind=kind, in_features=into, out_features=out, shape=(rows, columns))


def _experts(name: str, module: nn.Module, transposed: bool, interleaved: bool) -> Iterator[Target]:
    for leaf, parameter in module._parameters.items():
        if parameter is None or parameter.dim() != 3 or leaf not in ("gate_up_proj", "up_proj", "down_proj"):
            continue
        num_experts, d1, d2 = parameter.shape
        gated = leaf == "gate_up_proj"
        yield Target(
            name=f"{name}.{leaf}",
            kind=TargetKind.EXPERTS,
            in_features=d1 if transposed else d2,
            out_features=d2 if transposed else d1,
            shape=(num_experts, d1, d2),
            num_experts=num_experts,
            transposed=transposed,
            interleaved=gated and interleaved,
            gated=gated,
        )


def _is_tied(model: nn.Module, text_config: Any) -> bool:
    head = model.get_output_embeddings()  # type: ignore[operator]
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if head is None or embedding is None:
        return False
    if head.weight is embedding.weight:
        return True
    on_meta = head.weight.device.type == "meta"
    return on_meta and bool(getattr(text_config, "tie_word_embeddings", False))
