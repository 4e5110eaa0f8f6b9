"""`moelora inspect`: what an adapter changes, or what a checkpoint holds. Loads no weights."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moelora.errors import AdapterError, ConfigError, MoeloraError
from moelora.wording import counted
from moelora_cli.command import EXIT_DONE, EXIT_REFUSED, MoeloraCommand, size

if TYPE_CHECKING:
    from moelora.adapters.base import Catalogue

_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")
"""The number of a layer in the name of a module."""

_KINDS = {
    "linear": "linear layer",
    "router": "router",
    "embedding": "embedding",
    "experts": "expert parameter",
    "whole": "norm",
}
"""What the kinds of targets are called when they are counted."""


@click.command(cls=MoeloraCommand, short_help="What an adapter or a checkpoint holds.")
@click.argument("path")
@click.option(
    "--model", metavar="MODEL", help="The base model of an adapter: shows its real targets and checks the fit."
)
@click.option(
    "--lora-b-layout",
    type=click.Choice(["rank_major", "grouped_by_expert"]),
    help="Column order of B in adapters of fused experts that do not state it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with every target.")
def inspect(path: str, model: str | None, lora_b_layout: str | None, as_json: bool) -> int:
    """Shows what PATH holds: an adapter's folder, or a checkpoint (a folder, or a model in the Hugging Face cache).

    The exit code is 2 if it would be refused by `moelora prefill`; the reasons are shown with the rest.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and not (folder / "config.json").exists():
        facts = adapter_facts(folder, model, lora_b_layout)
    elif model is not None and not folder.exists():
        raise AdapterError(f"{path}: no such folder")
    elif model is not None:
        raise ConfigError(f"--model is for adapters, and {path} is not one (an adapter has no config.json)")
    else:
        facts = checkpoint_facts(path)
    facts["loads"] = not facts["refused"]
    click.echo(json.dumps(facts, indent=2) if as_json else "\n".join(_lines(facts)))
    return EXIT_REFUSED if facts["refused"] else EXIT_DONE


def adapter_facts(folder: Path, model: str | None, lora_b_layout: str | None) -> dict[str, Any]:
    """What is in an adapter's folder. Sizes are those of the model's dtype, bfloat16 without a model."""
    import torch

    from moelora.adapters.describe import describe

    catalogue, dtype = (None, torch.bfloat16) if model is None else _catalogue(model)
    found = describe(folder, catalogue, dtype=dtype, lora_b_layout=lora_b_layout)
    return {
        "adapter": str(folder),
        "model": model,
        "base_model": found.config and found.config.base_model,
        "peft_version": found.config and found.config.peft_version,
        "layouts": list(found.layouts),
        "max_rank": found.max_rank,
        "tensors": found.num_tensors,
        "file_bytes": found.file_bytes,
        "file_dtypes": list(found.dtypes),
        "bytes_per_slot": found.bytes_per_slot,
        "slot_dtype": str(dtype).removeprefix("torch."),
        "targets": [
            {
                "target": target.target,
                "layout": target.layout,
                "ranks": list(target.ranks),
                "scales": list(target.scales),
                "bytes": target.nbytes,
            }
            for target in found.targets
        ],
        "notes": list(found.notes),
        "refused": list(found.refusals),
    }


def checkpoint_facts(model: str) -> dict[str, Any]:
    """What is in a checkpoint: its sizes, its files, and what of it an adapter can change."""
    from moelora.jobs.text import has_tokenizer
    from moelora.models.base_model import open_base, read_config
    from moelora.models.checkpoint import check_checkpoint, find_model_folder

    folder = find_model_folder(model)
    config = read_config(folder).get_text_config()
    facts: dict[str, Any] = {
        "checkpoint": str(folder),
        "model_type": config.model_type,
        "layers": getattr(config, "num_hidden_layers", None),
        "hidden_size": getattr(config, "hidden_size", None),
        "vocab_size": getattr(config, "vocab_size", None),
        "max_positions": getattr(config, "max_position_embeddings", None),
        "tokenizer": has_tokenizer(folder),
        "refused": [],
    }
    try:
        source = open_base(model, load_format="dummy")
        architecture = source.architecture
        facts["quantised"] = f"{source.quantisation.method}, dequantised at load" if source.quantisation else None
        facts["packs_requests"] = architecture.packs or architecture.reason
        facts["called_once_per_request"] = list(architecture.looped)
        facts["attention_function"] = architecture.attention
        facts["experts_function"] = architecture.experts
        facts["graph_modes"] = [str(mode) for mode in architecture.graph_modes]
        facts["reads_on_the_host"] = list(architecture.syncs)
    except MoeloraError as error:
        facts["refused"].append(str(error))
    try:
        files = check_checkpoint(folder)
        facts |= {"files": len(files.files), "tensors": len(files.tensors), "file_bytes": files.nbytes}
    except MoeloraError as error:
        facts["refused"].append(str(error))
    try:
        catalogue, dtype = _catalogue(model)
        facts["dtype"] = str(dtype).removeprefix("torch.")
        facts["experts"] = max((target.num_experts for target in catalogue), default=0)
        facts["adaptable"] = dict(Counter(str(target.kind) for target in catalogue))
    except MoeloraError as error:
        facts["refused"].append(str(error))
    return facts


def _catalogue(model: str) -> tuple[Catalogue, Any]:
    """The targets of a model and its dtype, from its config: the model is built without memory for weights."""
    import torch

    from moelora.models.base_model import open_base, resolve_dtype
    from moelora.models.catalogue import build_catalogue

    source = open_base(model, load_format="dummy")
    dtype = resolve_dtype("auto", source.config, torch.device("meta"))
    return build_catalogue(source.skeleton()), dtype


def _lines(facts: dict[str, Any]) -> list[str]:
    """The facts for people: targets that differ by their layer's number alone share a line, see `_target_lines`."""
    plain = {key: value for key, value in facts.items() if key not in ("targets", "notes", "refused", "loads")}
    width = max(map(len, plain))
    lines = [f"{key:<{width}}  {_shown(key, value)}" for key, value in plain.items() if value is not None]
    lines += _target_lines(facts.get("targets", []))
    lines += [f"note: {note}" for note in facts.get("notes", [])]
    lines += [f"refused: {reason}" for reason in facts["refused"]]
    return [*lines, f"loads: {_verdict(facts)}"]


def _verdict(facts: dict[str, Any]) -> str:
    """Whether a run would take it. Without its model, of an adapter only what its own files tell is known."""
    if not facts["loads"]:
        return "no"
    if "checkpoint" in facts or facts["model"]:
        return "yes"
    return "yes, as far as its own files tell; --model checks the fit"


def _target_lines(targets: list[dict[str, Any]]) -> list[str]:
    """A line for targets that are alike in all layers (`*`), or one for each kind, with the layers that have it."""
    groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for target in targets:
        number = _LAYER.search(target["target"])
        key = (_LAYER.sub("*", target["target"]), target["layout"], tuple(target["ranks"]), tuple(target["scales"]))
        groups.setdefault(key, []).append((int(number[0]) if number else -1, target["bytes"]))
    alike = Counter(key[0] for key in groups)
    names = {
        key: key[0] if alike[key[0]] == 1 else key[0].replace("*", _ranges([layer for layer, _ in found]), 1)
        for key, found in groups.items()
    }
    lines = [f"targets ({len(targets)}):"] if targets else []
    width = max(map(len, names.values()), default=0)
    for key, found in groups.items():
        name, (_, layout, ranks, scales), sizes = names[key], key, [nbytes for _, nbytes in found]
        parts = [f"layout {layout}"]
        parts += [f"rank {', '.join(map(str, ranks))}"] if ranks else []
        parts += [f"scale {', '.join(f'{scale:g}' for scale in scales)}"] if scales else []
        count = f"{len(sizes)} × " if len(sizes) > 1 else ""
        lines.append(f"  {name:<{width}}  {'  '.join(parts)}  {count}{size(sum(sizes) // len(sizes))}")
    return lines


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers in short: 0, 2-4."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _shown(key: str, value: Any) -> str:
    if key.endswith(("bytes", "bytes_per_slot")):
        return size(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(counted(count, _KINDS[kind]) for kind, count in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"no: {value}" if key == "packs_requests" else str(value)
