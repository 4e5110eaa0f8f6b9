"""Models of random weights and adapters of random factors for the GPU tests, made from configs on the spot."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moelora import EngineOptions, GraphMode, PrefillEngine, Request, Result
from moelora.adapters.base import Catalogue, TargetKind
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue

RANKS = (4, 8, 16, 16, 24, 32, 48, 64)

QWEN3_30B_A3B: dict[str, Any] = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}

SMALL: dict[str, Any] = {
    **QWEN3_30B_A3B,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "num_hidden_layers": 4,
}


def values(results: Iterable[Result]) -> list[Any]:
    """What must be equal bit for bit."""
    return [(r.token_logprobs, r.next_token) for r in results]


def write_config(folder: Path, model_type: str, **values: Any) -> Path:
    """A folder with a config alone; weights are made at load (`load_format="dummy"`)."""
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, **values).save_pretrained(folder)
    return folder


def write_adapter(
    folder: Path, catalogue: Catalogue, rank: int, seed: int, *, suffixes: tuple[str, ...], std: float = 0.05
) -> Path:
    """Random bf16 factors on every target with one of `suffixes`: dense keys, and stacked 3-D keys for experts."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def draw(*shape: int) -> torch.Tensor:
        return (std * torch.randn(*shape, generator=generator)).to(torch.bfloat16)

    for target in catalogue:
        if not target.name.endswith(suffixes):
            continue
        stacked = (target.num_experts,) if target.kind is TargetKind.EXPERTS else ()
        key = f"base_model.model.{target.name}"
        a, b = ("lora_A.weight", "lora_B.weight")
        if target.kind is TargetKind.EMBEDDING:
            a, b = ("lora_embedding_A", "lora_embedding_B")
        tensors[f"{key}.{a}"] = draw(*stacked, rank, target.in_features)
        tensors[f"{key}.{b}"] = draw(*stacked, target.out_features, rank)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(suffixes)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_adapters(
    folder: Path,
    model: Path,
    ranks: tuple[int, ...] = RANKS,
    suffixes: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
) -> dict[str, Path]:
    """One adapter per rank, named a0, a1, …"""
    catalogue = build_catalogue(open_base(model, load_format="dummy").skeleton())
    return {
        f"a{i}": write_adapter(folder / f"a{i}", catalogue, rank, i, suffixes=suffixes) for i, rank in enumerate(ranks)
    }


def make_engine(model: Path, adapters: dict[str, Path], *, mode: GraphMode, **options: Any) -> PrefillEngine:
    """An engine on CUDA with dummy weights; bf16 unless told otherwise."""
    options = {"dtype": "bfloat16", "backend": "triton", "max_tokens": 8192, **options}
    return PrefillEngine(
        model, adapters=adapters, options=EngineOptions(device="cuda", graph=mode, load_format="dummy", **options)
    )


def mixed_requests(engine: PrefillEngine, count: int, longest: int, seed: int = 0, shortest: int = 1) -> list[Request]:
    """Ragged prompts; request i runs under adapter i mod (n + 1), the last of which is the base."""
    generator = torch.Generator().manual_seed(seed)
    names = [*engine.adapter_names, "__base__"]
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [
        Request(
            token_ids=torch.randint(0, engine.vocab_size, (n,), generator=generator).tolist(),
            adapter=names[i % len(names)],
        )
        for i, n in enumerate(lengths)
    ]
