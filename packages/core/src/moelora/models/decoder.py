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


def _holds(module: nn.Module, embedding: nn.Module) -> bool:
    return any(one is embedding for one in module.modules())
