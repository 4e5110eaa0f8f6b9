"""What `moelora inspect` prints of an adapter: layouts, targets, ranks, scales, sizes, refusals. Loads no factors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moelora.adapters.base import Catalogue, TargetSummary
from moelora.adapters.config import AdapterConfig, read_config
from moelora.adapters.files import Headers, TensorInfo, TensorReader, check_folder, parse_headers, read_headers
from moelora.adapters.layouts.base import Pair, Refused, distinct, distinct_ranks, rank_of
from moelora.adapters.loader import summarise
from moelora.adapters.names import Resolver, Role, parse_all_experts, parse_expert, parse_key, unwrapped
from moelora.adapters.planner import group_tensors, plan_adapter
from moelora.adapters.plans import make_context
from moelora.adapters.values import not_finite
from moelora.errors import AdapterError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDescription:
    """An adapter for people. Targets are the model's where a catalogue was given, else the names in the file.

    layouts: ids of the formats page, "whole" for full weights. bytes_per_slot: of this adapter's factors as held in
    the dtype asked for. dtypes: as stored. refusals: every reason found why it cannot be loaded; empty if it can.
    """

    path: Path
    config: AdapterConfig | None
    targets: tuple[TargetSummary, ...]
    dtypes: tuple[str, ...]
    num_tensors: int
    file_bytes: int
    notes: tuple[str, ...]
    refusals: tuple[str, ...]

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layouts in use, sorted."""
        return tuple(sorted({target.layout for target in self.targets}))

    @property
    def max_rank(self) -> int:
        """The largest configured rank of any target; 0 if there is none."""
        return max((rank for target in self.targets for rank in target.ranks), default=0)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of all targets."""
        return sum(target.nbytes for target in self.targets)


def describe(
    path: str | Path,
    catalogue: Catalogue | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    lora_b_layout: str | None = None,
    peft_version: str | None = None,
    check_values: bool = True,
) -> AdapterDescription:
    """Describes an adapter folder, with or without the model it is for; collects refusals instead of raising them.

    check_values: also reads all values and reports those that are not finite. See `AdapterLoader` for the overrides.
    """
    folder = Path(path)
    refusals: list[str] = []
    config: AdapterConfig | None = None
    headers: Headers | None = None
    tensors: dict[str, TensorInfo] = {}
    try:
        check_folder(folder)
    except AdapterError as error:
        return _unreadable(folder, _without_path(error, folder))
    try:
        config = read_config(folder)
        refusals += config.refusals
    except AdapterError as error:
        refusals.append(_without_path(error, folder))
    try:
        headers = read_headers(folder)
        tensors = parse_headers(headers)
    except AdapterError as error:
        refusals.append(_without_path(error, folder))
    targets: Sequence[TargetSummary] = ()
    notes: list[str] = []
    if config is not None:
        notes += config.notes
        if catalogue is not None and not refusals:
            overrides = {"lora_b_layout": lora_b_layout, "peft_version": peft_version}
            planned = plan_adapter(tensors, make_context(folder, config, Resolver(catalogue), **overrides))
            refusals += planned.problems
            notes += planned.notes
            targets = summarise(planned, dtype)
        else:
            groups = group_tensors(tensors)
            refusals += groups.problems
            notes += groups.notes
            view = _KeyView(config, lora_b_layout or config.lora_b_layout, groups.pairs)
            targets = view.summaries(groups.pairs, groups.plain, dtype)
            refusals += view.problems
    if check_values and headers is not None:
        bad, has_effect = _look_at_values(headers, tensors)
        refusals += bad
        if tensors and not has_effect:
            notes.append("every B is zero, as before training: this adapter changes nothing")
    return AdapterDescription(
        path=folder,
        config=config,
        targets=tuple(targets),
        dtypes=tuple(sorted({info.dtype for info in tensors.values()})),
        num_tensors=len(tensors),
        file_bytes=sum(info.nbytes for info in tensors.values()),
        notes=tuple(notes),
        refusals=tuple(refusals),
    )


def _unreadable(folder: Path, reason: str) -> AdapterDescription:
    return AdapterDescription(
        path=folder, config=None, targets=(), dtypes=(), num_tensors=0, file_bytes=0, notes=(), refusals=(reason,)
    )


def _without_path(error: AdapterError, folder: Path) -> str:
    return str(error).removeprefix(f"{folder}: ").removeprefix(f"{folder}/")


class _KeyView:
    """Summaries by the names in the file, where no model says more. Experts of one module are shown together."""

    def __init__(self, config: AdapterConfig, b_layout: str | None, pairs: Sequence[Pair]) -> None:
        self.config = config
        self.wrapper_layout = "U" if b_layout == "grouped_by_expert" else "W"
        self.problems: list[str] = []
        self.nested: dict[str, int] = defaultdict(int)
        for pair in pairs:
            path, depth = unwrapped(pair.module)
            self.nested[path] = max(self.nested[path], depth)

    def summaries(
        self, pairs: Sequence[Pair], plain: Sequence[tuple[str, TensorInfo]], dtype: torch.dtype
    ) -> list[TargetSummary]:
        """One summary per target and layout, `nbytes` as the file's tensors take in `dtype`."""
        rows: dict[tuple[str, str], list[tuple[int, float, int]]] = defaultdict(list)
        for pair in pairs:
            target, layout, name = self._label(pair)
            rank = self._rank(pair, layout, name)
            scale = self.config.scale_of(name) if self.config.rank_of(name) else math.nan
            rows[target, layout].append((rank, scale, (pair.a.numel + pair.b.numel) * dtype.itemsize))
        low_rank = [
            TargetSummary(
                target=target,
                layout=layout,
                ranks=distinct_ranks(rank for rank, _, _ in found),
                scales=distinct(scale for _, scale, _ in found if not math.isnan(scale)),
                nbytes=sum(nbytes for _, _, nbytes in found),
            )
            for (target, layout), found in rows.items()
        ]
        whole = [
            TargetSummary(target=name, layout="whole", ranks=(), scales=(), nbytes=info.numel * dtype.itemsize)
            for name, info in plain
        ]
        return [*low_rank, *whole]

    def _rank(self, pair: Pair, layout: str, name: str) -> int:
        configured = self.config.rank_of(name)
        if layout in ("W", "U"):  # its tensors hold rank × experts; only a model tells the two apart
            return configured
        try:
            rank = rank_of(pair, dims=3 if layout in ("S", "T") else 2)
        except Refused as refused:
            self.problems.append(str(refused))
            return 0
        if configured and configured != rank:
            self.problems.append(f"{name}: its tensors have rank {rank}, adapter_config.json says {configured}")
        return rank

    def _label(self, pair: Pair) -> tuple[str, str, str]:
        """Target and layout to show for a pair, and the name that the patterns of the configuration know it by."""
        module = pair.module
        expert = parse_expert(module)
        if expert is not None:
            layout = "G" if expert.numbered_last else "P"
            leaf = module.removeprefix(f"{expert.path}.").replace(str(expert.expert), "*", 1)
            return f"{expert.path}.{leaf}", layout, module
        if len(pair.a.shape) == 3 and parse_all_experts(module) is not None:
            return module, "T" if 1 in (pair.a.shape[0], pair.b.shape[0]) else "S", module
        path, depth = unwrapped(module)
        if path.rpartition(".")[2] == "experts":
            parameter = self._wrapped_parameter(path, depth)
            return parameter, self.wrapper_layout, parameter
        if pair.is_embedding:
            return module, "E", module
        wrapped = self.config.wraps_parameter(f"{module}.weight")
        return module, "W2" if wrapped else "D", f"{module}.weight" if wrapped else module

    def _wrapped_parameter(self, path: str, depth: int) -> str:
        if self.nested[path] == 1:  # two wrappers: the first parameter is the inner one
            return f"{path}.{'gate_up_proj' if depth else 'down_proj'}"
        names = [f"{path}.{leaf}" for leaf in ("gate_up_proj", "up_proj", "down_proj")]
        listed = [name for name in names if self.config.wraps_parameter(name)]
        return listed[0] if len(listed) == 1 else path


def _look_at_values(headers: Headers, tensors: dict[str, TensorInfo]) -> tuple[list[str], bool]:
    """Tensors that are not finite, and whether any tensor but an A holds anything else than zeros."""
    found, has_effect = [], False
    with TensorReader(headers.folder, headers.stamps) as reader:
        for info in tensors.values():
            if info.numel:
                tensor = reader.read(info)
                if (reason := not_finite(info.name, tensor)) is not None:
                    found.append(reason)
                is_a = parse_key(info.name)[1] in (Role.A, Role.EMBEDDING_A)
                has_effect = has_effect or (not is_a and bool(tensor.any()))
    return found, has_effect
