"""What a benchmark found, as data. Nothing here measures or prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from moelora.bench.ceilings import Ceilings
from moelora.types import RunMode

OWN = "moelora"
"""The engine that is not a peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Where one run's time went. busy_s: at least one kernel ran. parts: kernel seconds. kernels: name, runs, seconds.

    wall_s: of the run without the profiler, so that `host_s` and `idle_share` are free of its cost.
    """

    wall_s: float
    busy_s: float
    parts: dict[str, float]
    kernels: list[tuple[str, int, float]]

    @property
    def host_s(self) -> float:
        """Time in which the device had nothing to do."""
        return max(self.wall_s - self.busy_s, 0.0)

    @property
    def idle_share(self) -> float:
        """The same as a share of the run."""
        return self.host_s / self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One workload under one setting.

    engine: "moelora" or a peer. adapters: 0 where every prompt is under the base. loaded: adapters that the engine
    held while it ran, on the same prompts. seconds: of each repeat, around the whole call, results on the host.
    floor_s: by part. passes: forwards by mode and bucket of one call. padding_share: rows without a token, over all
    rows of buckets, or of a peer's padded batches. memory_bytes: peak on the device beyond weights
    and slots, graphs included; None on the CPU.
    """

    engine: str
    backend: str
    graph: str
    workload: str
    task: str
    adapters: int
    rank: int
    loaded: int
    prompts: int
    tokens: int
    seconds: tuple[float, ...]
    floor_s: dict[str, float]
    passes: tuple[tuple[RunMode, int | None, int], ...] = ()
    padding_share: float = 0.0
    eager_reasons: dict[str, int] = field(default_factory=dict)
    memory_bytes: int | None = None
    profile: Profile | None = None

    @property
    def median_s(self) -> float:
        """The middle repeat, or the mean of the two in the middle."""
        return median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens over the median."""
        return self.tokens / self.median_s

    @property
    def floor_share(self) -> float:
        """The floor as a share of the median: 1 is as fast as the device allows."""
        return sum(self.floor_s.values()) / self.median_s

    def base(self, others: Iterable[Measurement]) -> Measurement | None:
        """The same prompts in the same engine, all under the base; None for a base run itself."""
        return self._like(others, adapters=0) if self.adapters else None

    def eager(self, others: Iterable[Measurement]) -> Measurement | None:
        """The same without graphs; None for an eager run itself."""
        return self._like(others, graph="off") if self.graph != "off" else None

    def peer(self, others: Iterable[Measurement]) -> Measurement | None:
        """The same prompts on another engine, under the same number of adapters; None for the peer itself."""
        keys = ("workload", "task", "adapters", "rank")
        if self.engine != OWN:
            return None
        same = (o for o in others if o.engine != OWN and all(getattr(o, k) == getattr(self, k) for k in keys))
        return next(same, None)

    def _like(self, others: Iterable[Measurement], **change: Any) -> Measurement | None:
        keys = ("engine", "backend", "graph", "workload", "task", "adapters", "rank", "loaded")
        wanted = {key: change.get(key, getattr(self, key)) for key in keys}
        return next((one for one in others if all(getattr(one, k) == v for k, v in wanted.items())), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One engine that was made. seconds: from nothing to ready, capture included. Bytes are on the device."""

    engine: str
    backend: str
    graph: str
    adapters: int
    rank: int
    seconds: float
    weight_bytes: int
    slot_bytes: int
    report: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class BenchReport:
    """All of it: the machine, the ceilings, the engines, the measurements."""

    model: str
    architecture: str
    layers: int
    dtype: str
    device: str
    device_name: str
    max_tokens: int
    versions: dict[str, str]
    ceilings: Ceilings
    setups: list[Setup] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """JSON types. What follows from several measurements (overhead, gain) is worked out and added to each."""
        facts = {key: getattr(self, key) for key in ("model", "architecture", "layers", "dtype", "device")}
        facts |= {key: getattr(self, key) for key in ("device_name", "max_tokens", "versions", "notes")}
        facts["ceilings"] = asdict(self.ceilings)
        facts["setups"] = [asdict(one) for one in self.setups]
        facts["measurements"] = [self._facts_of(one) for one in self.measurements]
        return facts

    def lora_overhead(self, one: Measurement) -> float | None:
        """Time over that of the same prompts under the base; 1 is free. None for base runs."""
        base = one.base(self.measurements)
        return one.median_s / base.median_s if base is not None else None

    def graph_gain(self, one: Measurement) -> float | None:
        """Time of the eager run over this one's; above 1, graphs win. None without an eager run of the same."""
        eager = one.eager(self.measurements)
        return eager.median_s / one.median_s if eager is not None else None

    def over_peer(self, one: Measurement) -> float | None:
        """The peer's time over this one's; above 1 is faster than the peer. None without a peer's run of the same."""
        peer = one.peer(self.measurements)
        return peer.median_s / one.median_s if peer is not None else None

    def _facts_of(self, one: Measurement) -> dict[str, Any]:
        facts = asdict(one)
        facts["passes"] = [{"mode": str(mode), "bucket": bucket, "count": n} for mode, bucket, n in one.passes]
        facts |= {name: getattr(one, name) for name in ("median_s", "tokens_per_second", "floor_share")}
        facts |= {name: getattr(self, name)(one) for name in ("lora_overhead", "graph_gain", "over_peer")}
        if one.profile is not None:
            facts["profile"] |= {"host_s": one.profile.host_s, "idle_share": one.profile.idle_share}
        return facts
