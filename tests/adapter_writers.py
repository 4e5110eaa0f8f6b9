"""Writes adapters in every on-disk layout, with the deltas they stand for worked out term by term beside them.

Nothing here uses the loader: expected values follow from the formulas of the formats page, summed with plain loops.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from moelora.adapters.base import Adapter, Catalogue, Factors, Target, TargetKind
from moelora.adapters.loader import AdapterLoader
from moelora.models.catalogue import build_catalogue
from tiny_models import CONFIGS, VOCAB, tiny_config

PREFIX = "base_model.model."
PARTS = ("gate", "up", "down")


_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip

# Models that only catalogues are made of here.
_MORE_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": {
        **_SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
    },
    "gemma4_text": {
        **_SMALL, "intermediate_size": 48, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
        "enable_moe_block": True, "tie_word_embeddings": True, "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCAB,
    },
    "llama4_text": {
        **_SMALL, "intermediate_size": 24, "intermediate_size_mlp": 48, "num_local_experts": 4,
        "num_experts_per_tok": 1, "moe_layers": [1], "interleave_moe_layer_step": 2, "pad_token_id": 0,
    },
    "nemotron_h": {
        **_SMALL, "layers_block_type": ["attention", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "n_group": 1, "topk_group": 1,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "intermediate_size": 48,
    },
}  # fmt: skip


@functools.lru_cache(maxsize=64)
def catalogue_of(model_type: str, **changes: Any) -> Catalogue:
    """The catalogue of a tiny model, built without weights."""
    if model_type in CONFIGS:
        config = tiny_config(model_type, **changes)
    else:
        config = AutoConfig.for_model(model_type, **{**_MORE_CONFIGS[model_type], **changes})
    with torch.device("meta"):
        return build_catalogue(AutoModelForCausalLM.from_config(config))


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None, **fields: Any
) -> Path:
    """Saves tensors and a config that is valid but for what `config` and `fields` change; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    merged = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "peft_version": "0.21.2", **(config or {}), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(merged))
    return folder


def check_adapter(path: Path, *, name: str, catalogue: Catalogue, dtype: torch.dtype, **options: Any) -> Adapter:
    """`load_adapter` without memory for the values, by a loader that has seen no other adapter."""
    return AdapterLoader(catalogue, dtype=dtype, **options).check(path, name=name)


def delta_of(factors: Factors, target: Target) -> torch.Tensor:
    """B·A of canonical factors in float64: `[out, in]`, or `[E, out, in]` for experts."""
    delta = factors.b.double() @ factors.a.double()
    return delta.expand(target.num_experts, -1, -1) if target.kind is TargetKind.EXPERTS else delta


class AdapterWriter:
    """Collects random factors of one adapter, layout by layout. `expected_delta` knows what they amount to.

    r, alpha and rslora go into the config; `config` adds to it. Factors are in `dtype` on disk, and expected deltas
    follow from the values as stored.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        r: int = 3,
        alpha: float = 6,
        rslora: bool = False,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        **config: Any,
    ) -> None:
        self.catalogue = catalogue
        self.r = r
        self.alpha = alpha
        self.rslora = rslora
        self.dtype = dtype
        self.config: dict[str, Any] = dict(config)
        self.tensors: dict[str, torch.Tensor] = {}
        self.deltas: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def write(self, folder: Path) -> Path:
        """Saves the adapter and returns its folder."""
        return write_adapter(
            folder,
            {PREFIX + name: tensor for name, tensor in self.tensors.items()},
            {"r": self.r, "lora_alpha": self.alpha, "use_rslora": self.rslora, **self.config},
        )

    def expected_delta(self, target: str) -> torch.Tensor:
        """ΔW of a target in float64: `[out, in]`; experts `[E, out, in]`; the embedding `[hidden, vocabulary]`."""
        return self.deltas[target]

    def scale(self, rank: int) -> float:
        """α/r or α/√r."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    def dense(self, *targets: str, module: str | None = None) -> AdapterWriter:
        """Layout D for linear layers and routers. module: the name in the file, if it is another one."""
        for name in targets:
            target = self.catalogue.targets[name]
            a, b = self._random(self.r, target.in_features), self._random(target.out_features, self.r)
            self._put(module or name, a, b)
            self.deltas[name] = self.scale(self.r) * b.double() @ a.double()
        return self

    def embedding(self, name: str = "model.embed_tokens") -> AdapterWriter:
        """Layout E."""
        target = self.catalogue.targets[name]
        a, b = self._random(self.r, target.in_features), self._random(target.out_features, self.r)
        self.tensors[f"{name}.lora_embedding_A"] = a
        self.tensors[f"{name}.lora_embedding_B"] = b
        self.deltas[name] = self.scale(self.r) * b.double() @ a.double()
        return self

    def per_expert(
        self,
        path: str,
        *,
        parts: Sequence[str] = PARTS,
        experts: Iterable[int] | None = None,
        ranks: Mapping[int, int] | None = None,
        module: str | None = None,
        leaves: Mapping[str, str] | None = None,
    ) -> AdapterWriter:
        """Layout P. ranks: of single experts, to go with a rank_pattern. leaves: how parts are called in the file."""
        leaves = leaves or {part: f"{part}_proj" for part in PARTS}
        for part in parts:
            target = self._expert_target(path, part)
            for expert in experts if experts is not None else range(target.num_experts):
                rank = (ranks or {}).get(expert, self.r)
                rows = self._rows(target, part)
                a, b = self._random(rank, target.in_features), self._random(len(rows), rank)
                self._put(f"{module or path}.{expert}.{leaves[part]}", a, b)
                self._delta(target)[expert, rows] += self.scale(rank) * b.double() @ a.double()
        return self

    def numbered_last(self, path: str) -> AdapterWriter:
        """Layout G: `gate_up_projs.<e>` with rows in the order of the base, `down_projs.<e>`."""
        for leaf in ("gate_up_proj", "down_proj"):
            target = self.catalogue.targets[f"{path}.{leaf}"]
            for expert in range(target.num_experts):
                a, b = self._random(self.r, target.in_features), self._random(target.out_features, self.r)
                self._put(f"{path}.{leaf}s.{expert}", a, b)
                self._delta(target)[expert] += self.scale(self.r) * b.double() @ a.double()
        return self

    def wrapped(
        self,
        path: str,
        *,
        parameters: Sequence[str] = ("gate_up_proj", "down_proj"),
        swapped: bool = True,
        grouped: bool = False,
        module: str | None = None,
    ) -> AdapterWriter:
        """Layouts W and U: parameters in registration order, the first one innermost.

        swapped: A on the last dimension of the stored parameter, as newer PEFT does for `[E, out, in]`; else on its
        middle one. grouped: the columns of B are expert-slow.
        """
        for i, leaf in enumerate(parameters):
            target = self.catalogue.targets[f"{path}.{leaf}"]
            experts, d1, d2 = target.shape
            into, out = (d2, d1) if swapped else (d1, d2)
            a, b = self._random(experts * self.r, into), self._random(out, self.r * experts)
            self._put((module or path) + ".base_layer" * (len(parameters) - 1 - i), a, b)
            stored = self._delta(target)
            for expert in range(experts):
                for k in range(self.r):
                    column = b[:, expert * self.r + k] if grouped else b[:, k * experts + expert]
                    outer = torch.outer(column.double(), a[expert * self.r + k].double()) * self.scale(self.r)
                    outer = outer if swapped else outer.T  # now [d1, d2]
                    stored[expert] += outer.T if target.transposed else outer
        listed = self.config.setdefault("target_parameters", [])
        listed += [name for leaf in parameters if (name := f"experts.{leaf}") not in listed]
        return self

    def stacked(
        self,
        path: str,
        *,
        parts: Sequence[str] = PARTS,
        shared_a: Sequence[str] = (),
        shared_b: Sequence[str] = (),
        leaves: Mapping[str, str] | None = None,
        module: str | None = None,
    ) -> AdapterWriter:
        """Layouts S and T: 3-D factors; parts in `shared_a` and `shared_b` have one A or B for all experts."""
        leaves = leaves or {part: f"{part}_proj" for part in (*PARTS, "gate_up")}
        for part in parts:
            target = self._expert_target(path, part)
            rows = self._rows(target, part)
            a = self._random(1 if part in shared_a else target.num_experts, self.r, target.in_features)
            b = self._random(1 if part in shared_b else target.num_experts, len(rows), self.r)
            self._put(f"{module or path}.{leaves[part]}", a, b)
            for expert in range(target.num_experts):
                product = b[min(expert, b.shape[0] - 1)].double() @ a[min(expert, a.shape[0] - 1)].double()
                self._delta(target)[expert, rows] += self.scale(self.r) * product
        return self

    def fused(self, module: str, targets: Sequence[str]) -> AdapterWriter:
        """Layout F: one A, the rows of B for `targets` one after the other."""
        found = [self.catalogue.targets[name] for name in targets]
        a = self._random(self.r, found[0].in_features)
        pieces = [self._random(target.out_features, self.r) for target in found]
        self._put(module, a, torch.cat(pieces))
        for target, b in zip(found, pieces, strict=True):
            self.deltas[target.name] = self.scale(self.r) * b.double() @ a.double()
        return self

    def split(self, target: str, widths: Mapping[str, int], parts: Sequence[str]) -> AdapterWriter:
        """Layout F the other way round: `parts` of a fused layer, each a module of its own beside it."""
        found = self.catalogue.targets[target]
        delta = torch.zeros(found.out_features, found.in_features, dtype=torch.float64)
        start = 0
        for leaf, width in widths.items():
            if leaf in parts:
                a, b = self._random(self.r, found.in_features), self._random(width, self.r)
                self._put(f"{target.rpartition('.')[0]}.{leaf}", a, b)
                delta[start : start + width] = self.scale(self.r) * b.double() @ a.double()
            start += width
        self.deltas[target] = delta
        return self

    def _random(self, *shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._generator) * 0.1).to(self.dtype)

    def _put(self, module: str, a: torch.Tensor, b: torch.Tensor) -> None:
        self.tensors[f"{module}.lora_A.weight"] = a
        self.tensors[f"{module}.lora_B.weight"] = b

    def _expert_target(self, path: str, part: str) -> Target:
        for leaf in (f"{part}_proj", "gate_up_proj"):
            target = self.catalogue.get(f"{path}.{leaf}")
            if target is not None:
                return target
        raise KeyError(part)

    def _rows(self, target: Target, part: str) -> list[int]:
        rows = list(range(target.out_features))
        if not target.gated or part == "gate_up":
            return rows
        if target.interleaved:
            return rows[0 if part == "gate" else 1 :: 2]
        half = target.out_features // 2
        return rows[:half] if part == "gate" else rows[half:]

    def _delta(self, target: Target) -> torch.Tensor:
        shape = (target.num_experts, target.out_features, target.in_features)
        return self.deltas.setdefault(target.name, torch.zeros(shape, dtype=torch.float64))
