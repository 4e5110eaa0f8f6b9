"""What layouts share: pairs of tensors, the plan of one target's factors, shape checks. Knows no particular layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from moelora.adapters.base import Target, TargetKind
from moelora.safetensors_file import TensorInfo

if TYPE_CHECKING:
    from moelora.adapters.config import AdapterConfig
    from moelora.adapters.names import Resolver


class Reader(Protocol):
    """Reads values of the file. Any number of threads may use it at once."""

    def read(self, info: TensorInfo) -> torch.Tensor:
        """A tensor in its stored dtype; never to be written to."""

    def stack(self, infos: Sequence[TensorInfo], out: torch.Tensor | None = None) -> torch.Tensor:
        """Tensors of one shape and dtype, one behind the other: `[n, …]`, in `out` and its dtype if that is given."""


class Refused(Exception):  # noqa: N818 - it never leaves the package; the loader turns it into an AdapterError
    """One reason why an adapter cannot be used, as a sentence that names the tensor or field."""


class Pair(NamedTuple):
    """lora_A and lora_B of one module of the file. module: its name there, without PEFT's prefix."""

    module: str
    a: TensorInfo
    b: TensorInfo
    is_embedding: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What planning needs besides the tensors. b_layout: "rank_major" or "grouped_by_expert"."""

    config: AdapterConfig
    resolver: Resolver
    b_layout: str
    peft_version: str | None

    def scale(self, name: str, rank: int) -> float:
        """The scale of a module or parameter by its name in the file. Raises Refused unless its rank is `rank`."""
        configured = self.config.rank_of(name)
        if configured != rank:
            raise Refused(
                f"{name}: its tensors have rank {rank}, adapter_config.json says {configured}; the scale would be wrong"
            )
        return self.config.scale_of(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one target gets its factors.

    fill(reader, a, b) writes A and the scaled B into tensors of `a_shape` and `b_shape` in the dtype that is wanted:
    every element of them, zeros included; `put_scaled` has the scale act in fp32. It may be called from any thread.
    sources: every tensor that `fill` reads. ranks, scales: as configured, without repetition.
    """

    target: Target
    layout: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    fill: Callable[[Reader, torch.Tensor, torch.Tensor], None]
    sources: tuple[TensorInfo, ...]
    ranks: tuple[int, ...]
    scales: tuple[float, ...]

    @property
    def numel(self) -> int:
        """Elements of both factors."""
        total = 0
        for shape in (self.a_shape, self.b_shape):
            product = 1
            for size in shape:
                product *= size
            total += product
        return total


def put_scaled(rows: torch.Tensor, tensor: torch.Tensor, scale: float) -> None:
    """rows = scale · tensor, multiplied in fp32 and rounded once."""
    if rows.dtype is tensor.dtype:  # torch multiplies 16-bit floats by a number in fp32
        torch.mul(tensor.expand_as(rows), scale, out=rows)
    else:
        rows.copy_(tensor.float() * scale)


def rank_of(pair: Pair, dims: int = 2) -> int:
    """The common rank of a pair. Raises Refused if the tensors have not `dims` dimensions or different ranks."""
    for info in (pair.a, pair.b):
        if len(info.shape) != dims:
            raise Refused(f"tensor {info.name!r} has shape {list(info.shape)}; {dims} dimensions are expected here")
    if pair.a.shape[-2] != pair.b.shape[-1]:
        raise Refused(
            f"{pair.module}: lora_A has rank {pair.a.shape[-2]} (shape {list(pair.a.shape)}), "
            f"lora_B has rank {pair.b.shape[-1]} (shape {list(pair.b.shape)})"
        )
    return pair.a.shape[-2]


def check_widths(pair: Pair, target: Target, into: int, out: int) -> None:
    """Raises Refused unless A takes `into` inputs and B gives `out` outputs, as (a part of) `target` needs."""
    for info, found, wanted, side in ((pair.a, pair.a.shape[-1], into, "in"), (pair.b, pair.b.shape[-2], out, "out")):
        if found != wanted:
            what = "rows of the vocabulary" if target.kind is TargetKind.EMBEDDING and side == "in" else f"{side}puts"
            raise Refused(
                f"tensor {info.name!r} of shape {list(info.shape)} has {found} {what}, "
                f"{target.name} of the base model has {wanted}"
            )


def part_rows(target: Target, part: str) -> slice:
    """The rows of an experts target that `part` ("gate", "up", "gate_up", "down") stands for."""
    if not target.gated or part in ("gate_up", "down"):
        return slice(0, target.out_features)
    half = target.out_features // 2
    if target.interleaved:
        return slice(0 if part == "gate" else 1, target.out_features, 2)
    return slice(0, half) if part == "gate" else slice(half, target.out_features)


def num_rows(rows: slice) -> int:
    """How many rows a slice with known ends selects."""
    return len(range(rows.start, rows.stop, rows.step or 1))


def part_target(targets: Sequence[Target], part: str) -> Target | None:
    """Which 3-D parameter of an experts module holds `part`."""
    leaves = {target.name.rpartition(".")[2]: target for target in targets}
    if part == "gate_up":
        return leaves.get("gate_up_proj")
    if part == "down":
        return leaves.get("down_proj")
    return leaves.get(f"{part}_proj") or leaves.get("gate_up_proj")


def distinct(values: Iterable[float]) -> tuple[float, ...]:
    """The values in ascending order, each once."""
    return tuple(sorted(set(values)))


def distinct_ranks(values: Iterable[int]) -> tuple[int, ...]:
    """The ranks in ascending order, each once."""
    return tuple(sorted(set(values)))
