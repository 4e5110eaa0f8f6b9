"""The tokenizer and the untrained model. No training here."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
POSITIONS = 512
TOP_K = 2
_VOCAB = 3072
_ROPE_THETA = 10_000.0


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that puts BOS, and no EOS, around a text.

    With BOS in front, the first real token of a prompt is scored too, and it is what the model saw in training.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """An untrained float32 model: four layers of eight experts, two per token, and an untied head."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,  # unused: every layer is a mixture
        moe_intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=POSITIONS,
        initializer_range=0.06,  # the usual 0.02 suits wider models; this narrow one learns slowly from it
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3MoeForCausalLM(config)


def save_base(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Store model (in bfloat16) and tokenizer so that transformers 4 and 5 read them alike.

    Version 5 renamed some fields. Version 4 takes its own defaults for what it does not find: 128 experts, for one.
    """
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _amend(directory / "config.json", num_experts=model.config.num_experts, rope_theta=_ROPE_THETA)
    _amend(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def _amend(path: Path, **fields: str | float) -> None:
    """Set fields of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@torch.no_grad()
def expert_shares(model: Qwen3MoeForCausalLM, rows: list[list[int]]) -> torch.Tensor:
    """Share of the routed (token, expert) pairs that each expert gets, per layer: (layers, experts)."""
    config = model.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts)
    for row in rows:
        logits_per_layer = model(torch.tensor([row]), output_router_logits=True).router_logits
        for layer, logits_TE in enumerate(logits_per_layer):
            chosen = logits_TE.topk(config.num_experts_per_tok, dim=-1).indices.flatten()
            counts[layer] += torch.bincount(chosen, minlength=config.num_experts)
    return counts / counts.sum(dim=-1, keepdim=True)
