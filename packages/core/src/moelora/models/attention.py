"""Packed variable-length causal attention, plugged into transformers' registry of attention functions.

Shapes: q `[1, Hq, T, D]`, k `[1, Hkv, T, D]`, v `[1, Hkv, T, Dv]` as transformers hands them over; T is one packed row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from moelora.errors import CheckpointError
from moelora.models.context import Segments, current_context

PACKED = "moelora"
"""Registered without a mask function: architectures that know boundaries from us alone build no mask."""

MASKED = "moelora_masked"
"""Registered with a mask function, for architectures that put more than causality into their mask."""

# Arguments that transformers' modules pass along and that cannot change the result of a forward without a cache.
_HARMLESS = frozenset(
    {
        "position_ids", "position_embeddings", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
        "output_router_logits", "logits_to_keep", "input_ids", "cache_position", "num_items_in_batch", "is_causal",
    }
)  # fmt: skip


def moelora_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function. Returns `[1, T, Hq, Dv]` and no weights.

    Raises `CheckpointError` for an argument whose meaning it does not know, since ignoring one would be silently wrong.
    """
    unknown = {name for name, given in others.items() if given is not None and name not in _HARMLESS}
    if unknown:
        raise CheckpointError(
            f"{type(module).__name__} passes {', '.join(sorted(unknown))} to attention; moelora does not implement that"
        )
    assert dropout == 0.0, "the model is not in evaluation mode"
    context = current_context()
    assert context.segments is not None, "attention outside the body of the model"
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "window": sliding_window,
        "sinks": s_aux,
        "softcap": softcap,
        "mask": attention_mask,
    }
    if context.attention_break is not None:
        out = context.attention_break.attend(context.backend, q_THD, k_THD, v_THD, options)
    else:
        out = context.backend.attention(q_THD, k_THD, v_THD, context.segments, **options)
    return out.unsqueeze(0), None


def reference_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention within each segment, one after the other, on any device and in any dtype.

    q `[T, Hq, D]`, k `[T, Hkv, D]`, v `[T, Hkv, Dv]`. window: a token sees itself and the `window - 1` before it. sinks
    `[Hq]`: a logit per head that takes part in the softmax without a value. softcap: logits become c·tanh(x/c).
    mask: `[1, 1 or Hq, T, T]`, boolean (True sees) or additive; it is intersected with segment, causality and window.
    Returns `[T, Hq, Dv]` in q's dtype; rows behind the last boundary are zero.
    """
    lengths = segments.lengths
    if lengths is None:  # static boundaries: reading them synchronises, so that this cannot be captured on a GPU
        lengths = tuple(segments.cu_seqlens_S1.diff().tolist())
    out_THD = torch.zeros(q_THD.shape[0], q_THD.shape[1], v_THD.shape[2], dtype=q_THD.dtype, device=q_THD.device)
    begin = 0
    for length in filter(None, lengths):
        rows = slice(begin, begin + length)
        part = mask[0, :, rows, rows] if mask is not None else None
        out_THD[rows] = _one_segment(q_THD[rows], k_THD[rows], v_THD[rows], scale, window, sinks, softcap, part)
        begin += length
    return out_THD


def _one_segment(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_THD, v_THD))
    tokens = q.shape[2]
    plain = mask is None and sinks is None and softcap is None and (window is None or window >= tokens)
    if plain:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    age = torch.arange(tokens, device=q.device).unsqueeze(1) - torch.arange(tokens, device=q.device)
    seen = age >= 0
    if window is not None:
        seen &= age < window
    if mask is not None and mask.dtype is torch.bool:
        seen = seen & mask
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype is not torch.bool:
        scores = scores + mask.float()
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(1, q.shape[1], tokens, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :tokens]
    return (weights @ v.float()).to(q_THD.dtype)[0].transpose(0, 1)


def register_attention() -> None:
    """Adds both names to transformers' registries. May be called any number of times."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(PACKED, moelora_attention)
    AttentionInterface.register(MASKED, moelora_attention)
    AttentionMaskInterface.register(MASKED, sdpa_mask)
