"""Loads an adapter folder into canonical form, or refuses it. Knows neither single layouts nor the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from moelora.adapters.arena import Allocate, ordinary
from moelora.adapters.base import Adapter, Catalogue, Factors, TargetKind, TargetSummary
from moelora.adapters.files import TensorReader
from moelora.adapters.names import Resolver
from moelora.adapters.planner import Planned
from moelora.adapters.plans import AdapterFile, Plans
from moelora.adapters.values import Checking, Loading, Outlining
from moelora.environment import collector_paused
from moelora.errors import AdapterError

BaseWeight = Callable[[str], torch.Tensor | None]
"""Gives a parameter or buffer of the base model by its full name, or None."""

_SHOWN_PROBLEMS = 8


def load_adapter(
    path: str | Path,
    *,
    name: str,
    catalogue: Catalogue,
    dtype: torch.dtype,
    base_weight: BaseWeight | None = None,
    lora_b_layout: str | None = None,
    peft_version: str | None = None,
    allocate: Allocate = ordinary,
) -> Adapter:
    """Loads one adapter; see `AdapterLoader`, which loads several sooner."""
    loader = AdapterLoader(
        catalogue, dtype=dtype, base_weight=base_weight, lora_b_layout=lora_b_layout, peft_version=peft_version
    )
    return loader.load(path, name=name, allocate=allocate)


class AdapterLoader:
    """Loads adapters for one base model. Any number of threads may use it at once.

    Adapters that differ in nothing but their values are planned once. All methods raise AdapterError, its message
    beginning with `path`, if any tensor or any configured field would be dropped or does not fit the model.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        dtype: torch.dtype,
        base_weight: BaseWeight | None = None,
        lora_b_layout: str | None = None,
        peft_version: str | None = None,
    ) -> None:
        """How adapters are loaded.

        Args:
            catalogue: The modules of the base that adapters may target.
            dtype: Of the factors.
            base_weight: Gives base parameters by full name, to tell copies of base weights in the file from changed
                ones. Without it, copies of the right shape are ignored and noted, since they cannot be compared.
            lora_b_layout: Overrides the column order of wrapped experts: "rank_major" (PEFT) or "grouped_by_expert".
            peft_version: Overrides the version that decides the orientation of wrapped experts if all of them are
                square.
        """
        self._plans = Plans(catalogue, lora_b_layout=lora_b_layout, peft_version=peft_version)
        self._dtype = dtype
        self._base_weight = base_weight

    def load(self, path: str | Path, *, name: str, allocate: Allocate = ordinary) -> Adapter:
        """Loads an adapter onto the host in canonical form, the scale folded into B in fp32 before the cast.

        allocate: makes the memory that the values are read into. Raises AdapterError also if a value is not finite or
        overflows in the dtype.
        """
        return self._load(path, name, partial(Loading, dtype=self._dtype, allocate=allocate))

    def outline(self, path: str | Path, *, name: str) -> Adapter:
        """`load` with factors that have shapes but no values (device "meta"), so that files are hardly read.

        Whole weights are read, since only their values tell a replacement from a copy of the base's.
        """
        return self._load(path, name, partial(Outlining, dtype=self._dtype))

    def check(self, path: str | Path, *, name: str) -> Adapter:
        """Refuses what `load` refuses, and gives an adapter whose tensors have shapes but no values.

        All values are looked at, by one thread and without memory to hold them: several adapters may be checked at
        once.
        """
        return self._load(path, name, partial(Checking, dtype=self._dtype))

    @collector_paused()
    def _load(self, path: str | Path, name: str, start: Callable[[AdapterFile, TensorReader], Loading]) -> Adapter:
        """start: begins to load what was found to fit."""
        file = self._plans.read(path)
        if file.config.refusals:
            raise AdapterError(joined_reasons(file.path, file.config.refusals))
        planned = self._plans.plan(file)
        if planned.problems:
            raise AdapterError(joined_reasons(file.path, planned.problems))
        with TensorReader(file.path, file.stamps) as reader:
            loading = start(file, reader)
            found = loading.all_factors(planned.plans)
            factors = dict(zip((plan.target.name for plan in planned.plans), found, strict=True))
            replacements, notes = _load_wholes(planned, loading, self._base_weight)
            _follow_tied(replacements, factors, self._plans.resolver, file)
        return Adapter(
            name=name,
            path=file.path,
            factors=factors,
            replacements=replacements,
            summaries=summarise(planned, loading.dtype),
            notes=(*file.config.notes, *planned.notes, *notes),
        )


def summarise(planned: Planned, dtype: torch.dtype) -> tuple[TargetSummary, ...]:
    """One summary per target, factors first; `nbytes` as held in `dtype`."""
    low_rank = [
        TargetSummary(
            target=plan.target.name,
            layout=plan.layout,
            ranks=plan.ranks,
            scales=plan.scales,
            nbytes=plan.numel * dtype.itemsize,
        )
        for plan in planned.plans
    ]
    whole = [
        TargetSummary(
            target=one.target.name,
            layout="whole",
            ranks=(),
            scales=(),
            nbytes=one.info.numel * one.target.held_in(dtype).itemsize,
        )
        for one in planned.wholes
        if one.target is not None
    ]
    return (*low_rank, *whole)


def joined_reasons(path: Path, reasons: Sequence[str]) -> str:
    """One message that starts with the adapter's path and lists the first reasons."""
    if len(reasons) == 1:
        return f"{path}: {reasons[0]}"
    lines = [f"{path}: {len(reasons)} problems", *(f"  - {reason}" for reason in reasons[:_SHOWN_PROBLEMS])]
    if len(reasons) > _SHOWN_PROBLEMS:
        lines.append(f"  - … and {len(reasons) - _SHOWN_PROBLEMS} more")
    return "\n".join(lines)


def refuse_all(errors: Sequence[AdapterError], looked_at: int) -> None:
    """Raises the error, or of several adapters one that lists them; nothing without any. looked_at: adapters in all."""
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0]
    told = "".join("\n  - " + str(error).replace("\n", "\n  ") for error in errors[:_SHOWN_PROBLEMS])
    if len(errors) > _SHOWN_PROBLEMS:
        told += f"\n  - … and {len(errors) - _SHOWN_PROBLEMS} more"
    raise AdapterError(f"{len(errors)} of {looked_at} adapters are refused{told}")


def _load_wholes(
    planned: Planned, loading: Loading, base_weight: BaseWeight | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    replacements: dict[str, torch.Tensor] = {}
    notes: list[str] = []
    for whole in planned.wholes:
        base = base_weight(whole.parameter) if base_weight is not None else None
        if base is not None and loading.equals(whole.info, base):
            notes.append(f"tensor {whole.info.name!r} equals the base model's and is ignored")
        elif whole.target is not None and not whole.otherwise:
            replacements[whole.target.name] = loading.whole(whole.info, whole.target.held_in(loading.dtype))
        elif base is not None or whole.needs_base:
            raise AdapterError(f"{loading.path}: tensor {whole.info.name!r} {whole.otherwise}")
        else:
            notes.append(
                f"tensor {whole.info.name!r} is taken for a copy of the base model's and ignored, not compared"
            )
    return replacements, notes


def _follow_tied(
    replacements: dict[str, torch.Tensor], factors: Mapping[str, Factors], resolver: Resolver, file: AdapterFile
) -> None:
    """An embedding that was trained with its model, not under `modules_to_save`, takes a tied head with it.

    PEFT loads such a tensor into the base's own embedding, which a tied head shares. Under `modules_to_save` it trains
    a copy, and the head keeps the base's weight unless the file holds one for it.
    """
    catalogue = resolver.catalogue
    head = resolver.target("lm_head")
    embedding = next((t.name for t in catalogue if t.kind is TargetKind.EMBEDDING and t.name in replacements), None)
    if not catalogue.tied_lm_head or head is None or embedding is None or head.name in replacements:
        return
    if any(embedding.endswith(listed) for listed in file.config.modules_to_save):
        return
    if head.name in factors:
        raise AdapterError(f"{file.path}: holds {embedding} in full and factors for {head.name}, which is tied to it")
    replacements[head.name] = replacements[embedding]
