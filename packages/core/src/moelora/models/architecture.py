"""Which architectures may be packed: the rule, its exceptions, and the reason for each refusal. Loads nothing.

Packing several requests into one row is allowed only where it is known to be respected: everything that mixes tokens
must be an attention call that goes through the registry. Others run one request per forward, with the mask
they ask for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Probed: random tiny models, requests of 1, 7, 33 and 50 tokens in one row, equal to each request alone.
PACKED_MOE = frozenset(
    """
    afmoe aria_text axk1 beam cohere2_moe dbrx deepseek_ocr2_text deepseek_v2 deepseek_v3 dots1 ernie4_5_moe
    ernie4_5_vl_moe_text exaone_moe flex_olmo flint gemma4_text glm4_moe glm4_moe_lite glm4v_moe_text gpt_oss granitemoe
    granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 jetmoe kolibri1 laguna longcat_flash mellum mimo_v2_flash
    minimax_m2 mistral4 mixtral muse_spark_text olmoe phimoe qwen2_moe qwen3_moe qwen3_omni_moe_text qwen3_vl_moe_text
    solar_open step3p5 unlimited_ocr_text
    """.split()
)
# Dense decoders whose only token mixer is the attention function.
PACKED_DENSE = frozenset("llama mistral qwen2 qwen3 olmo olmo2 granite phi3 smollm3 ministral glm4".split())

# Rotary embeddings that look at the longest position of the whole row: one long request would change all others.
_ROW_WIDE_ROPE = frozenset({"longrope", "dynamic"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What is known of a model's architecture.

    packs: several requests may share a row. needs_mask: its mask holds more than causality, so it must build one.
    reason: why it does not pack, for reports; empty if it does.
    """

    model_type: str
    packs: bool
    needs_mask: bool
    reason: str = ""


def describe_architecture(config: Any) -> Architecture:
    """Decides for a transformers config (the text config of a wrapper)."""
    model_type = config.model_type
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {r.get("rope_type") for r in rope.values() if isinstance(r, dict)}
    row_wide = kinds & _ROW_WIDE_ROPE
    if model_type == "hunyuan_v1_moe" and rope.get("alpha"):
        row_wide = set()  # its dynamic scaling is a constant
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if model_type in {"qwen2_moe", "phimoe"} and windowed:
        reason = "its sliding window stands only in the mask"
    elif row_wide:
        reason = f"its {row_wide.pop()} rotary embedding depends on the longest request of the row"
    elif model_type in PACKED_MOE or model_type in PACKED_DENSE:
        return Architecture(model_type=model_type, packs=True, needs_mask=False)
    else:
        reason = f"packing is not known to be respected by {model_type}"
    return Architecture(model_type=model_type, packs=False, needs_mask=True, reason=reason)
