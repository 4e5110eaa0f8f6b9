"""The values of an adapter: read and scaled, only outlined, or only checked. Knows neither configs nor layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from moelora.adapters.arena import Allocate, ordinary
from moelora.adapters.base import Factors
from moelora.adapters.files import TensorReader
from moelora.adapters.layouts.base import Plan
from moelora.adapters.peaks import read_peaks
from moelora.adapters.plans import AdapterFile
from moelora.environment import cpu_count, one_core_threads
from moelora.errors import AdapterError
from moelora.safetensors_file import TensorInfo

MOST_WORKERS = 8
"""Threads that read the values of one adapter: about as many as it takes to keep a processor's memory busy."""

_PARALLEL_NUMEL = 1 << 24
_SIGN_BIT = 1 << 15
_CACHED_NUMEL = 1 << 19
"""16-bit numbers that stay in a core's cache, and are read from memory once though they are looked at twice."""


class Loading:
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

    def whole(self, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
        """Reads a tensor stored in full, into `dtype`."""
        # A copy, since what the reader returns may be mapped from a file that is overwritten later.
        tensor = self.allocate(info.shape, dtype).copy_(self.reader.read(info))
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
            if (reason := not_finite(info.name, tensor)) is not None:
                return reason
            peak = float(tensor.abs().max())
            if peak > largest:
                largest, name = peak, info.name
        return (
            f"tensor {name!r} holds values up to {largest:g} (scale {scale:g}), too large for "
            f"{str(self.dtype).removeprefix('torch.')} (largest {torch.finfo(self.dtype).max:g})"
        )


class Outlining(Loading):
    """Gives factors without values."""

    def all_factors(self, plans: Sequence[Plan]) -> list[Factors]:
        return [self.factors(plan) for plan in plans]

    def factors(self, plan: Plan) -> Factors:
        return Factors(a=_shape_alone(plan.a_shape, self.dtype), b=_shape_alone(plan.b_shape, self.dtype))


class Checking(Outlining):
    """Gives tensors without values, once it is certain that all values survive; reads in full where it is not."""

    def __init__(self, file: AdapterFile, reader: TensorReader, *, dtype: torch.dtype) -> None:
        super().__init__(file, reader, dtype=dtype)
        tensors = file.kind.tensors
        peaks = read_peaks(file.path, file.stamps, file.kind.runs, len(tensors)).tolist()
        self._peaks = dict(zip(tensors, peaks, strict=True))

    def all_factors(self, plans: Sequence[Plan]) -> list[Factors]:
        # Nearly always the outermost of all peaks and scales are certain: then no target is looked at by itself.
        peaks = self._peaks.values()
        if not plans or not self._surely_survive(peaks, {scale for plan in plans for scale in plan.scales}):
            for plan in plans:
                if not self._surely_survive((self._peaks[info.name] for info in plan.sources), plan.scales):
                    Loading.factors(self, plan)
        return super().all_factors(plans)

    def whole(self, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
        if not self._surely_survive((self._peaks[info.name],), ()):
            super().whole(info, dtype)
        return _shape_alone(info.shape, dtype)

    def _surely_survive(self, peaks: Iterable[float], scales: Iterable[float]) -> bool:
        """Whether no value can overflow, nor all of a tensor vanish, whichever of them are scaled.

        A factor of two, here and there, is more than what rounding can do.
        """
        limits, peaks = torch.finfo(self.dtype), tuple(peaks)
        factors = [1.0, *map(abs, scales)]
        if not max(peaks) * max(factors) <= limits.max / 2:
            return False
        least = limits.tiny * limits.eps  # the smallest number above zero
        return not _is_narrow(self.dtype) or min(peaks) * min(factors) >= 2 * least


def _shape_alone(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _is_narrow(dtype: torch.dtype) -> bool:
    """Whether what is above zero in fp32 may be zero in `dtype` for want of range."""
    return torch.finfo(dtype).tiny > torch.finfo(torch.float32).tiny


def _map(make: Callable[[Plan], Factors], plans: Sequence[Plan]) -> list[Factors]:
    """`make` of every plan, by several threads where that is worth it: most of the time is copies."""
    workers = min(MOST_WORKERS, cpu_count(), len(plans))
    if workers < 2 or sum(plan.numel for plan in plans) < _PARALLEL_NUMEL:
        return [make(plan) for plan in plans]
    with one_core_threads(workers) as pool:
        return list(pool.map(make, plans))


def _is_finite(tensor: torch.Tensor) -> bool:
    return all(map(math.isfinite, extremes(tensor)))


def not_finite(name: str, tensor: torch.Tensor) -> str | None:
    """The sentence for a tensor of an adapter that holds NaN or infinity; None if all of it is finite."""
    bad = int((~torch.isfinite(tensor)).sum())
    return f"tensor {name!r} is not finite (NaN or infinity) in {bad:,} of {tensor.numel():,} values" if bad else None


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
