"""Sorts the tensors of an adapter into layouts and plans every target. Reads no values: headers and config only."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from moelora.adapters.base import Target, TargetKind
from moelora.adapters.layouts.base import Context, Pair, Plan, Refused
from moelora.adapters.layouts.dense import plan_dense
from moelora.adapters.layouts.fused import joined_target, plan_joined, plan_split, split_targets
from moelora.adapters.layouts.param_wrapper import Wrapped, assign_parameters, plan_param_wrapper
from moelora.adapters.layouts.per_expert import plan_per_expert
from moelora.adapters.layouts.stacked import plan_stacked
from moelora.adapters.layouts.whole import Whole, plan_copy, plan_plain
from moelora.adapters.names import (
    ExpertName,
    Role,
    parse_all_experts,
    parse_expert,
    parse_key,
    shortened,
    unwrapped,
)
from moelora.safetensors_file import TensorInfo

_A_ROLES = {Role.A: Role.B, Role.EMBEDDING_A: Role.EMBEDDING_B}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What became of every tensor of the file.

    plans: one per target. wholes: tensors stored in full. problems: why the adapter is refused, each naming its tensor,
    those first that nothing in the model takes. notes: what was ignored.
    """

    plans: Sequence[Plan]
    wholes: Sequence[Whole]
    problems: Sequence[str]
    notes: Sequence[str]


@dataclass(slots=True)
class Groups:
    """The tensors of a file by what they are; module names as in the file."""

    pairs: list[Pair] = field(default_factory=list)
    plain: list[tuple[str, TensorInfo]] = field(default_factory=list)
    copies: list[tuple[str, TensorInfo]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def group_tensors(tensors: Mapping[str, TensorInfo]) -> Groups:
    """Parses every name once and pairs lora_A with lora_B."""
    groups = Groups()
    factors: dict[Role, dict[str, TensorInfo]] = {role: {} for pair in _A_ROLES.items() for role in pair}
    empty = 0
    for name, info in tensors.items():
        module, role = parse_key(name)
        of_its_role = factors.get(role)
        if info.nbytes == 0:
            empty += 1
        elif of_its_role is not None:
            before = of_its_role.setdefault(module, info)
            if before is not info:
                groups.problems.append(f"tensors {before.name!r} and {name!r} are the same factor")
        elif role is Role.UNSUPPORTED:
            groups.problems.append(f"tensor {name!r} belongs to a kind of adapter that is not supported")
        elif role is Role.IGNORED:
            groups.notes.append(f"tensor {name!r} is ignored: it only matters in training")
        elif role is Role.PLAIN:
            groups.plain.append((module, info))
        else:
            groups.copies.append((module, info))
    if empty:
        groups.notes.append(f"{empty} empty w3 placeholders are ignored")
    _pair_up(factors, groups)
    return groups


def _pair_up(factors: Mapping[Role, Mapping[str, TensorInfo]], groups: Groups) -> None:
    """Pairs in the order of their A in the file; embeddings come last."""
    for role_a, role_b in _A_ROLES.items():
        of_a, of_b = factors[role_a], factors[role_b]
        for module, info in of_a.items():
            other = of_b.get(module)
            if other is not None:
                groups.pairs.append(Pair(module, info, other, role_a is Role.EMBEDDING_A))
            else:
                groups.problems.append(f"{module} has {role_a} without {role_b} (tensor {info.name!r})")
        for module, info in of_b.items():
            if module not in of_a:
                groups.problems.append(f"{module} has {role_b} without {role_a} (tensor {info.name!r})")


def plan_adapter(tensors: Mapping[str, TensorInfo], context: Context) -> Planned:
    """Plans all targets of an adapter; problems are collected, not raised. Depends on nothing but the arguments."""
    groups = group_tensors(tensors)
    planner = _Planner(context, groups.problems)
    for pair in groups.pairs:
        planner.sort(pair)
    planner.finish()
    for name, info in groups.plain:
        planner.add_whole(info, name, plan_plain)
    for name, info in groups.copies:
        planner.add_whole(info, name, plan_copy)
    planner.check_once()
    unmatched = [_explain_unmatched(planner.unmatched, len(tensors), context)] if planner.unmatched else []
    return Planned(
        plans=tuple(planner.plans),
        wholes=tuple(planner.wholes),
        problems=(*unmatched, *planner.problems),
        notes=tuple(groups.notes),
    )


class _Planner:
    """unmatched: names of tensors that nothing in the model takes; the others as in `Planned`."""

    def __init__(self, context: Context, problems: list[str]) -> None:
        self.context = context
        self.problems = problems
        self.plans: list[Plan] = []
        self.wholes: list[Whole] = []
        self.unmatched: list[str] = []
        self.wrappers: dict[str, dict[int, Pair]] = defaultdict(dict)
        self.wrapped: list[Wrapped] = []
        self.per_expert: dict[str, list[tuple[ExpertName, Pair]]] = defaultdict(list)
        self.stacked: dict[str, list[tuple[ExpertName, Pair]]] = defaultdict(list)
        self.joined: dict[str, dict[str, Pair]] = defaultdict(dict)

    def sort(self, pair: Pair) -> None:
        """Puts a pair into the group of its layout, or plans it at once if it stands alone."""
        resolver = self.context.resolver
        module = pair.module
        expert = None if resolver.catalogue.get(module) else parse_expert(module)
        if expert is not None and resolver.experts(expert.path):
            self.per_expert[expert.path].append((expert, pair))
            return
        path, depth = unwrapped(module)
        if path.rpartition(".")[2] == "experts" and resolver.experts(path):
            self.wrappers[path][depth] = pair
            return
        all_experts = parse_all_experts(module)
        if all_experts is not None and resolver.experts(all_experts.path):
            self._sort_stacked(all_experts, pair)
            return
        target = resolver.target(module)
        if target is not None:
            self._sort_matched(pair, target)
            return
        parts = split_targets(module, self.context)
        whole = joined_target(module, self.context)
        if parts:
            self._attempt(partial(plan_split, pair, parts, self.context))
        elif whole is not None:
            self.joined[whole.name][module.rpartition(".")[2]] = pair
        else:
            self.unmatched += [pair.a.name, pair.b.name]

    def _sort_stacked(self, name: ExpertName, pair: Pair) -> None:
        if len(pair.a.shape) == 3:
            self.stacked[name.path].append((name, pair))
        else:
            self.problems.append(
                f"{pair.module}: tensor {pair.a.name!r} has shape {list(pair.a.shape)}; factors for all experts under "
                "this name must have 3 dimensions, [experts, rank, in]"
            )

    def _sort_matched(self, pair: Pair, target: Target) -> None:
        if target.kind is TargetKind.EXPERTS:
            # A 3-D parameter under a module of its own (input_linear.weight): wrapped without nesting.
            self.wrapped.append(Wrapped(name=f"{pair.module}.weight", pair=pair, target=target))
        elif target.kind is TargetKind.WHOLE:
            self.problems.append(f"{pair.module}: {target.name} is a norm and cannot take low-rank factors")
        else:
            self._attempt(partial(plan_dense, pair, target, self.context))

    def finish(self) -> None:
        """Plans the groups."""
        context = self.context
        for path, members in self.per_expert.items():
            self._attempt(partial(plan_per_expert, path, members, context.resolver.experts(path), context))
        for path, members in self.stacked.items():
            self._attempt(partial(plan_stacked, members, context.resolver.experts(path), context))
        for name, pieces in self.joined.items():
            self._attempt(partial(plan_joined, context.resolver.catalogue.targets[name], pieces, context))
        for path, by_depth in self.wrappers.items():
            try:
                self.wrapped += assign_parameters(path, by_depth, context.resolver.experts(path), context)
            except Refused as refused:
                self.problems.append(str(refused))
        self._attempt(partial(plan_param_wrapper, self.wrapped, context))

    def add_whole(self, info: TensorInfo, name: str, plan: Callable[[TensorInfo, str, Context], Whole | None]) -> None:
        """Plans a tensor stored in full."""
        try:
            whole = plan(info, name, self.context)
        except Refused as refused:
            self.problems.append(str(refused))
            return
        if whole is None:
            self.unmatched.append(info.name)
        else:
            self.wholes.append(whole)

    def check_once(self) -> None:
        """Refuses targets that are given twice: by two layouts, two spellings, or factors and a whole weight."""
        by_target: dict[str, list[str]] = defaultdict(list)
        for plan in self.plans:
            by_target[plan.target.name].append(f"{plan.sources[0].name!r} (layout {plan.layout})")
        for whole in self.wholes:
            if whole.target is not None:
                by_target[whole.target.name].append(f"{whole.info.name!r} (whole)")
        for name, sources in by_target.items():
            if len(sources) > 1:
                self.problems.append(f"{name} is given twice: by {' and '.join(sources)}")

    def _attempt(self, plan: Callable[[], list[Plan]]) -> None:
        try:
            self.plans += plan()
        except Refused as refused:
            self.problems.append(str(refused))


def _explain_unmatched(unmatched: Sequence[str], total: int, context: Context) -> str:
    """Says which tensors nothing in the model takes, and what the model has instead."""
    catalogue = context.resolver.catalogue
    count = len(unmatched)
    used = "0" if count == total else f"only {total - count}"
    layers = [int(found[1]) for name in unmatched if (found := re.search(r"\blayers\.(\d{1,9})\.", name))]
    beyond = ""
    if catalogue.num_layers and layers and max(layers) >= catalogue.num_layers:
        beyond = f" It has {catalogue.num_layers} layers (0..{catalogue.num_layers - 1}), the file names {max(layers)}."
    return (
        f"{used} of {total} adapter tensors used; {count} match nothing in the base model ({catalogue.model_type}): "
        f"{shortened(unmatched)}.{beyond} The model has, for example, "
        f"{', '.join(context.resolver.samples())}"
    )
