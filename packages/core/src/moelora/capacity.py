"""How much a run may hold, and whether a batch fits: pure arithmetic, no tensors, no device.

Everything that is allocated once and replayed later is sized here, from capacities and never from constants.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from moelora.errors import ConfigError
from moelora.types import GraphMode

TILE_ROWS = 16
"""Rows of one tile of the dense LoRA kernels: the smallest M of a tensor-core product."""


class EagerReason(StrEnum):
    """Why a batch ran eagerly. The value is the label in metrics; `text` is the sentence in reports."""

    GRAPH_OFF = "graph_off"
    NO_GRAPH_DEVICE = "no_graph_device"
    TOKENS_OVER_LARGEST_BUCKET = "tokens_over_largest_bucket"
    REQUESTS_OVER_SLOTS = "requests_over_slots"
    BUCKET_TOO_SPARSE = "bucket_too_sparse"
    EAGER_FASTER = "eager_faster"
    ARCHITECTURE_NOT_CAPTURABLE = "architecture_not_capturable"
    BACKEND_NOT_CAPTURABLE = "backend_not_capturable"
    ADAPTER_NOT_CAPTURABLE = "adapter_not_capturable"
    PACKING_NOT_SUPPORTED = "packing_not_supported"

    @property
    def text(self) -> str:
        """One sentence for people."""
        return _REASON_TEXT[self]


_REASON_TEXT = {
    EagerReason.GRAPH_OFF: "graphs are switched off (--graph off)",
    EagerReason.NO_GRAPH_DEVICE: "the device has no CUDA graphs",
    EagerReason.TOKENS_OVER_LARGEST_BUCKET: "the batch holds more tokens than the largest captured bucket",
    EagerReason.REQUESTS_OVER_SLOTS: "the batch holds more requests than the graph has request slots",
    EagerReason.BUCKET_TOO_SPARSE: "padding up to the bucket would waste more than half of it",
    EagerReason.EAGER_FASTER: "the eager run of this bucket was measured to be faster than its graph",
    EagerReason.ARCHITECTURE_NOT_CAPTURABLE: "the architecture does something that a CUDA graph cannot hold",
    EagerReason.BACKEND_NOT_CAPTURABLE: "the LoRA backend does not support capture",
    EagerReason.ADAPTER_NOT_CAPTURABLE: "an adapter replaces whole modules, which is applied row by row",
    EagerReason.PACKING_NOT_SUPPORTED: "the architecture mixes tokens across requests, so each runs alone",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCapacity:
    """What one phase may hold at once; sizes every static buffer.

    Attributes:
        max_tokens: Tokens T of the largest batch, padding included; at least 1.
        max_requests: Requests of the largest batch; at least 1.
        full_max_requests: Request slots S of a full graph, whose boundaries are padded up to it; at least 1.
        slots: Adapter slots L on the device, without the base; 0 without adapters.
        max_rank: The largest rank R of any adapter of the run; 0 without adapters.

    Raises:
        ConfigError: If a number is below its least value.
    """

    max_tokens: int
    max_requests: int
    full_max_requests: int
    slots: int
    max_rank: int

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_requests", "full_max_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("slots", "max_rank"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def bank_slots(self) -> int:
        """Slots that the bank has: one even without adapters, so that nothing has to know of an empty bank."""
        return max(self.slots, 1)

    def request_slots(self, mode: GraphMode) -> int:
        """Request slots S of the metadata: `full_max_requests` in full mode, else `min(max_tokens, max_requests)`."""
        if mode is GraphMode.FULL:
            return min(self.full_max_requests, self.max_tokens)
        return min(self.max_tokens, self.max_requests)

    def dense_tiles(self, tokens: int, mode: GraphMode) -> int:
        """The most 16-row tiles that `tokens` rows in at most S segments can be cut into.

        Each segment but one can end in a partial tile, so ceil(N/16) + S - 1; no tile is empty, so never more than N.
        """
        if tokens == 0:
            return 0
        return min(tokens, -(-tokens // TILE_ROWS) + self.request_slots(mode) - 1)

    def csgmv_segments(self, tokens: int) -> int:
        """The most chunks that `tokens` rows ordered by slot can be cut into: `max(ceil(T/chunk), 16) + L + 1`."""
        return max(-(-tokens // csgmv_chunk_rows(tokens)), 16) + self.slots + 1


def csgmv_chunk_rows(tokens: int) -> int:
    """Rows of one CSGMV chunk (16, 32, 64 or 128), so that a batch gives about 16 chunks or more."""
    for rows in (128, 64, 32):
        if tokens >= rows * 16:
            return rows
    return 16


def default_buckets(max_tokens: int) -> tuple[int, ...]:
    """Token counts to capture: multiples of 16 to 256, then 64 to 1,024, 256 to 4,096, 512 to 8,192, 1,024 beyond.

    The limit itself is always a bucket, so that the largest batches, which matter most, replay.
    """
    sizes: list[int] = []
    size = 0
    while size < max_tokens:
        step = 16 if size < 256 else 64 if size < 1024 else 256 if size < 4096 else 512 if size < 8192 else 1024
        size += step
        sizes.append(min(size, max_tokens))
    return tuple(sizes)


def bucket_for(tokens: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest of the ascending `buckets` that holds `tokens`, or None."""
    index = bisect_left(buckets, tokens)
    return buckets[index] if index < len(buckets) else None


def graphs_blocked(
    *,
    mode: GraphMode,
    has_graph_device: bool,
    packs: bool,
    has_replacements: bool,
    graph_modes: Collection[GraphMode],
) -> EagerReason | None:
    """Why a whole run is eager, or None if graphs can be captured.

    packs: the architecture takes several requests per forward. has_replacements: an adapter replaces whole modules.
    graph_modes: what the backend supports.
    """
    if mode is GraphMode.OFF:
        return EagerReason.GRAPH_OFF
    if not has_graph_device:
        return EagerReason.NO_GRAPH_DEVICE
    if not packs:
        return EagerReason.PACKING_NOT_SUPPORTED
    if has_replacements:
        return EagerReason.ADAPTER_NOT_CAPTURABLE
    if not graph_modes:
        return EagerReason.BACKEND_NOT_CAPTURABLE
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The decision for one batch: the bucket whose graph it replays, or the reason why it runs eagerly."""

    bucket: int | None
    reason: EagerReason | None

    @property
    def replays(self) -> bool:
        """True if a graph is replayed."""
        return self.reason is None


def admit(
    *,
    tokens: int,
    requests: int,
    mode: GraphMode,
    buckets: tuple[int, ...],
    capacity: PrefillCapacity,
    blocked: EagerReason | None = None,
) -> Admission:
    """Decides whether a batch replays a graph: the one place where this is decided.

    `mode` is FULL, BREAKABLE or OFF; `blocked` is a reason that holds for the whole run (device, architecture,
    backend). `buckets` ascend. The order of the checks is the order of the reasons that are reported.
    """
    assert mode is not GraphMode.AUTO, "auto is resolved to a mode per bucket before admission"

    def eager(reason: EagerReason) -> Admission:
        return Admission(bucket=None, reason=reason)

    if mode is GraphMode.OFF:
        return eager(EagerReason.GRAPH_OFF)
    if blocked is not None:
        return eager(blocked)
    bucket = bucket_for(tokens, buckets)
    if bucket is None:
        return eager(EagerReason.TOKENS_OVER_LARGEST_BUCKET)
    if requests > capacity.request_slots(mode):
        return eager(EagerReason.REQUESTS_OVER_SLOTS)
    if 2 * tokens < bucket and bucket != buckets[0]:
        return eager(EagerReason.BUCKET_TOO_SPARSE)
    return Admission(bucket=bucket, reason=None)
