"""Packed variable-length causal attention, plugged into transformers' registry of attention functions.

Shapes: q `[1, Hq, T, D]`, k `[1, Hkv, T, D]`, v `[1, Hkv, T, Dv]` as transformers hands them over; T is one packed row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from moelora.errors import CheckpointError
from moelora.models.context import GraphBreak, Segments, current_context, row_positions

PACKED = "moelora"
"""Registered without a mask function: architectures that know boundaries from us alone build no mask."""

MASKED = "moelora_masked"
"""With a mask function, for architectures that put more than causality into their mask, or read it: boolean."""

BIASED = "moelora_biased"
"""Likewise, for architectures that add to their mask: floating point, 0 where a token sees another."""

EAGER = "eager"
"""transformers' own attention, which sees nothing of boundaries."""

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
    indices: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function. Returns `[1, T, Hq, Dv]` and no weights.

    s_aux `[Hq]`, sinks `[1, Hq, T, 1]`: a logit that takes part in the softmax without a value, by head or by head and
    token. indices int `[1, T, k]`: the rows a token may see, besides what the mask says. position_bias
    `[1, Hq, T, T]`: added to the logits. block_indices int `[1, G, T, k]`: blocks of rows a token may see, -1 for none.

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
    mask = attention_mask
    if indices is not None:
        mask = restrict(mask, chosen_rows(indices, key.shape[2]))
    if block_indices is not None:
        mask = restrict(mask, chosen_blocks(block_indices, query.shape[1], key.shape[2], _block_size(module)))
    if position_bias is not None:
        mask = restrict(position_bias, mask) if mask is not None else position_bias
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "window": sliding_window,
        "sinks": s_aux if sinks is None else sinks[0, :, :, 0].transpose(0, 1),
        "softcap": softcap,
    }
    attend = context.backend.attention
    if sinks is not None or key.shape[2] != query.shape[2]:
        attend = reference_attention  # no kernel has sinks by token, or keys that are no rows
    if context.graph_break is not None:
        out_THD = _attend_outside_graph(context.graph_break, attend, q_THD, k_THD, v_THD, mask, options)
    else:
        out_THD = attend(q_THD, k_THD, v_THD, context.segments, mask=mask, **options)
    return out_THD.unsqueeze(0), None


def _attend_outside_graph(
    graph_break: GraphBreak,
    attend: Callable[..., torch.Tensor],
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    # Zeroed inside the graph: rows behind the live ones would else hand old values, NaN perhaps, to the next part.
    out_THD = torch.zeros(*q_THD.shape[:2], v_THD.shape[2], dtype=q_THD.dtype, device=q_THD.device)
    sinks = options.pop("sinks")
    # A sink by head is a parameter; one by token lies in the graph's memory.
    moving = {name: x for name, x in (("mask", mask), ("sinks", sinks)) if x is not None and x.ndim > 1}
    if sinks is not None and sinks.ndim == 1:
        options["sinks"] = sinks
    names = tuple(moving)

    def work(
        segments: Segments, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any
    ) -> None:
        live = sum(segments.lengths or ())
        given = dict(zip(names, more, strict=True))
        if "sinks" in given:
            given["sinks"] = given["sinks"][:live]
        out[:live] = attend(q[:live], k[:live], v[:live], segments, **given, **options)

    graph_break.run(work, [out_THD, q_THD, k_THD, v_THD, *moving.values()])
    return out_THD


def chosen_rows(indices_1TK: torch.Tensor, keys: int) -> torch.Tensor:
    """The boolean mask `[1, 1, T, keys]` of the rows that `indices` name; negative ones name none."""
    safe = torch.where(indices_1TK < 0, keys, indices_1TK).long()
    seen = torch.zeros(*safe.shape[:2], keys + 1, dtype=torch.bool, device=safe.device)
    return seen.scatter_(-1, safe, True)[..., :keys].unsqueeze(1)


def chosen_blocks(blocks_1GTK: torch.Tensor, heads: int, keys: int, block_size: int) -> torch.Tensor:
    """The boolean mask `[1, heads, T, keys]` of the blocks of `block_size` rows that each group of heads may see."""
    count = -(-keys // block_size)
    safe = torch.where(blocks_1GTK < 0, count, blocks_1GTK).long()
    seen = torch.zeros(*safe.shape[:3], count + 1, dtype=torch.bool, device=safe.device)
    by_block = seen.scatter_(-1, safe, True)[..., :count]
    by_row = by_block.repeat_interleave(block_size, dim=-1)[..., :keys]
    return by_row.repeat_interleave(heads // safe.shape[1], dim=1)


def restrict(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Both masks at once, each boolean (True sees) or additive. The result is boolean if both are."""
    if one is None:
        return other
    if one.dtype is torch.bool and other.dtype is torch.bool:
        return one & other
    if one.dtype is torch.bool:
        one, other = other, one
    if other.dtype is torch.bool:
        return one.masked_fill(~other, float("-inf"))
    return one + other


def _block_size(module: torch.nn.Module) -> int:
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int):
        raise CheckpointError(f"{type(module).__name__} passes block_indices to attention without indexer.block_size")
    return size


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
    `[Hq]` or `[T, Hq]`: a logit that takes part in the softmax without a value. softcap: logits become c·tanh(x/c).
    mask: `[1, 1 or Hq, T, T]`, boolean (True sees) or additive; it is intersected with segment, causality and window.
    Keys that are no rows (more of them than queries) are allowed within a single segment, where the mask says it all.
    Returns `[T, Hq, Dv]` in q's dtype; rows behind the last boundary are zero.
    """
    out_THD = torch.zeros(q_THD.shape[0], q_THD.shape[1], v_THD.shape[2], dtype=q_THD.dtype, device=q_THD.device)
    # Without lengths on the host the boundaries are read, which no graph can capture.
    for rows in segments.rows():
        keys = rows
        if k_THD.shape[0] != q_THD.shape[0]:
            if mask is None or rows.stop - rows.start != q_THD.shape[0]:
                raise CheckpointError("attention over keys that are no rows needs a mask, and one request at a time")
            keys = slice(None)
        part = mask[0, :, rows, keys] if mask is not None else None
        sink = sinks[rows] if sinks is not None and sinks.ndim == 2 else sinks
        out_THD[rows] = _one_segment(q_THD[rows], k_THD[keys], v_THD[keys], scale, window, sink, softcap, part)
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
    tokens, keys = q.shape[2], k.shape[2]
    plain = mask is None and sinks is None and softcap is None and (window is None or window >= tokens)
    if plain:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    if keys == tokens:
        age = torch.arange(tokens, device=q.device).unsqueeze(1) - torch.arange(tokens, device=q.device)
        seen = age >= 0
        if window is not None:
            seen &= age < window
    else:
        seen = torch.ones(tokens, keys, dtype=torch.bool, device=q.device)
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
        column = sinks.float().expand(tokens, -1).transpose(0, 1).reshape(1, -1, tokens, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :keys]
    return (weights @ v.float()).to(q_THD.dtype)[0].transpose(0, 1)


def _boolean_mask(q_length: int, kv_length: int, **given: Any) -> torch.Tensor:
    """The mask function of MASKED: `[1, 1, T, T]`, always a tensor, and never across requests."""
    from transformers.masking_utils import sdpa_mask

    given["allow_is_causal_skip"] = False
    mask = sdpa_mask(q_length=q_length, kv_length=kv_length, **given)
    positions_1T = row_positions()
    if positions_1T is None or positions_1T.shape[-1] != q_length or q_length != kv_length:
        return mask
    # From positions, not from the boundaries of the batch: they lie in the static inputs of captured graphs.
    request_T = (positions_1T.reshape(-1, q_length)[0] == 0).cumsum(0)
    return mask & (request_T.unsqueeze(1) == request_T)


def _additive_mask(dtype: torch.dtype = torch.float32, **given: Any) -> torch.Tensor:
    """The mask function of BIASED: the same, 0 where a token sees another and the lowest number elsewhere."""
    seen = _boolean_mask(**given)
    lowest = torch.finfo(dtype).min
    return torch.where(seen, torch.zeros((), device=seen.device, dtype=dtype), lowest)


def register_attention() -> None:
    """Adds all names to transformers' registries. May be called any number of times."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (PACKED, MASKED, BIASED):
        AttentionInterface.register(name, moelora_attention)
    AttentionMaskInterface.register(MASKED, _boolean_mask)
    AttentionMaskInterface.register(BIASED, _additive_mask)
