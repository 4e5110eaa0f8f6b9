"""What each step of setting up an engine takes on the device, as torch counts it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, TypeVar
from weakref import WeakSet

import torch

from moelora.batching.packing import head_rows, pack
from moelora.batching.sequences import Sequence, expand
from moelora.capacity import PrefillCapacity
from moelora.graphs.eager import EagerRunner
from moelora.scoring.head import FUSED_ROWS, ScoringHead
from moelora.types import Request

_TYPICAL_TOKENS = 256

T = TypeVar("T")


class DeviceMeter:
    """Bytes that each step takes on a CUDA device, by name; elsewhere nothing is known and `parts` stays empty."""

    _all: ClassVar[WeakSet[DeviceMeter]] = WeakSet()
    """Those of all engines of the process: the device keeps one peak for everybody."""

    def __init__(self, device: torch.device) -> None:
        self.parts: dict[str, int] = {}
        self.peak = 0
        self.device = device
        self._device = device if device.type == "cuda" else None
        self._begin_peak()  # what engines before this one took is not its own
        self._all.add(self)

    def kept(self, name: str, step: Callable[[], T]) -> T:
        """Runs `step`, whose result this returns; notes what it has allocated and kept."""
        before = self._allocated()
        result = step()
        self._note(name, self._allocated() - before)
        return result

    def held(self, name: str, step: Callable[[], T]) -> T:
        """Runs `step`, whose result this returns; notes the most that it held at once, of several steps the largest."""
        self._begin_peak()
        before = self._allocated()
        result = step()
        if self._device is not None:
            self._note(name, max(torch.cuda.max_memory_allocated(self._device) - before, self.parts.get(name, 0)))
        return result

    def pooled(self, name: str, step: Callable[[], T]) -> T:
        """Runs `step`, whose result this returns; notes by how much the memory grew that graphs keep to themselves."""
        before = self._graph_pools()
        result = step()
        self._note(name, self._graph_pools() - before)
        return result

    def highest(self) -> int | None:
        """The most that was allocated since construction; None where that is not known."""
        return None if self._device is None else max(self.peak, torch.cuda.max_memory_allocated(self._device))

    def _begin_peak(self) -> None:
        """Lets the device's peak begin at what is allocated now; every meter takes over the one until now."""
        if self._device is None:
            return
        highest = torch.cuda.max_memory_allocated(self._device)
        for meter in self._all:
            if meter.device == self.device:
                meter.peak = max(meter.peak, highest)
        torch.cuda.reset_peak_memory_stats(self._device)

    def _allocated(self) -> int:
        return 0 if self._device is None else torch.cuda.memory_allocated(self._device)

    def _graph_pools(self) -> int:
        if self._device is None:
            return 0
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        segments = [one for one in torch.cuda.memory_snapshot() if one["device"] == index]
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))

    def _note(self, name: str, nbytes: int) -> None:
        if self._device is not None:
            self.parts[name] = nbytes


@torch.inference_mode()
def measure_largest_batch(
    meter: DeviceMeter,
    runner: EagerRunner,
    head: ScoringHead,
    capacity: PrefillCapacity,
    max_positions: int | None,
    say: Callable[[str], None],
) -> None:
    """Runs the largest batch once under the base, and what the fused head leaves to the library.

    What they take is noted as "activations" and "scoring_chunk". Kernels are compiled and tuned by then.
    """
    for rows in (capacity.max_tokens, min(FUSED_ROWS - 1, capacity.max_tokens)):
        sequences = _sequences(rows, capacity.max_requests, max_positions)
        batch = pack(sequences, {}, meter.device)
        scored = head_rows(sequences, batch)
        try:
            hidden_TH = meter.held("activations", partial(runner.run, batch)).hidden_TH
            meter.held("scoring_chunk", partial(head.score, hidden_TH, scored, top_k=0))
        except torch.OutOfMemoryError:
            say(f"a batch of {batch.num_tokens:,} tokens does not fit on {meter.device}; such batches will be halved")
            for name in ("activations", "scoring_chunk"):
                meter.parts.setdefault(name, 0)
        torch.cuda.empty_cache()


def _sequences(tokens: int, most: int, max_positions: int | None) -> list[Sequence]:
    """Sequences of `tokens` tokens in all, or as many as `most` sequences may have; all tokens are scored."""
    longest = min(max_positions or tokens, tokens if most == 1 else max(_TYPICAL_TOKENS, -(-tokens // most)))
    lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
    return [s for n in lengths[:most] for s in expand(0, Request(token_ids=[0] * n))]
