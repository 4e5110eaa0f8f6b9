"""How a run is set up, and what follows from that before any weight is loaded: backend, capacity, buckets.

Shared by the engine, which then loads and runs, and by the plan of a run, which does not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from moelora.adapters.base import Adapter
from moelora.backends import backend_names, get_backend
from moelora.backends.base import Backend, Capabilities
from moelora.batching.planner import BatchLimits
from moelora.capacity import PrefillCapacity, default_buckets
from moelora.errors import ConfigError, choose_from
from moelora.types import GraphMode

WINDOW_REQUESTS = 65_536
"""Requests that are planned together: enough to group adapters, few enough to keep memory flat."""

_DTYPES = ("auto", "bfloat16", "float16", "float32")
_DEFAULT_TOKENS = {"cuda": 8192, "cpu": 2048}
_MAX_DEFAULT_SLOTS = 8
_MOST_TOKENS = 1 << 24
"""More tokens in one batch than any device holds; buffers are sized by the number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to run. None means: derived from the device, the model and the adapters.

    Attributes:
        backend: "auto", a name of `moelora.backends.backend_names()`, or MODULE:CLASS. "auto" is triton on CUDA.
        graph: Which CUDA graphs to capture, or its value as text ("full"); without a CUDA device none.
        device: "auto" (CUDA if there is any), "cpu", "cuda" or "cuda:N".
        dtype: Of weights, factors and activations: "auto", "bfloat16", "float16" or "float32". "auto" is the
            checkpoint's own on CUDA and float32 on the CPU. Sums, softmax and log-probabilities are float32 always.
        max_tokens: Tokens that a batch may hold; a longer sequence runs alone. Unless given 2,048 on the CPU, and on
            CUDA 8,192 or what fits.
        max_requests: Requests of the largest batch; as many as tokens unless given.
        slots: Adapters on the device at once; unless given all of them, up to 8 or what fits.
        buckets: Token counts to capture graphs for, ascending, none above `max_tokens`.
        load_format: "auto", "safetensors", or "dummy": random weights from the config alone.
        attention: The kernel of packed attention: "auto" (by time, where there are several), or one that the backend
            has: "triton", "fa4" (FlashAttention 4) for triton and csgmv.
        batch_invariant: The same bits for a row whatever shares its batch; needs triton or csgmv on CUDA.
        score_chunk_rows: Rows of logits held at once, each of V float32 values; sized from free memory unless given.
        lora_b_layout: "rank_major" or "grouped_by_expert", for adapters of fused experts that do not say which it is.
        seed: Of the random weights of "dummy".
        host_bytes: Bytes of host memory for adapters; half of what is free unless given. Adapters beyond it are read
            again each time they are loaded.

    Raises:
        ConfigError: If a number is no integer or below 1, or `dtype`, `graph` or `load_format` is none of those there
            are.
    """

    backend: str = "auto"
    graph: GraphMode = GraphMode.AUTO
    device: str = "auto"
    dtype: str = "auto"
    max_tokens: int | None = None
    max_requests: int | None = None
    slots: int | None = None
    buckets: tuple[int, ...] | None = None
    load_format: str = "auto"
    attention: str = "auto"
    batch_invariant: bool = False
    score_chunk_rows: int | None = None
    lora_b_layout: str | None = None
    seed: int = 0
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_requests", "slots", "score_chunk_rows"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise ConfigError(f"{name} must be an integer, got {value!r}")
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.dtype not in _DTYPES:
            raise ConfigError(choose_from("dtype", str(self.dtype), _DTYPES))
        if self.graph not in set(GraphMode):
            raise ConfigError(choose_from("graph mode", str(self.graph), map(str, GraphMode)))
        object.__setattr__(self, "graph", GraphMode(self.graph))  # "full" is taken, and modes are compared by identity
        if self.load_format not in {"auto", "safetensors", "dummy"}:
            raise ConfigError(choose_from("load format", self.load_format, ["auto", "safetensors", "dummy"]))


def choose_backend(options: EngineOptions, device: torch.device) -> Backend:
    """The backend asked for, or the fastest one for the device. Raises `ConfigError` for one that cannot be used."""
    # On CUDA triton, by measurement (one H200, LoRA on q, k, v, o of a 2,048 wide model, prompts of 250 tokens, ms for
    # triton and csgmv): 0.080 and 0.082 at 512 tokens, 0.515 and 0.532 at 8,192, 1.00 and 1.10 at 16,384. Rows of one
    # adapter lie side by side in a packed batch, so that ordering them by slot only scatters what is read and written.
    # Off CUDA the Triton backends would run in their interpreter, which is for tests.
    fastest = "triton" if device.type == "cuda" and "triton" in backend_names() else "torch"
    name = options.backend if options.backend != "auto" else fastest
    backend = get_backend(name)
    if device.type not in backend.capabilities.device_types:
        raise ConfigError(
            f"backend {name!r} does not run on {device.type}; it runs on "
            f"{', '.join(sorted(backend.capabilities.device_types))}. Valid on {device.type}: torch"
        )
    if options.batch_invariant and backend.fused_ops is None:
        raise ConfigError(f"backend {name!r} does not run batch-invariantly; valid: triton or csgmv on CUDA")
    backend.batch_invariant = options.batch_invariant
    if options.attention not in backend.attention_kernels:
        valid = ", ".join(backend.attention_kernels)
        raise ConfigError(f"backend {name!r} has no attention kernel {options.attention!r}; valid with it: {valid}")
    backend.attention_kernel = options.attention
    return backend


def derive_capacity(
    options: EngineOptions,
    device: torch.device,
    *,
    packs: bool,
    adapters: Collection[Adapter],
    backend: Capabilities,
) -> PrefillCapacity:
    """What a run may hold at once. packs: whether the architecture takes several requests per forward.

    Raises `ConfigError` if an adapter's rank is beyond the backend.
    """
    max_tokens = options.max_tokens or _DEFAULT_TOKENS[device.type]
    if max_tokens > _MOST_TOKENS:
        raise ConfigError(f"max_tokens must be at most {_MOST_TOKENS:,}, got {max_tokens:,}")
    max_requests = min(options.max_requests or max_tokens, max_tokens)
    if not packs:
        max_requests = 1
    max_rank = max((a.max_rank for a in adapters), default=0)
    limit = backend.max_rank
    if limit is not None and max_rank > limit:
        raise ConfigError(f"an adapter has rank {max_rank}; backend {backend.name} goes up to {limit}")
    return PrefillCapacity(
        max_tokens=max_tokens,
        max_requests=max_requests,
        full_max_requests=min(max_requests, max(max_tokens // 16, 1)),
        slots=min(options.slots or _MAX_DEFAULT_SLOTS, len(adapters)),
        max_rank=max_rank,
    )


def derive_buckets(options: EngineOptions, capacity: PrefillCapacity) -> tuple[int, ...]:
    """The token counts to capture. Raises `ConfigError` for some that no batch can have."""
    tokens = capacity.max_tokens
    buckets = options.buckets or default_buckets(tokens)
    if max(buckets) > tokens or min(buckets) < 1:
        raise ConfigError(f"buckets must lie in [1, max_tokens = {tokens}], got {', '.join(map(str, buckets))}")
    if sorted(set(buckets)) != list(buckets):
        raise ConfigError(f"buckets must ascend, got {', '.join(map(str, buckets))}")
    return buckets


def batch_limits(capacity: PrefillCapacity) -> BatchLimits:
    """What the planner may put into one batch."""
    return BatchLimits(
        max_tokens=capacity.max_tokens, max_sequences=capacity.max_requests, max_adapters=capacity.bank_slots
    )
