"""The canonical form of an adapter, and the targets of a base model that an adapter can change.

Every on-disk layout is brought into this form once, at load; nothing behind the loader knows about layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from moelora.errors import AdapterError, choose_from

if TYPE_CHECKING:
    import torch


class TargetKind(StrEnum):
    """What a target does with its factors.

    LINEAR: y = W x + B A x, and the router's logits likewise (ROUTER). EMBEDDING: row(id) + B A[:, id].
    EXPERTS: one 3-D parameter, one product per expert. WHOLE: can only be replaced as a whole (norms).
    """

    LINEAR = "linear"
    ROUTER = "router"
    EMBEDDING = "embedding"
    EXPERTS = "experts"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A module (or, for experts, a parameter) of the base that an adapter can change.

    name: dotted path in the transformers model: `model.layers.0.self_attn.q_proj`, `…mlp.gate` (a router),
        `…mlp.experts.gate_up_proj` (a parameter), `model.embed_tokens`, `lm_head`, `model.norm`.
    in_features, out_features: widths of `x` and `y`; for EMBEDDING vocabulary and hidden; for WHOLE 0 and 0.
    num_experts: E for EXPERTS, else 0.
    transposed: EXPERTS stored as `[E, in, out]` instead of `[E, out, in]`.
    interleaved: EXPERTS whose fused gate/up rows alternate (even gate, odd up) instead of standing as [gate; up].
    gated: EXPERTS parameter that holds gate and up fused.
    shape: shape of the stored weight.
    kept_from: the dtypes of a model in which this weight is in float32 all the same.
    """

    name: str
    kind: TargetKind
    in_features: int
    out_features: int
    shape: tuple[int, ...]
    num_experts: int = 0
    transposed: bool = False
    interleaved: bool = False
    gated: bool = False
    kept_from: frozenset[torch.dtype] = frozenset()

    def held_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the weight in a model of `dtype`, and so that of what takes its place."""
        import torch

        return torch.float32 if dtype in self.kept_from else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All targets of one base model, by name, and what is needed to explain a mismatch."""

    model_type: str
    targets: Mapping[str, Target]
    num_layers: int
    tied_lm_head: bool

    def __iter__(self) -> Iterator[Target]:
        return iter(self.targets.values())

    def get(self, name: str) -> Target | None:
        """The target of that name, or None."""
        return self.targets.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The low-rank factors of one target, with the scale folded into `b` in fp32 before the cast.

    LINEAR, ROUTER: a `[R, in]`, b `[out, R]`. EMBEDDING: a `[R, vocabulary]`, b `[hidden, R]`.
    EXPERTS: a `[E or 1, R, in]`, b `[E or 1, out, R]`; a leading 1 is shared by all experts; `out` in the order of the
    stored parameter. Experts without factors in the file have zero b.
    """

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        """R."""
        return self.a.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSummary:
    """What `moelora inspect` prints of one target: rank and scale as configured, layout id of formats, bytes."""

    target: str
    layout: str
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A named LoRA fine-tune in canonical form, on the host, in the base model's dtype (replacements: the weight's).

    factors: by target name. replacements: whole weights by target name (`modules_to_save`), in the stored shape.
    summaries: one per target, for people. notes: what was accepted but ignored, and why.
    """

    name: str
    path: Path
    factors: Mapping[str, Factors]
    replacements: Mapping[str, torch.Tensor] = field(default_factory=dict)
    summaries: tuple[TargetSummary, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def max_rank(self) -> int:
        """The largest rank of any target; 0 if there is none."""
        return max((f.rank for f in self.factors.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return sum(f.nbytes for f in self.factors.values()) + sum(t.nbytes for t in self.replacements.values())


def check_fits(adapter: Adapter, catalogue: Catalogue) -> None:
    """Raises `AdapterError` where the adapter names a target that the model lacks, or has other widths than it.

    For adapters that do not come from the loader, which builds them from the catalogue.
    """
    for name in (*adapter.factors, *adapter.replacements):
        if catalogue.get(name) is None:
            raise AdapterError(f"adapter {adapter.name!r}: {choose_from('target', name, catalogue.targets)}")
    for name, factors in adapter.factors.items():
        target, a, b = catalogue.targets[name], tuple(factors.a.shape), tuple(factors.b.shape)
        experts = {(target.num_experts,), (1,)} if target.kind is TargetKind.EXPERTS else {()}
        fits_a = a[:-2] in experts and a[-1] == target.in_features
        fits_b = b[:-2] in experts and b[-2] == target.out_features and b[-1] == a[-2]
        if target.kind is TargetKind.WHOLE or not (fits_a and fits_b):
            raise AdapterError(
                f"adapter {adapter.name!r}: factors of shape {list(a)} and {list(b)} do not fit {name}, which takes "
                f"{target.in_features} values to {target.out_features}"
            )
    for name, weight in adapter.replacements.items():
        if tuple(weight.shape) != catalogue.targets[name].shape:
            raise AdapterError(
                f"adapter {adapter.name!r}: a weight of shape {list(weight.shape)} cannot replace {name} of shape "
                f"{list(catalogue.targets[name].shape)}"
            )
