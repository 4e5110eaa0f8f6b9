"""Where the device's time goes: kernels by name, put into a few parts. Knows names, starts nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

PARTS = ("attention", "dense", "experts", "lora", "head", "small", "copies", "other")
"""What kernels are put into. Host time is what no kernel covers.

LoRA columns that ride in the experts' or another product count there; `lora` holds the kernels that run for LoRA alone.
"""

# The first pattern that is found in a kernel's name decides. Ours come first: a library's names change more often.
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("head", r"score_tile|join_tiles|cunn_SoftMaxForward|LogSoftMax"),
    ("lora", r"^_?shrink|^_?expand_kernel|^gather_kernel|lora"),
    (
        "experts",
        r"grouped_product|^combine|count_bins|sum_blocks|start_bins|scatter_items|list_tiles|grouped_mm|Grouped",
    ),
    ("experts", r"top_?k|TopK|bitonicSort|radixSort|RadixSort|softmax|SoftMax|route"),
    ("attention", r"^attend|end_tiles|find_tiles|flash|fmha|[Aa]ttention"),
    ("small", r"rms_norm|rotary|gated_activation|layer_norm|causal_conv"),
    ("dense", r"projections|gemm|nvjet|cutlass|xmma|cublas|splitKreduce"),
    ("copies", r"^Mem(cpy|set)"),
    ("small", r"elementwise|vectorized|reduce_kernel|index|gather|scatter|CatArray|copy"),
)
_COMPILED = tuple((part, re.compile(pattern)) for part, pattern in _PATTERNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    """One kernel or copy on the device. Seconds on the profiler's clock."""

    name: str
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.end_s - self.begin_s


def part_of(kernel: str) -> str:
    """The part that a kernel belongs to; `other` for a name that no pattern knows."""
    return next((part for part, pattern in _COMPILED if pattern.search(kernel)), "other")


def busy_seconds(runs: Iterable[KernelRun]) -> float:
    """The time in which at least one kernel ran."""
    busy, reached = 0.0, float("-inf")
    for run in sorted(runs, key=lambda r: r.begin_s):
        busy += max(0.0, run.end_s - max(run.begin_s, reached))
        reached = max(reached, run.end_s)
    return busy


def seconds_by_part(runs: Iterable[KernelRun]) -> dict[str, float]:
    """Kernel seconds of each part; kernels that ran at the same time count each."""
    total = dict.fromkeys(PARTS, 0.0)
    for run in runs:
        total[part_of(run.name)] += run.seconds
    return total


def top_kernels(runs: Iterable[KernelRun], count: int) -> list[tuple[str, int, float]]:
    """The kernels that took longest: name, runs, seconds."""
    found: dict[str, list[float]] = {}
    for run in runs:
        found.setdefault(run.name, []).append(run.seconds)
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))
    return [(name, len(seconds), sum(seconds)) for name, seconds in ordered[:count]]
