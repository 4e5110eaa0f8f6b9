"""Tiny random models of every MoE architecture of transformers, with adapters on all they can take, and the truth.

The configurations in `tiny_architectures.json` together reach every kind of layer of those architectures.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import math
import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from adapter_writers import AdapterWriter
from moelora.adapters.base import Catalogue, TargetKind
from moelora.adapters.names import canonical
from moelora.models.small_config import small_config
from moelora.models.trial import fill_at_random

_FILE = Path(__file__).with_name("tiny_architectures.json")
ARCHITECTURES: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))


def tiny(name: str) -> tuple[Any, Any]:
    """The class and the config of a tiny model."""
    entry = ARCHITECTURES[name]
    config_class = getattr(importlib.import_module(entry["config_module"]), entry["config_class"])
    model_class = getattr(importlib.import_module(entry["module"]), entry["class"])
    return model_class, config_class.from_dict(_floats(entry["config"]))


# The text part of a multimodal model, by the model that checkpoints hold. The others have a class for text alone.
WRAPPERS = {
    "aria+wrapped": ("aria", "aria"),
    "deepseek_ocr2": ("deepseek_ocr2", "deepseek_ocr2"),
    "ernie4_5_vl_moe": ("ernie4_5_vl_moe", "ernie4_5_vl_moe"),
    "gemma4+wrapped": ("gemma4", "gemma4"),
    "glm4v_moe": ("glm4v_moe", "glm4v_moe"),
    "glm5_next": ("glm5_next", "glm5_next"),
    "kimi_k25": ("kimi_k25", "deepseek_v3"),
    "llama4+wrapped": ("llama4", "llama4"),
    "minimax_m3_vl+wrapped": ("minimax_m3_vl", "minimax_m3_vl"),
    "mistral3": ("mistral3", "mistral4"),
    "mistral_large4": ("mistral_large4", "mistral_large4"),
    "muse_spark": ("muse_spark", "muse_spark"),
    "qwen3_5_moe+wrapped": ("qwen3_5_moe", "qwen3_5_moe"),
    "qwen3_omni_moe": ("qwen3_omni_moe_thinker", "qwen3_omni_moe"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "qwen3_vl_moe"),
    "step3p7": ("step3p7", "step3p7"),
    "unlimited_ocr": ("unlimited_ocr", "unlimited_ocr"),
}


def wrapped(name: str) -> tuple[Any, Any]:
    """The class and the config of a tiny multimodal model around the text part of that name."""
    from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    wrapper, inner = WRAPPERS[name]
    config_class = CONFIG_MAPPING[wrapper]
    text = tiny(inner)[1]
    encoders = {}
    for part in config_class.sub_configs:
        plain = getattr(config_class(), part, None) if part != "text_config" else None
        if plain is not None:
            encoders[part] = _small_encoder(plain, text.hidden_size)
    config = config_class(text_config=text, **encoders)
    return MODEL_FOR_MULTIMODAL_LM_MAPPING[config_class], config


RUNS_ALL = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
"""From this version on transformers runs all of them: a refusal is a fault of that file or of transformers."""


def runnable(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The class and the config of a tiny model; skips the test, with the reason, where transformers cannot run it."""
    reason = refusal(name, dtype)
    if reason and RUNS_ALL:
        pytest.fail(reason)
    elif reason:
        pytest.skip(reason)
    return _made_from(name)


@cache
def refusal(name: str, dtype: torch.dtype = torch.float32) -> str:
    """Why transformers by itself cannot make, load or run that tiny model; empty if it can."""
    try:
        model_class, config = _made_from(name)
        with tempfile.TemporaryDirectory() as folder:
            make(model_class, config, seed=3).save_pretrained(folder)
            logprobs(model_class.from_pretrained(folder, dtype=dtype).eval(), list(range(3, 20)))
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return f"transformers {transformers.__version__} itself cannot run {name} in {dtype} ({what})"
    return ""


def has_registered_experts(model_class: Any) -> bool:
    """Whether this version of transformers puts the experts of a modelling file into its registry."""
    return "use_experts_implementation" in inspect.getsource(sys.modules[model_class.__module__])


def has_masks_by_request(config: Any) -> bool:
    """Older versions of transformers count chunks of attention from the start of the row, not of the request."""
    from transformers import masking_utils

    chunked = "chunked_attention" in (getattr(config.get_text_config(), "layer_types", None) or ())
    return not chunked or hasattr(masking_utils, "remap_positions_for_packed_sequence")


def _made_from(name: str) -> tuple[Any, Any]:
    return (wrapped if name in WRAPPERS else tiny)(name)


def _small_encoder(config: Any, text_width: int) -> Any:
    small = small_config(config, 1)
    for part in getattr(type(config), "sub_configs", {}):
        setattr(small, part, _small_encoder(getattr(config, part), text_width))
    if hasattr(small, "out_hidden_size"):
        small.out_hidden_size = text_width
    return small


def _floats(value: Any) -> Any:
    """JSON has no infinity; the lists that hold one are tuples in the configs."""
    if isinstance(value, dict):
        return float(value["__float__"]) if set(value) == {"__float__"} else {k: _floats(v) for k, v in value.items()}
    if isinstance(value, list):
        found = [_floats(v) for v in value]
        return tuple(found) if any(isinstance(v, float) and math.isinf(v) for v in found) else found
    return value


def make(model_class: Any, config: Any, seed: int) -> Any:
    """A random model of that class, in fp32."""
    torch.manual_seed(seed)
    model = model_class(copy.deepcopy(config))
    fill_at_random(model, strength=1.0)
    return model.float().eval().requires_grad_(False)


def adapt_everything(catalogue: Catalogue, folder: Path, seed: int, *, layers: str = "") -> AdapterWriter:
    """Writes an adapter on every linear layer, router and experts parameter of the decoder.

    layers: what stands before `layers.` in its keys, where that is to be other than in the model.
    """
    writer = AdapterWriter(catalogue, r=2, alpha=3, seed=seed)
    experts: dict[str, list[str]] = {}
    for target in catalogue:
        if ".vision_moe." in target.name:  # text never reaches these experts, and an adapter on them is refused
            continue
        if target.kind in (TargetKind.LINEAR, TargetKind.ROUTER):
            writer.dense(target.name)
        elif target.kind is TargetKind.EXPERTS:
            path, _, leaf = target.name.rpartition(".")
            experts.setdefault(path, []).append(leaf)
    for path, leaves in experts.items():
        writer.wrapped(path, parameters=leaves, swapped=not catalogue.targets[f"{path}.{leaves[0]}"].transposed)
    if layers:
        writer.tensors = {re.sub(r"^.*?(?=layers\.\d)", layers, key): x for key, x in writer.tensors.items()}
    writer.write(folder)
    return writer


@torch.no_grad()
def merged(model: Any, catalogue: Catalogue, writer: AdapterWriter) -> Any:
    """A copy of `model` with the adapter's deltas added to its weights."""
    changed = copy.deepcopy(model)
    head = changed.get_output_embeddings()
    if head.weight is changed.get_input_embeddings().weight:  # an adapter on a tied head changes the logits alone
        head.weight = torch.nn.Parameter(head.weight.clone())
    # A class for text alone may have other names than the multimodal model of the checkpoint.
    parameters = {canonical(name): parameter for name, parameter in changed.named_parameters()}
    for name, delta in writer.deltas.items():
        target = catalogue.targets[name]
        if target.kind is TargetKind.EXPERTS:
            parameters[canonical(name)].add_((delta.transpose(1, 2) if target.transposed else delta).float())
        else:
            parameters[canonical(f"{name}.weight")].add_(delta.float())
    return changed


@torch.no_grad()
def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """log p(t_i | t_<i) for i ≥ 1, by transformers alone: one prompt per forward, eager attention and experts."""
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
    logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0].float().cpu()
    return torch.log_softmax(logits, dim=-1)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0]


def is_decided(model: Any, ids: list[int]) -> bool:
    """Whether transformers in fp32 agrees with itself in fp64: no router chooses between two that are all but equal."""
    exact = logprobs(copy.deepcopy(model).double(), ids)
    return bool((exact - logprobs(model, ids)).abs().max() < 1e-4)
