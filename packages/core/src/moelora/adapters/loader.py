"""Loads an adapter folder into canonical form, or refuses it. Knows neither single layouts nor the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from moelora.adapters.arena import Allocate, ordinary
from moelora.adapters.base import Adapter, Catalogue, Factors, TargetKind, TargetSummary
from moelora.adapters.config import LORA_B_LAYOUTS, AdapterConfig, read_config
from moelora.adapters.files import TensorInfo, TensorReader, check_folder, read_headers
from moelora.adapters.layouts.base import Context, Plan
from moelora.adapters.names import Resolver
from moelora.adapters.peaks import read_peaks
from moelora.adapters.planner import Planned, explain_unmatched, plan_adapter
from moelora.environment import collector_paused, cpu_count, one_core_threads
from moelora.errors import AdapterError, choose_from

BaseWeight = Callable[[str], torch.Tensor | None]
"""Gives a parameter or buffer of the base model by its full name, or None."""

MOST_WORKERS = 8
"""Threads that read the values of one adapter: about as many as it takes to keep a processor's memory busy."""

_SHOWN_PROBLEMS = 8
_PARALLEL_NUMEL = 1 << 24
_SIGN_BIT = 1 << 15
_CACHED_NUMEL = 1 << 18
"""16-bit numbers that stay in a core's cache, and are read from memory once though they are looked at twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """An adapter folder as read without a model: its configuration and the headers of its tensors, by name."""

    path: Path
    config: AdapterConfig
    tensors: Mapping[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(info.nbytes for info in self.tensors.values())


def read_adapter(path: str | Path) -> AdapterFile:
    """Reads config and headers of an adapter folder.

    Raises AdapterError if a file is missing or damaged. What the configuration asks for in vain is listed in
    `config.refusals` and not raised.
    """
    folder = Path(path)
    check_folder(folder)
    return AdapterFile(path=folder, config=read_config(folder), tensors=read_headers(folder))


def make_context(
    file: AdapterFile, catalogue: Catalogue, *, lora_b_layout: str | None = None, peft_version: str | None = None
) -> Context:
    """The context of planning; see `load_adapter` for the two overrides."""
    if lora_b_layout is not None and lora_b_layout not in LORA_B_LAYOUTS:
        raise AdapterError(f"{file.path}: {choose_from('lora_b_layout', lora_b_layout, LORA_B_LAYOUTS)}")
    return Context(
        config=file.config,
        resolver=Resolver(catalogue),
        b_layout=lora_b_layout or file.config.lora_b_layout or "rank_major",
        peft_version=peft_version or file.config.peft_version,
    )


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
    """Loads an adapter onto the host in canonical form, in `dtype`, the scale folded into B in fp32 before the cast.

    base_weight: gives base parameters by full name, to tell copies of base weights in the file from changed ones.
    Without it, copies of the right shape are ignored and noted, since they cannot be compared.
    lora_b_layout: overrides the column order of wrapped experts: "rank_major" (PEFT) or "grouped_by_expert".
    peft_version: overrides the version that decides the orientation of wrapped experts if all of them are square.
    allocate: makes the memory that the values are read into.

    Raises AdapterError, its message beginning with `path`, if any tensor or any configured field would be dropped, does
    not fit the model, is not finite, or overflows in `dtype`.
    """
    start = partial(_Loading, dtype=dtype, allocate=allocate)
    return _load(path, name, catalogue, base_weight, lora_b_layout, peft_version, start)


def outline_adapter(
    path: str | Path,
    *,
    name: str,
    catalogue: Catalogue,
    dtype: torch.dtype,
    base_weight: BaseWeight | None = None,
    lora_b_layout: str | None = None,
    peft_version: str | None = None,
) -> Adapter:
    """`load_adapter` with factors that have shapes but no values (device "meta"), so that files are hardly read.

    Whole weights are read, since only their values tell a replacement from a copy of the base's.
    """
    start = partial(_Outlining, dtype=dtype)
    return _load(path, name, catalogue, base_weight, lora_b_layout, peft_version, start)


def check_adapter(
    path: str | Path,
    *,
    name: str,
    catalogue: Catalogue,
    dtype: torch.dtype,
    base_weight: BaseWeight | None = None,
    lora_b_layout: str | None = None,
    peft_version: str | None = None,
) -> Adapter:
    """Refuses what `load_adapter` refuses, and gives an adapter whose tensors have shapes but no values.

    All values are looked at, by one thread and without memory to hold them: several adapters may be checked at once.
    """
    start = partial(_Checking, dtype=dtype)
    return _load(path, name, catalogue, base_weight, lora_b_layout, peft_version, start)


@collector_paused()
def _load(
    path: str | Path,
    name: str,
    catalogue: Catalogue,
    base_weight: BaseWeight | None,
    lora_b_layout: str | None,
    peft_version: str | None,
    start: Callable[[AdapterFile, TensorReader], _Loading],
) -> Adapter:
    """start: begins to load what was found to fit."""
    file = read_adapter(path)
    if file.config.refusals:
        raise AdapterError(joined_reasons(file.path, file.config.refusals))
    context = make_context(file, catalogue, lora_b_layout=lora_b_layout, peft_version=peft_version)
    planned = plan_adapter(file.tensors, context)
    problems = list(planned.problems)
    if planned.unmatched:
        problems.insert(0, explain_unmatched(planned, len(file.tensors), context))
    if problems:
        raise AdapterError(joined_reasons(file.path, problems))
    with TensorReader() as reader:
        loading = start(file, reader)
        found = loading.all_factors(planned.plans)
        factors = dict(zip((plan.target.name for plan in planned.plans), found, strict=True))
        replacements, notes = _load_wholes(planned, loading, base_weight)
        _follow_tied(replacements, factors, context, file.path)
    return Adapter(
        name=name,
        path=file.path,
        factors=factors,
        replacements=replacements,
        summaries=summarise(planned, loading.dtype),
        notes=(*file.config.notes, *planned.notes, *notes),
    )


def _map(make: Callable[[Plan], Factors], plans: Sequence[Plan]) -> list[Factors]:
    """`make` of every plan, by several threads where that is worth it: most of the time is copies."""
    workers = min(MOST_WORKERS, cpu_count(), len(plans))
    if workers < 2 or sum(plan.numel for plan in plans) < _PARALLEL_NUMEL:
        return [make(plan) for plan in plans]
    with one_core_threads(workers) as pool:
        return list(pool.map(make, plans))


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
            target=one.target.name, layout="whole", ranks=(), scales=(), nbytes=one.info.numel * dtype.itemsize
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


class _Loading:
    """Reads values of one adapter and brings them into the wanted dtype, refusing what does not survive that."""

    def __init__(
        self, file: AdapterFile, reader: TensorReader, *, dtype: torch.dtype, allocate: Allocate = ordinary
    ) -> None:
        self.path = file.path
        self.reader = reader
        self.dtype = dtype
        self.allocate = allocate

    def all_factors(self, plans: Sequence[Plan]) -> list[Factors]:
        """The factors of every plan."""
        return _map(self.factors, plans)

    def factors(self, plan: Plan) -> Factors:
        """Reads what `plan` needs. May be called from several threads at once."""
        a, b = self.allocate(plan.a_shape, self.dtype), self.allocate(plan.b_shape, self.dtype)
        plan.fill(self.reader, a, b)
        (low_a, high_a), (low_b, high_b) = extremes(a), extremes(b)
        if not all(map(math.isfinite, (low_a, high_a, low_b, high_b))):
            raise AdapterError(f"{self.path}: {self._culprit(plan.sources, max(map(abs, plan.scales)))}")
        if _is_narrow(self.dtype) and (low_a == high_a == 0 or low_b == high_b == 0):
            self._check_vanished(plan)
        return Factors(a=a, b=b)

    def _check_vanished(self, plan: Plan) -> None:
        """Refuses factors that are all zero only because their dtype has no smaller numbers."""
        wide = torch.empty(plan.a_shape), torch.empty(plan.b_shape)
        plan.fill(self.reader, *wide)
        for factor in wide:
            largest = float(factor.abs().max())
            if largest and not factor.to(self.dtype).any():
                raise AdapterError(
                    f"{self.path}: {plan.target.name}: the factors of {plan.sources[0].name!r} hold nothing above "
                    f"{largest:g} and become zero in {str(self.dtype).removeprefix('torch.')}; give a wider --dtype"
                )

    def whole(self, info: TensorInfo) -> torch.Tensor:
        # A copy, since what the reader returns may be mapped from a file that is overwritten later.
        tensor = self.allocate(info.shape, self.dtype).copy_(self.reader.read(info))
        if not _is_finite(tensor):
            raise AdapterError(f"{self.path}: {self._culprit((info,), 1.0)}")
        return tensor

    def equals(self, info: TensorInfo, base: torch.Tensor) -> bool:
        """Whether a stored copy is the base's tensor, in the coarser of both dtypes."""
        stored = self.reader.read(info)
        if tuple(stored.shape) != tuple(base.shape):
            return False
        base = base.detach().to("cpu")
        coarse = base.dtype if base.dtype.itemsize < stored.dtype.itemsize else stored.dtype
        return torch.equal(stored.to(coarse), base.to(coarse))

    def _culprit(self, sources: Sequence[TensorInfo], scale: float) -> str:
        largest = 0.0
        name = sources[0].name
        for info in sources:
            tensor = self.reader.read(info)
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                return f"tensor {info.name!r} holds {bad} values that are not finite (NaN or infinity)"
            peak = float(tensor.abs().max())
            if peak > largest:
                largest, name = peak, info.name
        return (
            f"tensor {name!r} holds values up to {largest:g} (scale {scale:g}), too large for "
            f"{str(self.dtype).removeprefix('torch.')} (largest {torch.finfo(self.dtype).max:g})"
        )


class _Outlining(_Loading):
    """Gives factors without values."""

    def all_factors(self, plans: Sequence[Plan]) -> list[Factors]:
        return [self.factors(plan) for plan in plans]

    def factors(self, plan: Plan) -> Factors:
        return Factors(a=self._shape(plan.a_shape), b=self._shape(plan.b_shape))

    def _shape(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=self.dtype, device="meta")


class _Checking(_Outlining):
    """Gives tensors without values, once it is certain that all values survive; reads in full where it is not."""

    def __init__(self, file: AdapterFile, reader: TensorReader, *, dtype: torch.dtype) -> None:
        super().__init__(file, reader, dtype=dtype)
        self._peaks = read_peaks(file.tensors.values())

    def factors(self, plan: Plan) -> Factors:
        if not self._surely_survive(plan.sources, plan.scales):
            _Loading.factors(self, plan)
        return super().factors(plan)

    def whole(self, info: TensorInfo) -> torch.Tensor:
        if not self._surely_survive((info,), ()):
            super().whole(info)
        return self._shape(info.shape)

    def _surely_survive(self, sources: Sequence[TensorInfo], scales: Sequence[float]) -> bool:
        """Whether no value can overflow, nor all of a tensor vanish, whichever of them are scaled.

        A factor of two, here and there, is more than what rounding can do.
        """
        limits = torch.finfo(self.dtype)
        peaks = [self._peaks[info.name] for info in sources]
        factors = [1.0, *map(abs, scales)]
        if not max(peaks) * max(factors) <= limits.max / 2:
            return False
        least = limits.tiny * limits.eps  # the smallest number above zero
        return not _is_narrow(self.dtype) or min(peaks) * min(factors) >= 2 * least


def _is_narrow(dtype: torch.dtype) -> bool:
    """Whether what is above zero in fp32 may be zero in `dtype` for want of range."""
    return torch.finfo(dtype).tiny > torch.finfo(torch.float32).tiny


def _load_wholes(
    planned: Planned, loading: _Loading, base_weight: BaseWeight | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    replacements: dict[str, torch.Tensor] = {}
    notes: list[str] = []
    for whole in planned.wholes:
        base = base_weight(whole.parameter) if base_weight is not None else None
        if base is not None and loading.equals(whole.info, base):
            notes.append(f"tensor {whole.info.name!r} equals the base model's and is ignored")
        elif whole.target is not None and not whole.otherwise:
            replacements[whole.target.name] = loading.whole(whole.info)
        elif base is not None or whole.needs_base:
            raise AdapterError(f"{loading.path}: tensor {whole.info.name!r} {whole.otherwise}")
        else:
            notes.append(
                f"tensor {whole.info.name!r} is taken for a copy of the base model's and ignored, not compared"
            )
    return replacements, notes


def _follow_tied(
    replacements: dict[str, torch.Tensor], factors: Mapping[str, Factors], context: Context, path: Path
) -> None:
    """An embedding that was trained with its model, not under `modules_to_save`, takes a tied head with it.

    PEFT loads such a tensor into the base's own embedding, which a tied head shares. Under `modules_to_save` it trains
    a copy, and the head keeps the base's weight unless the file holds one for it.
    """
    catalogue = context.resolver.catalogue
    head = context.resolver.target("lm_head")
    embedding = next((t.name for t in catalogue if t.kind is TargetKind.EMBEDDING and t.name in replacements), None)
    if not catalogue.tied_lm_head or head is None or embedding is None or head.name in replacements:
        return
    if any(embedding.endswith(listed) for listed in context.config.modules_to_save):
        return
    if head.name in factors:
        raise AdapterError(f"{path}: holds {embedding} in full and factors for {head.name}, which is tied to it")
    replacements[head.name] = replacements[embedding]


def _is_finite(tensor: torch.Tensor) -> bool:
    return all(map(math.isfinite, extremes(tensor)))


def extremes(tensor: torch.Tensor) -> tuple[float, float]:
    """The least and the largest value, 0 among them; one of them is not finite if any value is not."""
    if tensor.dtype.itemsize != 2:
        low, high = torch.aminmax(tensor)  # NaN if there is any
        return float(low), float(high)
    # Numbers of one sign are ordered as their bits are, infinity and NaN last; integers are compared far faster.
    bits = tensor.view(torch.int16).flatten().numpy()
    positive = negative = 0
    for i in range(0, len(bits), _CACHED_NUMEL):
        some = bits[i : i + _CACHED_NUMEL]
        positive = max(positive, int(some.max()))
        negative = max(negative, int(some.view(np.uint16).max()) - _SIGN_BIT)
    low, high = torch.tensor([negative, positive], dtype=torch.int16).view(tensor.dtype).tolist()
    return -low, high
