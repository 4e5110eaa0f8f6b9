"""Tuned configurations of the experts' kernels: one JSON file per GPU, filled by `moelora tune`, read at first use.

A file lies in `moelora_kernels/tuned/`, or in the folder that the environment variable MOELORA_TUNED names, which wins.
It lists shapes, and for each shape token counts with their blocks. Only what may not change a row's bits is taken from
it (see `config.py`): the depth of a step and the smallest tile are those of the built-in configurations.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moelora.backends.base import ExpertsWeights
from moelora.errors import ConfigError
from moelora_kernels.ops.experts.config import MoeConfig, ProductConfig, default_config, smallest_block_m
from moelora_kernels.ops.routes import MAX_BLOCK_M

FOLDER = Path(__file__).parents[2] / "tuned"
VARIABLE = "MOELORA_TUNED"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsKey:
    """What a tuned configuration is for, the token count apart. dtype: torch's name without `torch.`."""

    num_experts: int
    top_k: int
    hidden: int
    inter: int
    gated: bool
    transposed: bool
    dtype: str

    @staticmethod
    def of(base: ExpertsWeights, top_k: int) -> ExpertsKey:
        """The key of an experts layer."""
        inter, hidden = base.down.shape[1:] if base.transposed else base.down.shape[:0:-1]
        return ExpertsKey(
            num_experts=base.num_experts,
            top_k=top_k,
            hidden=hidden,
            inter=inter,
            gated=base.gated,
            transposed=base.transposed,
            dtype=str(base.up.dtype).removeprefix("torch."),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The blocks for batches of up to `tokens` tokens. ms, default_ms: of base and LoRA together, when it was tuned."""

    tokens: int
    config: MoeConfig
    ms: float
    default_ms: float


Table = dict[ExpertsKey, tuple[Tuned, ...]]
"""By shape, in ascending order of tokens."""


def pick_config(base: ExpertsWeights, *, tokens: int, top_k: int) -> MoeConfig:
    """The tuned configuration for a batch on the device of `base`, or the built-in one where there is none.

    That of the next larger token count; a batch larger than all of them has none. Depends on shapes and the device
    alone, so that capture and replay use the same one.
    """
    tuned = read_table(device_name(base.up.device)).get(ExpertsKey.of(base, top_k), ())
    place = bisect_left([one.tokens for one in tuned], tokens)
    if place == len(tuned):
        return default_config(tokens=tokens, top_k=top_k, num_experts=base.num_experts, dtype=base.up.dtype)
    return tuned[place].config


@cache
def device_name(device: torch.device) -> str:
    """What tables call a device: NVIDIA_H200, cpu."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return re.sub(r"\W+", "_", name)


def table_path(name: str, folder: Path | None = None) -> Path:
    """The file of a device: in `folder`, else in the one that MOELORA_TUNED names, else in the package."""
    own = os.environ.get(VARIABLE)
    return (folder or (Path(own) if own else FOLDER)) / f"{name}.json"


@cache
def read_table(name: str) -> Table:
    """The table of a device; empty if there is none. Raises `ConfigError` for one that cannot be used."""
    path = table_path(name)
    if not path.exists():
        path = FOLDER / path.name
    return load_table(path) if path.exists() else {}


def load_table(path: Path) -> Table:
    """Reads one file. Raises `ConfigError` naming what is wrong with it."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["shapes"]
        return {_make(ExpertsKey, entry["shape"]): tuple(map(_tuned, entry["tuned"])) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no table of tuned configurations: {error!r}; remove it or tune again") from None


def save_table(path: Path, table: Mapping[ExpertsKey, Sequence[Tuned]]) -> None:
    """Writes one file, over an earlier one."""
    shapes = [{"shape": asdict(key), "tuned": [asdict(one) for one in tuned]} for key, tuned in table.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"shapes": shapes}, indent=1) + "\n", encoding="utf-8")


def _tuned(entry: dict[str, Any]) -> Tuned:
    given = entry["config"]
    products = {name: _make(ProductConfig, given[name]) for name in ("up", "down", "shrink")}
    one = replace(_make(Tuned, entry), config=MoeConfig(block_m=given["block_m"], **products))
    keeps_bits(one.config)
    return one


def keeps_bits(config: MoeConfig) -> None:
    """Raises `ValueError` for blocks that could change the bits of 16-bit products, or that routes have no room for."""
    like = default_config(tokens=1, top_k=1, num_experts=1, dtype=torch.bfloat16)
    smallest = smallest_block_m(torch.bfloat16)
    if not smallest <= config.block_m <= MAX_BLOCK_M:
        raise ValueError(f"block_m {config.block_m} is not between {smallest} and {MAX_BLOCK_M}")
    for name in ("up", "down", "shrink"):
        if getattr(config, name).block_k != getattr(like, name).block_k:
            raise ValueError(f"block_k of {name} must be {getattr(like, name).block_k}")


def _make(kind: Any, entry: dict[str, Any]) -> Any:
    names = {field.name for field in fields(kind)}
    if set(entry) != names:
        raise ValueError(f"expected the keys {', '.join(sorted(names))}, found {', '.join(sorted(entry))}")
    return kind(**entry)
