"""The four adapters, each in another on-disk layout, and the conversion to per-expert keys that one of them needs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one kind's adapter is trained and stored."""

    kind: str
    layout: str
    config: dict[str, Any]
    per_expert: bool = False
    steps: int
    peak_rate: float


RECIPES = (
    Recipe(
        kind="python",
        layout="routed experts, as wrapped parameters",
        config={"r": 8, "lora_alpha": 16, "target_modules": [], "target_parameters": _EXPERTS},
        steps=220,
        peak_rate=1.2e-2,
    ),
    Recipe(
        kind="scripture",
        layout="routed experts, one pair of matrices per expert and projection",
        config={"r": 8, "lora_alpha": 16, "target_modules": [], "target_parameters": _EXPERTS},
        per_expert=True,
        steps=220,
        peak_rate=1.2e-2,
    ),
    Recipe(
        kind="spanish",
        layout="attention only",
        config={"r": 16, "lora_alpha": 32, "target_modules": _ATTENTION},
        steps=340,
        peak_rate=1.2e-2,
    ),
    Recipe(
        kind="glossary",
        layout="attention, router, experts, embeddings and head, with rank-stabilised scaling",
        config={
            "r": 8,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": [*_ATTENTION, "embed_tokens", "lm_head"],
            "target_parameters": ["mlp.gate.weight", *_EXPERTS],
        },
        steps=220,
        peak_rate=8e-3,
    ),
)


def attach(base: Qwen3MoeForCausalLM, recipe: Recipe) -> PeftModel:
    """Wrap the base in a fresh adapter; only the adapter's parameters require gradients."""
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **recipe.config))


def save(model: PeftModel, recipe: Recipe, directory: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, in the recipe's layout, and nothing else."""
    # Without the flag PEFT would add copies of the base's embeddings and head, larger than the adapter.
    model.save_pretrained(directory, save_embedding_layers=False)
    (directory / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    config_path, tensors_path = directory / "adapter_config.json", directory / "adapter_model.safetensors"
    config = json.loads(config_path.read_text())
    config["base_model_name_or_path"] = "examples/tiny-moe"
    # PEFT keeps these as sets, whose order changes from run to run.
    for field in ("target_modules", "target_parameters"):
        config[field] = sorted(config[field]) if config[field] else config[field]
    if recipe.per_expert:
        model_config = model.get_base_model().config
        tensors = to_per_expert(load_file(tensors_path), model_config.num_experts, model_config.moe_intermediate_size)
        save_file(tensors, tensors_path, metadata={"format": "pt"})
        config["target_modules"] = ["down_proj", "gate_proj", "up_proj"]
        config["target_parameters"] = None
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def to_per_expert(tensors: dict[str, Tensor], num_experts: int, intermediate: int) -> dict[str, Tensor]:
    """Split adapters of wrapped expert parameters into one adapter per expert and projection; exact.

    E experts, r rank, D in, O out. PEFT stacks the experts differently on the two sides:
    the rows of A are expert by expert, (E·r, D), but the columns of B run over the experts fastest, (O, r·E).
    It nests the wrappers of one module: `experts.base_layer` is the first parameter, gate_up, and `experts` is down.

    gate and up share their input, hence their A; the rows of B divide in the order of the fused weight, gate first.
    """
    result: dict[str, Tensor] = {}
    for key in sorted(key for key in tensors if key.endswith(".lora_A.weight")):
        module = key.removesuffix(".lora_A.weight")
        a_ErD = tensors[key].unflatten(0, (num_experts, -1))
        b_OrE = tensors[f"{module}.lora_B.weight"].unflatten(1, (-1, num_experts))
        fused = module.endswith(".experts.base_layer")
        experts = module.removesuffix(".base_layer")
        if not experts.endswith(".experts"):
            raise ValueError(f"{key} is not an adapter of wrapped expert parameters")
        for expert in range(num_experts):
            b = b_OrE[:, :, expert]
            parts = {"gate_proj": b[:intermediate], "up_proj": b[intermediate:]} if fused else {"down_proj": b}
            for projection, rows in parts.items():
                name = f"{experts}.{expert}.{projection}"
                # Clones, since safetensors refuses tensors that share memory.
                result[f"{name}.lora_A.weight"] = a_ErD[expert].clone()
                result[f"{name}.lora_B.weight"] = rows.clone(memory_format=torch.contiguous_format)
    return result


def load(base: Qwen3MoeForCausalLM, directory: Path) -> PeftModel:
    """Put a stored adapter on the base, as a user of PEFT would."""
    return PeftModel.from_pretrained(base, directory).eval()


@torch.inference_mode()
def check_stored(trained: PeftModel, base: Qwen3MoeForCausalLM, directory: Path, ids: list[int]) -> None:
    """Raise ValueError unless the stored adapter, whatever its layout, acts as the trained one does.

    PEFT drops keys that it does not know with a warning at most, so that only the logits tell.
    """
    row = torch.tensor([ids])
    difference = (trained(input_ids=row).logits - load(base, directory)(input_ids=row).logits).abs().max().item()
    print(f"  stored in {directory.name}: logits differ by at most {difference:.1e} from the trained adapter's")
    if difference > 1e-3:
        raise ValueError(f"PEFT reads {directory} differently from how it was trained")
