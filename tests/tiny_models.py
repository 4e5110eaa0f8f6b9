"""Tiny random models of many architectures, made on the fly and saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN: dict[str, Any] = {
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
_DEEPSEEK: dict[str, Any] = {
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_QWEN, "head_dim": 16, "norm_topk_prob": True},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 40, "norm_topk_prob": False, "mlp_only_layers": [0]},
    "mixtral": {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": {**_DEEPSEEK, "routed_scaling_factor": 1.5},
    "glm4_moe": {**_QWEN, "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 16},
    "gpt_oss": {
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "granitemoe": {
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 2.0,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "ernie4_5_moe": {
        **_QWEN,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "phimoe": {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_next": {
        **_QWEN,
        "head_dim": 16,
        "shared_expert_intermediate_size": 24,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3": {"intermediate_size": 48, "head_dim": 16, "tie_word_embeddings": True},
    "llama": {"intermediate_size": 48},
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The config of a tiny model of that type."""
    return AutoConfig.for_model(model_type, **{**_COMMON, **CONFIGS[model_type], **changes})


def make_model(model_type: str, *, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A random fp32 model whose weights are large enough for every part to matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.6 if "experts" in name else 0.25)
            elif "norm" in name:
                parameter.copy_(1.0 + 0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 0.2)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0.0, 0.1)
    return model.eval()


def save_model(folder: Path, model_type: str, *, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """Makes a model, saves it to `folder` and returns it."""
    model = make_model(model_type, seed=seed, **changes)
    model.save_pretrained(folder)
    return model


def reference_logprobs(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """log p(t_i | t_<i) for i ≥ 1, by the model alone, one prompt per forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs[:-1].gather(1, torch.tensor(token_ids[1:], dtype=torch.int64).unsqueeze(1))[:, 0]


def peft_adapter(folder: Path, model: torch.nn.Module, seed: int, *, rank: int = 4, **options: Any) -> None:
    """Saves an adapter of random A and B that PEFT made for `model`, which is left as it was."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(0.0, 0.15)
    adapted.save_pretrained(folder)
    adapted.unload()
