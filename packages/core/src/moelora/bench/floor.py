"""The least time that a batch can take: bytes and operations of its parts, at the ceilings of the device.

Counted is what no implementation can leave out: each weight that is used read once per batch, each input read and each
output written once, and the products. Norms, rotary, routing, activations and LoRA are not: they can hide behind these.
A part takes the longer of its two times, and parts run one after the other. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from moelora.adapters.base import Catalogue, TargetKind
from moelora.backends.base import MoeShape
from moelora.bench.ceilings import Ceilings


@dataclass(frozen=True, slots=True, kw_only=True)
class Linears:
    """All linear layers of the body, experts apart. weights: their elements. widths: inputs and outputs, summed."""

    weights: int
    widths: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention of one layer. width: heads × (query and key width + value width), summed over query heads.

    kv_width: elements of keys and values of one token. window: tokens that a token sees, None for all before it.
    """

    width: int
    kv_width: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """What a floor is computed from. experts: one entry per layer with routed experts. itemsize: bytes per element."""

    linears: Linears
    experts: tuple[MoeShape, ...]
    attention: tuple[AttentionShape, ...]
    hidden: int
    vocab: int
    itemsize: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes moved and floating-point operations (a multiplication and an addition are two)."""

    bytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        """The longer of both."""
        return max(self.bytes / ceilings.bytes_per_second, self.flops / ceilings.flops_per_second)


def batch_costs(shape: DecoderShape, lengths: Sequence[int], scored_rows: int) -> dict[str, Cost]:
    """Costs by part of one batch of sequences, of which `scored_rows` positions go through the head."""
    tokens, size = sum(lengths), shape.itemsize
    return {
        "dense": Cost(
            bytes=size * (shape.linears.weights + tokens * shape.linears.widths),
            flops=2 * tokens * shape.linears.weights,
        ),
        "experts": _sum(_experts(layer, tokens, size) for layer in shape.experts),
        "attention": _sum(_attention(layer, lengths, size) for layer in shape.attention),
        "head": Cost(
            bytes=size * (shape.vocab + scored_rows) * shape.hidden,
            flops=2 * scored_rows * shape.hidden * shape.vocab,
        ),
    }


def floor_seconds(
    shape: DecoderShape, batches: Collection[tuple[Sequence[int], int]], ceilings: Ceilings
) -> dict[str, float]:
    """Seconds by part over several batches, each given as lengths and scored rows."""
    total: dict[str, float] = {}
    for lengths, scored_rows in batches:
        for part, cost in batch_costs(shape, lengths, scored_rows).items():
            total[part] = total.get(part, 0.0) + cost.seconds(ceilings)
    return total


def touched_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """How many experts at least one of `tokens` chooses, expected where each chooses evenly and alone."""
    return num_experts * (1 - (1 - min(top_k / num_experts, 1.0)) ** tokens)


def decoder_shape(config: Any, catalogue: Catalogue, experts: Sequence[MoeShape], itemsize: int) -> DecoderShape:
    """The shape of a model. config: its text config. experts: the widths of its experts layers, at most one kind.

    Layers whose token mixer is no attention (`layer_types`) count with their projections alone.
    """
    dense = [
        target
        for target in catalogue
        if target.kind in (TargetKind.LINEAR, TargetKind.ROUTER) and target.name != "lm_head"
    ]
    layers = sum(target.kind is TargetKind.EXPERTS and target.name.endswith("down_proj") for target in catalogue)
    return DecoderShape(
        linears=Linears(
            weights=sum(t.in_features * t.out_features for t in dense),
            widths=sum(t.in_features + t.out_features for t in dense),
        ),
        experts=(experts[0],) * layers if experts else (),
        attention=_attention_shapes(config),
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        itemsize=itemsize,
    )


def _attention_shapes(config: Any) -> tuple[AttentionShape, ...]:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    nope, rope = getattr(config, "qk_nope_head_dim", None), getattr(config, "qk_rope_head_dim", None)
    qk_dim = nope + rope if nope and rope else head_dim
    v_dim = getattr(config, "v_head_dim", None) or head_dim
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return tuple(
        AttentionShape(
            width=heads * (qk_dim + v_dim),
            kv_width=kv_heads * (qk_dim + v_dim),
            window=window if kind == "sliding_attention" else None,
        )
        for kind in kinds
        if kind in ("full_attention", "sliding_attention")
    )


def _experts(layer: MoeShape, tokens: int, size: int) -> Cost:
    per_expert = layer.hidden * layer.up_out + layer.inter * layer.hidden
    touched = touched_experts(layer.num_experts, layer.top_k, tokens)
    return Cost(
        bytes=size * (touched * per_expert + 2 * tokens * layer.hidden),
        flops=2 * tokens * layer.top_k * per_expert,
    )


def _attention(layer: AttentionShape, lengths: Sequence[int], size: int) -> Cost:
    seen = sum(_seen(length, layer.window) for length in lengths)
    return Cost(bytes=size * sum(lengths) * (layer.width + layer.kv_width), flops=2 * seen * layer.width)


def _seen(length: int, window: int | None) -> int:
    """Pairs of a token and one that it sees, itself included."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _sum(costs: Any) -> Cost:
    listed = list(costs)
    return Cost(bytes=sum(c.bytes for c in listed), flops=sum(c.flops for c in listed))
