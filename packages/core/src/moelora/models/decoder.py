"""Where in a transformers model the decoder is: below the head, and in multimodal models below the wrapper."""

from __future__ import annotations

from typing import Any

from torch import nn


def body_name(causal_lm: Any) -> str:
    """The attribute of a model with a head that holds everything else."""
    embedding = causal_lm.get_input_embeddings()
    for name, child in causal_lm.named_children():
        if any(module is embedding for module in child.modules()):
            return str(name)
    raise AttributeError(f"{type(causal_lm).__name__} has no part that holds its input embedding")


def decoder_of(causal_lm: Any) -> Any:
    """The decoder: token ids to hidden states, without the head and without the encoders of other modalities."""
    from transformers import PreTrainedModel

    embedding = causal_lm.get_input_embeddings()
    found: nn.Module = causal_lm
    while True:
        inner = [c for c in found.children() if isinstance(c, PreTrainedModel) and _holds(c, embedding)]
        if not inner:
            return found
        found = inner[0]


def other_modalities(causal_lm: Any) -> list[tuple[nn.Module, str]]:
    """What lies beside the decoder in the wrapper of a multimodal model: (its parent, its name there).

    Beside the head, where some wrappers keep their encoders, only what is a model of its own.
    """
    from transformers import PreTrainedModel

    found: list[tuple[nn.Module, str]] = []
    decoder = decoder_of(causal_lm)
    if decoder is causal_lm:
        return found
    body = body_name(causal_lm)
    beside_head = (name for name, child in causal_lm.named_children() if isinstance(child, PreTrainedModel))
    found += [(causal_lm, name) for name in beside_head if name != body]
    parent = getattr(causal_lm, body)
    while parent is not decoder:
        inside = next(c for c in parent.children() if any(module is decoder for module in c.modules()))
        found += [(parent, name) for name, child in parent.named_children() if child is not inside]
        parent = inside
    return found


def drop_other_modalities(causal_lm: Any) -> None:
    """Frees what only images, sound or video go through: prompts here are text."""
    for parent, name in other_modalities(causal_lm):
        setattr(parent, name, None)


def ask_for_last_hidden_state(config: Any) -> None:
    """Has a model return its last hidden state, or its logits, alone and by name.

    A checkpoint's config may ask for those of all layers besides, which are then kept to the end of each forward, or
    for a tuple.
    """
    config.return_dict = True
    for more in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if getattr(config, more, False):
            setattr(config, more, False)
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            ask_for_last_hidden_state(getattr(config, name))


def plug_functions(decoder: nn.Module, *, attention: str, experts: str) -> None:
    """Chooses the functions of a decoder from transformers' registries, by their names."""
    for module in decoder.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = attention
            config._experts_implementation = experts


def _holds(module: nn.Module, embedding: nn.Module) -> bool:
    return any(one is embedding for one in module.modules())
