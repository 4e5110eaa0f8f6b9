"""`moelora inspect`: what an adapter changes, or what a checkpoint holds. Loads no weights."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moelora.errors import AdapterError, CheckpointError, ConfigError, MoeloraError, similar_folder
from moelora.wording import counted
from moelora_cli.command import EXIT_DONE, EXIT_REFUSED, MoeloraCommand, size
from moelora_cli.layout import alike_together, entry, ranges, table

if TYPE_CHECKING:
    from moelora.adapters.base import Catalogue

_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")
"""The number of a layer in the name of a module."""
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
"""The number of an expert there."""

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
    is_checkpoint = (folder / "config.json").exists()
    if folder.is_dir() and not is_checkpoint:
        _refuse_neither(folder)
        facts = adapter_facts(folder, model, lora_b_layout)
    elif model is None:
        facts = checkpoint_facts(_known_model(path))
    elif is_checkpoint or folder.exists():
        raise ConfigError(f"--model is for adapters, and {path} is not one (an adapter has no config.json)")
    else:
        raise AdapterError(f"{path}: no such folder{similar_folder(folder)}")
    facts["loads"] = not facts["refused"]
    click.echo(json.dumps(facts, indent=2) if as_json else "\n".join(_lines(facts)))
    return EXIT_REFUSED if facts["refused"] else EXIT_DONE


def _refuse_neither(folder: Path) -> None:
    """Raises `ConfigError` for a folder without any file that an adapter has."""
    from moelora.adapters.config import CONFIG_NAME, hint_at_subfolders

    if not any(folder.glob("adapter_*")):
        raise ConfigError(
            f"{folder}: holds neither a config.json, as a model, nor an {CONFIG_NAME}, as an adapter"
            f"{hint_at_subfolders(folder)}"
        )


def _known_model(path: str) -> str:
    """`path`, where it is a folder or a model in the cache. Raises `ConfigError` for what is not there at all."""
    from moelora.models.checkpoint import find_model_folder

    folder = Path(path).expanduser()
    try:
        find_model_folder(path)
    except CheckpointError:
        if folder.exists():
            raise
        raise ConfigError(
            f"{path}: neither the folder of an adapter or a model, nor a model in the Hugging Face cache, where "
            f"`hf download NAME` puts one{similar_folder(folder)}"
        ) from None
    return path


def adapter_facts(folder: Path, model: str | None, lora_b_layout: str | None) -> dict[str, Any]:
    """What is in an adapter's folder. Sizes are those of the model's dtype, bfloat16 without a model."""
    import torch

    from moelora.adapters.describe import describe

    catalogue, dtype = (None, torch.bfloat16) if model is None else _catalogue(model)
    found = describe(folder, catalogue, dtype=dtype, lora_b_layout=lora_b_layout)
    # Where the files could not be read, or no target was made out, nothing is known of these; that is not 0.
    known = bool(found.targets)
    return {
        "adapter": str(folder),
        "model": model,
        "base_model": found.config and found.config.base_model,
        "peft_version": found.config and found.config.peft_version,
        "layouts": list(found.layouts) if known else None,
        "max_rank": found.max_rank if known else None,
        "tensors": found.num_tensors or None,
        "file_bytes": found.file_bytes or None,
        "file_dtypes": list(found.dtypes) or None,
        "bytes_per_slot": found.bytes_per_slot if known else None,
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
    apart = ("targets", "notes", "refused", "loads")
    plain = {key: value for key, value in facts.items() if key not in apart and value is not None}
    width = max(map(len, plain))
    lines = [line for key, value in plain.items() for line in entry(f"{key:<{width}}  ", _shown(key, value))]
    lines += _target_lines(facts.get("targets", []))
    lines += [line for note in facts.get("notes", []) for line in entry("note: ", note)]
    refused = alike_together(alike_together(facts["refused"], _EXPERT), _LAYER)
    lines += [line for reason in refused for line in entry("refused: ", reason)]
    return [*lines, *entry("loads: ", _verdict(facts))]


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
    rows = []
    for (name, layout, ranks, scales), found in groups.items():
        layers = name if alike[name] == 1 else name.replace("*", ranges([layer for layer, _ in found]), 1)
        count = f"{len(found)} × " if len(found) > 1 else ""
        nbytes = count + size(sum(nbytes for _, nbytes in found) // len(found))
        rows.append((layers, layout, ", ".join(map(str, ranks)), ", ".join(f"{x:g}" for x in scales), nbytes))
    return table(f"targets ({len(targets)})", ("layout", "rank", "scale", "bytes"), rows)


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
