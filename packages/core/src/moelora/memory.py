"""How much device memory a run takes, part by part, and how large batches may be for it to fit. Allocates nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moelora.adapters.bank import BankLayout
from moelora.adapters.base import Adapter, Catalogue
from moelora.backends.base import Backend
from moelora.capacity import PrefillCapacity
from moelora.graphs.select import first_mode
from moelora.models.architecture import Architecture
from moelora.models.experts import moe_shapes
from moelora.models.kept import kept_in_float32
from moelora.options import EngineOptions, choose_backend, derive_buckets, derive_capacity
from moelora.scoring.head import FUSED_ROWS, chunk_rows_of, row_bytes
from moelora.types import GraphMode, Phase

NOT_COUNTED = ("CUDA's own context and kernels", "what the allocator rounds up")
"""Device memory that no part holds."""

_USABLE = 0.95
"""Share of the free memory that the parts may take; the rest is for `NOT_COUNTED`."""
_FEWEST_TOKENS = 512
"""Batches are not made smaller than this on their own: below it, reading the weights takes all the time."""
_FEWEST_SLOTS = 2
"""One for the adapter in use, one for the next."""
_HEAD_TILE = 256
"""Logits of a row that the fused head reduces to one triple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the device. base: weights and buffers. bank: all slots, and whole modules that adapters replace.

    static: metadata and expert scratch of the backend. graphs: what captured graphs keep. activations: hidden states
    while the largest batch runs eagerly. scoring_chunk: logits, or what stands for them, held at once; behind the
    activations, not beside them. score_chunk_rows: rows of logits in it, from what the other parts leave free.
    adapters_host: factors of all adapters, on the host. free, total: of a CUDA device as it is now; None elsewhere.
    """

    base: int
    bank: int
    static: int
    graphs: int
    activations: int
    scoring_chunk: int
    score_chunk_rows: int
    adapters_host: int
    free: int | None
    total: int | None

    @property
    def needed(self) -> int:
        """What all parts take at once; `NOT_COUNTED` comes on top."""
        return together(asdict(self))

    @property
    def fits(self) -> bool | None:
        """Whether the parts fit into what is free; None where that is not known."""
        return None if self.free is None else self.needed <= self.free

    def to_json(self) -> dict[str, Any]:
        """The parts, their sum, and whether they fit."""
        return {**asdict(self), "needed": self.needed, "fits": self.fits, "not_counted": list(NOT_COUNTED)}


def together(parts: dict[str, Any]) -> int:
    """What the parts of a `MemoryPlan` take at once."""
    lasting = sum(int(parts[name]) for name in ("base", "bank", "static", "graphs"))
    return lasting + max(int(parts["activations"]), int(parts["scoring_chunk"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """A model before its weights are read, and the adapters of the run: what memory is planned for.

    skeleton: the model on the meta device. adapters: their shapes count alone.
    """

    skeleton: Any
    catalogue: Catalogue
    architecture: Architecture
    adapters: Collection[Adapter]
    device: torch.device
    dtype: torch.dtype

    @property
    def config(self) -> Any:
        """The config of the decoder."""
        return self.skeleton.config.get_text_config()


def choose_capacity(
    options: EngineOptions, sizing: Sizing, say: Callable[[str], None] = lambda text: None
) -> tuple[PrefillCapacity, MemoryPlan]:
    """What a run may hold at once, and the memory for it: what is asked for, and for the rest what fits.

    Slots are given up first, down to two, since adapters are copied while batches run; then batches are halved, down to
    512 tokens. What does not fit even so is planned as it is. A pure function of its arguments and of the memory that
    is free. Raises `ConfigError` as `derive_capacity` does.
    """
    free, total = free_device_memory(sizing.device)
    wanted = capacity = plan = None
    for tried in _smaller(options, sizing):
        backend = choose_backend(options, sizing.device)
        capacity = derive_capacity(
            tried,
            sizing.device,
            packs=sizing.architecture.packs,
            adapters=sizing.adapters,
            backend=backend.capabilities,
        )
        plan = plan_memory(sizing, options, capacity, backend=backend, free=free, total=total)
        wanted = wanted or capacity
        if free is None or plan.needed <= _USABLE * free:
            break
    assert wanted is not None
    assert capacity is not None
    assert plan is not None
    if capacity != wanted:
        say(
            f"{(free or 0) / 2**30:.1f} GiB are free on {sizing.device}: batches of {capacity.max_tokens:,} tokens and "
            f"{capacity.slots} adapter slots instead of {wanted.max_tokens:,} and {wanted.slots}"
        )
    return capacity, plan


def _smaller(options: EngineOptions, sizing: Sizing) -> Iterator[EngineOptions]:
    """The options, then ever smaller ones where the user left the size open."""
    yield options
    first = derive_capacity(
        options,
        sizing.device,
        packs=sizing.architecture.packs,
        adapters=sizing.adapters,
        backend=choose_backend(options, sizing.device).capabilities,
    )
    if options.slots is None:
        for slots in range(first.slots - 1, min(_FEWEST_SLOTS, first.slots) - 1, -1):
            options = replace(options, slots=slots)
            yield options
    if options.max_tokens is None and options.buckets is None:
        tokens = first.max_tokens // 2
        while tokens >= _FEWEST_TOKENS:
            options = replace(options, max_tokens=tokens)
            yield options
            tokens //= 2


def free_device_memory(device: torch.device) -> tuple[int | None, int | None]:
    """Bytes that can be allocated, what this process keeps for reuse included, and all bytes; None off CUDA."""
    if device.type != "cuda":
        return None, None
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def plan_memory(
    sizing: Sizing,
    options: EngineOptions,
    capacity: PrefillCapacity,
    *,
    backend: Backend,
    free: int | None,
    total: int | None,
    longest: int = 0,
) -> MemoryPlan:
    """Sizes what `PrefillEngine` would allocate. backend: one that has no buffers yet; it must not be used later.

    longest: tokens of the longest sequence, where it is known: beyond `max_tokens` it is the largest batch, though
    graphs and static buffers are those of `capacity`.
    """
    adapters, dtype, config = sizing.adapters, sizing.dtype, sizing.config
    layout = BankLayout.of(adapters)
    replaced = sorted((sum(t.nbytes for t in a.replacements.values()) for a in adapters), reverse=True)
    bank = capacity.bank_slots * layout.bytes_per_slot(sizing.catalogue, dtype) + sum(replaced[: capacity.bank_slots])
    shapes = moe_shapes(sizing.skeleton, config, layout.ranks)
    with FakeTensorMode(), _Allocations(sizing.device.type) as made:
        backend.init_graph_metadata(Phase.PREFILL, capacity, sizing.device)
        if shapes:
            backend.init_moe_buffers(Phase.PREFILL, capacity, sizing.device, dtype, shapes)
    largest = max(capacity.max_tokens, longest)
    base = _weights(sizing.skeleton, sizing.catalogue, dtype)
    per_token = activation_width(config, fused=backend.fused_ops is not None) * dtype.itemsize
    graphs = 0
    mode, _ = first_mode(
        options.graph,
        device=sizing.device,
        architecture=sizing.architecture,
        has_replacements=bool(layout.replaced),
        modes=backend.capabilities.graph_modes,
    )
    if mode is not GraphMode.OFF:
        buckets = derive_buckets(options, capacity)
        # Graphs share the memory of their activations and results, as much as the largest needs.
        graphs = max(buckets) * per_token
    left = None if free is None else max(free - base - bank - made.nbytes - graphs, 0)
    head_dtype = _head_dtype(sizing)
    chunk = options.score_chunk_rows or chunk_rows_of(config.vocab_size, head_dtype, left)
    return MemoryPlan(
        base=base,
        bank=bank,
        static=made.nbytes,
        graphs=graphs,
        activations=largest * per_token,
        scoring_chunk=_scoring_bytes(
            config,
            dtype,
            head_dtype,
            rows=largest,
            chunk=chunk,
            fused=backend.fused_ops is not None and "lm_head" not in layout.replaced,
        ),
        score_chunk_rows=chunk,
        adapters_host=sum(a.nbytes for a in adapters),
        free=free,
        total=total,
    )


def activation_width(config: Any, *, fused: bool) -> int:
    """Elements per token that are alive at once while a batch runs, at the widest place of a decoder layer.

    Attention holds the residual, the normed input, q, k, v, and its output or, where rotary is not `fused`, three terms
    as wide as q; a dense feed-forward the residual, the normed input, gate, up and their product. Routed experts work
    in the backend's scratch. Gated linear attention: see `_linear_attention_width`. config: the decoder's.
    """
    # Some decoders give each layer settings of its own, and then have none for all.
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return max(_layer_width(layer, fused=fused) for layer in layers)


def _layer_width(config: Any, *, fused: bool) -> int:
    hidden = config.hidden_size
    heads = getattr(config, "num_attention_heads", None) or 1
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or hidden // heads
    nope, rope = (getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    if nope and rope:  # latent attention: k and v are as wide as q once they are expanded
        head, kv_heads = nope + rope, heads
    attention = 2 * hidden + (2 if fused else 4) * heads * head + 2 * kv_heads * head
    experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None) or 0
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    dense = getattr(config, "intermediate_size", None) or 0
    inner = shared if experts and not getattr(config, "first_k_dense_replace", 0) else dense
    return max(attention, _linear_attention_width(config), 3 * hidden + 3 * inner + 4 * experts)


def _linear_attention_width(config: Any) -> int:
    """Of the gated delta rule in chunks of 64 tokens (arXiv 2412.06464), as flash-linear-attention runs it; 0 if none.

    Before and behind the convolution q, k and v, then q and k for every head of v, as they are and of unit length; the
    gate; the chunks' two transformed keys and values, their states, new values and the result.
    """
    heads = getattr(config, "linear_num_value_heads", None)
    if not heads:
        return 0
    d_k, d_v = config.linear_key_head_dim, config.linear_value_head_dim
    keys, values = heads * d_k, heads * d_v
    convolved = 2 * config.linear_num_key_heads * d_k + values
    states = keys * d_v // 64
    return 2 * config.hidden_size + 2 * convolved + values + 4 * keys + (keys + values) + states + 2 * values


def _scoring_bytes(
    config: Any, dtype: torch.dtype, head_dtype: torch.dtype, *, rows: int, chunk: int, fused: bool
) -> int:
    """A chunk of logits. The fused head leaves the library a few rows at a time, and holds three values per tile.

    dtype: of the rows, which are gathered, and brought to `head_dtype` if that is another.
    """
    vocab = config.vocab_size
    if not fused:
        return chunk * row_bytes(vocab, head_dtype)
    by_library = min(chunk, FUSED_ROWS - 1) * row_bytes(vocab, head_dtype)
    element = sum(each.itemsize for each in {dtype, head_dtype})
    by_kernel = rows * (-(-vocab // _HEAD_TILE) * 12 + config.hidden_size * element)
    return max(by_library, by_kernel)


def _weights(skeleton: Any, catalogue: Catalogue, dtype: torch.dtype) -> int:
    """Parameters in `dtype`, or in float32 where the model keeps them so, and buffers as they are; a tied head once."""
    is_kept = kept_in_float32(skeleton, dtype)
    parameters = {
        id(p): p.numel() * (torch.float32 if is_kept(name) else dtype).itemsize
        for name, p in skeleton.named_parameters()
    }
    head, embedding = skeleton.get_output_embeddings(), skeleton.get_input_embeddings()
    if catalogue.tied_lm_head and head.weight is not embedding.weight:
        del parameters[id(head.weight)]
    return sum(parameters.values()) + sum(b.nbytes for b in skeleton.buffers())


def _head_dtype(sizing: Sizing) -> torch.dtype:
    """The dtype of lm_head's weight and so of its logits; a tied head is the embedding."""
    head, embedding = sizing.skeleton.get_output_embeddings(), sizing.skeleton.get_input_embeddings()
    weight = embedding.weight if sizing.catalogue.tied_lm_head else head.weight
    name = next(name for name, parameter in sizing.skeleton.named_parameters() if parameter is weight)
    return torch.float32 if kept_in_float32(sizing.skeleton, sizing.dtype)(name) else sizing.dtype


class _Allocations(TorchDispatchMode):
    """Adds up the storages that are made on one type of device within its context."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._storages: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device_type:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage.nbytes()
        return out
