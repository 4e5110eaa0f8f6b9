"""The graph-runner contract: given a packed batch, run the decoder body and say in which mode that happened.

A runner decides by `moelora.capacity.admit` and nowhere else. Whatever it captures, it captures before the first batch;
`run` only replays or runs eagerly. What a replay reads lies in static buffers that the runner or the backend owns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moelora.capacity import Admission
from moelora.types import PackedBatch, RunMode

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyOutput:
    """hidden_TH: `[T, H]`, the live rows alone, normalised and ready for lm_head. bucket: None for eager runs."""

    hidden_TH: torch.Tensor
    mode: RunMode
    admission: Admission


class GraphRunner(ABC):
    """Runs the body of the model over packed batches of one phase."""

    @abstractmethod
    def run(self, batch: PackedBatch) -> BodyOutput:
        """Runs one batch. The output may be overwritten by the next `run`."""
