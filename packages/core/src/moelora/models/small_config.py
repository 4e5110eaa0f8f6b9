"""A config of the same architecture that is small enough to try out: fewer layers of every kind, small widths.

By dimensions, not by architecture: numbers of heads, widths of heads and all other widths are each divided by one
number, so that what was a product of two stays one. Thresholds in tokens become shorter than the requests of the probe.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

VOCAB = 128
THRESHOLD = 32
"""Positions that only the longest request of the probe passes."""

WINDOW = 8
"""Tokens of a sliding window, a chunk or a selection."""

NOT_ARCHITECTURE = (
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "quantization_config", "id2label", "label2id",
    "output_attentions",
)  # fmt: skip
"""What a config says of its checkpoint or of a call rather than of the architecture."""

_EXPERTS, _TOP_K = 8, 2
_HEADS, _HEAD_WIDTH, _LEAST_WIDTH = 4, 16, 8
_MOST_LAYERS = 64

# Heads of an indexer. With few of them many of its scores are zero at once, and which of equals it takes is chance.
_SELECTORS = 32

_IS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "vocabulary": r"vocab",
        "token": r"(_token_id|_token_index|_token_ids)$",
        "layers": r"^(num_hidden_layers|num_layers|n_layers?|n_layer)$",
        "experts": r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)$",
        "few": r"shared_experts|zero_expert_num|num_shared",
        "top_k": r"(experts_per_tok|experts_per_token|^moe_k|moe_top_?k|top_k_experts|num_selected_experts)$",
        "groups": r"^(n_group|num_expert_groups?|n_expert_groups?)$",
        "top_groups": r"^(topk_group|top_k_groups?|num_limited_groups)$",
        "position": r"max_position|max_seq|original_max|model_max_length|_n_floor$|floor_scale",
        "selectors": r"^index\w*heads$|^indexer\w*heads$",
        "window": r"window|chunk|pool|topk|top_k$|block_size|block_len|compress_rate",
        "kept": r"kernel|d_conv|conv_size|l_cache|expand|_factor$|interval|every|step|period|offset|idx|index$|mult$",
        "head": r"(^|_)(n_heads?|heads?|n_groups|num_groups|o_groups|attention_groups)$",
        "head_width": r"head_dim|d_head|head_size|kv_channels|rope_dim|nope_dim|d_state|state_size|rotary_dim|v_dim$",
        "width": r"size|_dim$|^dim$|d_model|n_embd|width|rank|_ffn|channels|hidden|intermediate|inter$",
    }.items()
}
_ORDER = tuple(_IS)


class _Scale:
    """Powers of two by which heads, their widths, and all other widths are divided."""

    def __init__(self, settings: dict[str, Any]) -> None:
        heads = _first(settings, "num_attention_heads", "n_heads", "num_heads") or _HEADS
        hidden = _first(settings, "hidden_size", "d_model", "n_embd") or 64
        main = _first(settings, "head_dim") or hidden // heads
        widths = [v for k, v in _numbers(settings) if _kind(k) == "head_width" and v >= 4] + [main]
        self.heads = _power(heads, _HEADS)
        self.head_width = _power(main, _HEAD_WIDTH)
        while self.head_width > 1 and any(v % self.head_width or v // self.head_width < 4 for v in widths):
            self.head_width //= 2
        while self.heads > 1 and hidden // (self.heads * self.head_width) < 2 * _LEAST_WIDTH:
            self.heads //= 2
        while self.head_width > 1 and hidden // (self.heads * self.head_width) < 2 * _LEAST_WIDTH:
            self.head_width //= 2
        self.width = self.heads * self.head_width


def small_config(config: Any, layers: int | None) -> Any:
    """A small config with the first `layers` decoder layers, or with all of them for None."""
    settings = copy.deepcopy(config.to_dict())
    total = _first(settings, *(k for k in settings if _IS["layers"].search(k))) or 0
    keep = min(layers or total, _MOST_LAYERS, total)
    return type(config).from_dict(_walk(settings, _Scale(settings), total, keep))


def layers_of_every_kind(body: nn.Module) -> int | None:
    """How many of the first layers, as its config counts them, show every kind; None if there is no list of layers."""
    blocks = _decoder_layers(body)
    if not blocks:
        return None
    kinds = [_signature(block) for block in blocks]
    counted = getattr(body.config, "num_hidden_layers", len(blocks))
    return (1 + max(kinds.index(kind) for kind in kinds)) * max(counted // len(blocks), 1)


def kinds_of(body: nn.Module) -> set[Any]:
    """The kinds of its decoder layers, by the classes within them alone."""
    return {tuple((n, type(m).__name__) for n, m in block.named_modules()) for block in _decoder_layers(body)}


def _decoder_layers(body: nn.Module) -> list[nn.Module]:
    """The longest list of modules right below the decoder."""
    return max((list(m) for m in body.children() if isinstance(m, nn.ModuleList)), key=len, default=[])


def _signature(block: nn.Module) -> Any:
    """Classes, shapes and plain settings of everything within a layer; not its number."""
    found: list[Any] = []
    for name, module in block.named_modules():
        settings = {
            k: v
            for k, v in vars(module).items()
            if isinstance(v, int | float | str | None) and not re.search(r"idx|layer_id|layer_num", k)
        }
        shapes = {k: tuple(p.shape) for k, p in module._parameters.items() if p is not None}
        found.append((name, type(module).__name__, sorted(settings.items()), sorted(shapes.items())))
    return repr(found)


def _walk(settings: dict[str, Any], scale: _Scale, total: int, keep: int) -> dict[str, Any]:
    if settings and all(re.fullmatch(r"\d+", str(key)) for key in settings):  # settings by layer
        settings = {key: value for key, value in settings.items() if int(key) < keep}
    # Within other configs too, some of which refuse to be made from all that they tell of themselves.
    kept = {key: value for key, value in settings.items() if key not in NOT_ARCHITECTURE}
    small = {key: _small(str(key), value, scale, total, keep) for key, value in kept.items()}
    experts = next((v for k, v in small.items() if _kind(k) == "experts" and isinstance(v, int)), _EXPERTS)
    for key, value in small.items():
        if _kind(key) == "groups" and isinstance(value, int) and value > 1:
            small[key] = 2 if experts % 2 == 0 else 1
        elif _kind(key) == "top_groups" and isinstance(value, int):
            small[key] = 1
    return small


def _small(key: str, value: Any, scale: _Scale, total: int, keep: int) -> Any:
    if isinstance(value, dict):
        return _walk(value, scale, total, keep)
    if isinstance(value, list | tuple):
        return _small_list(key, list(value), scale, total, keep)
    if isinstance(value, str):
        by_layer = len(value) == total > keep and re.search(r"pattern|layer|block", key)
        return value[:keep] if by_layer else value
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return _small_number(key, value, scale, total, keep)


def _small_list(key: str, values: list[Any], scale: _Scale, total: int, keep: int) -> list[Any]:
    numbers = bool(values) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if key == "mrope_section" and numbers:
        return _shared_out(values, max(sum(values) // scale.head_width, 1))
    if key in ("long_factor", "short_factor") and numbers:
        return values[: max(len(values) // scale.head_width, 1)]
    if len(values) == total > 1 and keep < total:
        values = values[:keep]
    elif numbers and re.search(r"layers|idxs?$", key):
        return [v for v in values if v < keep]
    return [_small(key, v, scale, total, keep) for v in values]


def _shared_out(parts: list[int], total: int) -> list[int]:
    """`total` shared out as `parts` are, in whole numbers."""
    shares = [part * total // sum(parts) for part in parts]
    shares[0] += total - sum(shares)
    return shares


def _small_number(key: str, value: int, scale: _Scale, total: int, keep: int) -> int:
    match _kind(key):
        case "vocabulary":
            return min(value, VOCAB) if value > 0 else value
        case "token":
            return min(value, VOCAB - 1)
        case "layers":
            return value * keep // total if total else value
        case "experts":
            return min(value, _EXPERTS)
        case "few" | "top_k":
            return min(value, _TOP_K)
        case "position":
            return min(value, THRESHOLD)
        case "selectors":
            return min(value, _SELECTORS)
        case "window":
            return min(value, WINDOW)
        case "head":
            return value // scale.heads if value % scale.heads == 0 else 1 if value < scale.heads else value
        case "head_width":
            return value // scale.head_width if value % scale.head_width == 0 else value
        case "width":
            if value < 2 * _LEAST_WIDTH:
                return value
            exact, rest = divmod(value, scale.width)
            return exact if rest == 0 and exact >= _LEAST_WIDTH else max(_LEAST_WIDTH, -(-exact // 4) * 4)
        case _:
            return value


def _kind(key: str) -> str:
    key = str(key).lower()
    return next((kind for kind in _ORDER if _IS[kind].search(key)), "")


def _numbers(settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield key, value


def _first(settings: dict[str, Any], *names: str) -> int | None:
    return next((v for n in names if isinstance(v := settings.get(n), int) and not isinstance(v, bool)), None)


def _power(value: int, target: int) -> int:
    """The largest power of two that divides `value` and leaves at least `target`."""
    power = 1
    while value % (2 * power) == 0 and value // (2 * power) >= target:
        power *= 2
    return power
