"""Finds the fastest blocks of the experts' kernels for a GPU, among those that give the same bits as the built-in ones.

One product at a time, the other as it is; then how tiles are grouped. Each candidate computes the same batch as the
built-in configuration, with LoRA and without, and is refused unless both results are equal bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import triton

from moelora.backends.base import ExpertSlots, ExpertsWeights, MoeShape
from moelora.capacity import PrefillCapacity
from moelora.errors import ConfigError
from moelora.models.experts import experts_weights
from moelora.types import Phase
from moelora_kernels.ops.experts import MoeBuffers, experts_lora
from moelora_kernels.ops.experts.config import MoeConfig, ProductConfig, default_config
from moelora_kernels.ops.experts.naive import naive_experts
from moelora_kernels.ops.experts.table import Tuned
from moelora_kernels.timing import Timer, graph_ms

TOKENS = (128, 512, 1024, 2048, 4096, 8192, 16384)
"""Token counts that are tuned by default."""

# Rows of a tile, and for each the columns and warps that fill the registers of a warp group sensibly.
_TILES = {64: ((128, 4), (256, 4), (256, 8)), 128: ((128, 4), (128, 8), (256, 8))}
_STAGES = (3, 4)
_GROUPS = (2, 4, 8)

# Of bf16 products, relative: rounding of A x, h and the result gives up to 8e-3, a row without its adapter far more.
_MOST_ERROR = 1.2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A batch of random tokens for one experts layer, half of its time with adapters."""

    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    slot_T: torch.Tensor
    base: ExpertsWeights
    up: ExpertSlots
    down: ExpertSlots
    buffers: MoeBuffers

    def run(self, config: MoeConfig, *, lora: bool) -> torch.Tensor:
        """The layer's output."""
        return experts_lora(
            self.x_TH,
            self.ids_TK,
            self.weights_TK,
            self.base,
            self.up,
            self.down,
            self.slot_T,
            buffers=self.buffers,
            has_lora=lora,
            config=config,
        )


def tune_experts(
    base: ExpertsWeights,
    shape: MoeShape,
    *,
    tokens: Sequence[int] = TOKENS,
    slots: int = 8,
    rank: int = 16,
    timer: Timer = graph_ms,
    on_event: Callable[[str], None] = lambda text: None,
) -> Iterator[Tuned]:
    """The best blocks for each token count, one by one from the fewest tokens on.

    base: one layer's weights, in a 16-bit dtype, on the device to tune. Raises `ConfigError` for another dtype, and if
    the built-in configuration itself is wrong on this device.
    """
    if base.up.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(f"only 16-bit products are tuned, not {base.up.dtype}; use --dtype bfloat16 or float16")
    for count in sorted(tokens):
        yield _tune(make_work(base, shape, count, slots, rank), timer, on_event)


def layer_weights(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> ExpertsWeights:
    """The weights of an experts module that is on the meta device, made at random on `device`."""
    real = copy.deepcopy(module).to_empty(device=device).to(dtype)
    for parameter in real.parameters():
        parameter.data.normal_(std=0.02)
    return experts_weights(real)


def check_default(work: Work) -> None:
    """Compares the built-in configuration with plain torch in fp32. Raises `ConfigError` if they differ."""
    config = _default(work)
    for lora in (False, True):
        up, down = (work.up, work.down) if lora else (None, None)
        expected = naive_experts(
            work.x_TH, work.ids_TK, work.weights_TK, work.base, up, down, work.slot_T, dtype=torch.float32
        )
        error = float((work.run(config, lora=lora).float() - expected).norm() / expected.norm())
        if not error < _MOST_ERROR:
            raise ConfigError(f"the experts' kernels are wrong on this device: relative error {error:.1e}")


def make_work(base: ExpertsWeights, shape: MoeShape, tokens: int, slots: int, rank: int) -> Work:
    """Random tokens, evenly chosen experts, and requests of all slots and the base, one behind the other."""
    device, dtype = base.up.device, base.up.dtype

    def randn(*sizes: int, scale: float) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device).normal_(std=scale)

    def factors(into: int, out: int) -> ExpertSlots:
        return ExpertSlots(
            a_LERI=randn(slots, shape.num_experts, rank, into, scale=into**-0.5),
            b_LEOR=randn(slots, shape.num_experts, out, rank, scale=0.1),
            ranks_L=torch.full((slots,), rank, dtype=torch.int32, device=device),
        )

    weights_TK, ids_TK = torch.randn(tokens, shape.num_experts, device=device).softmax(-1).topk(shape.top_k, -1)
    length = max(1, tokens // (2 * slots + 2))
    capacity = PrefillCapacity(
        max_tokens=tokens, max_requests=tokens, full_max_requests=tokens, slots=slots, max_rank=rank
    )
    ranked = replace(shape, max_rank_up=rank, max_rank_down=rank)
    return Work(
        x_TH=randn(tokens, shape.hidden, scale=1.0),
        ids_TK=ids_TK,
        weights_TK=weights_TK,
        slot_T=(torch.arange(tokens, device=device) // length % (slots + 1) - 1).int(),
        base=base,
        up=factors(shape.hidden, shape.up_out),
        down=factors(shape.inter, shape.hidden),
        buffers=MoeBuffers(Phase.PREFILL, capacity, device, dtype, [ranked]),
    )


def _tune(work: Work, timer: Timer, on_event: Callable[[str], None]) -> Tuned:
    check_default(work)
    default, tokens = _default(work), work.x_TH.shape[0]
    search = _Search(work, timer, default)
    for rows in _TILES:
        best = replace(default, block_m=rows, up=_fitting(default.up, rows), down=_fitting(default.down, rows))
        best = search.best_of([best])
        for product in ("up", "down"):
            best = search.best_of([best, *_candidates(best, product)])
            best = search.best_of([best, *_regrouped(best, product)])
    found, ms = search.fastest()
    on_event(
        f"{tokens} tokens: {ms:.3f} ms, built in {search.times[default]:.3f}; "
        f"{len(search.times)} tried, {search.refused} refused"
    )
    return Tuned(tokens=tokens, config=found, ms=ms, default_ms=search.times[default])


class _Search:
    """Remembers what was timed, and what was refused because it failed or its bits differ."""

    def __init__(self, work: Work, timer: Timer, default: MoeConfig) -> None:
        self._work = work
        self._timer = timer
        self._expected = [work.run(default, lora=lora).clone() for lora in (False, True)]
        self.times: dict[MoeConfig, float] = {}
        self.refused = 0
        self._time(default)

    def best_of(self, configs: Sequence[MoeConfig]) -> MoeConfig:
        """The fastest of some configurations; the first if none of them can be used."""
        return min(configs, key=lambda config: (self._time(config), configs.index(config)))

    def fastest(self) -> tuple[MoeConfig, float]:
        """The fastest of all that were timed."""
        return min(self.times.items(), key=lambda item: item[1])

    def _time(self, config: MoeConfig) -> float:
        if config not in self.times:
            self.times[config] = self._measure(config)
            self.refused += self.times[config] == float("inf")
        return self.times[config]

    def _measure(self, config: MoeConfig) -> float:
        try:
            found = [self._work.run(config, lora=lora) for lora in (False, True)]
        except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError):
            return float("inf")
        if not all(torch.equal(one, expected) for one, expected in zip(found, self._expected, strict=True)):
            return float("inf")
        return sum(self._timer(lambda lora=lora: self._work.run(config, lora=lora)) for lora in (False, True))  # type: ignore[misc]


def _default(work: Work) -> MoeConfig:
    tokens, top_k = work.ids_TK.shape
    return default_config(tokens=tokens, top_k=top_k, num_experts=work.base.num_experts, dtype=work.base.up.dtype)


def _fitting(product: ProductConfig, rows: int) -> ProductConfig:
    """The product with columns and warps that suit tiles of `rows` rows."""
    if (product.block_n, product.warps) in _TILES[rows]:
        return product
    columns, warps = _TILES[rows][0]
    return replace(product, block_n=columns, warps=warps)


def _candidates(config: MoeConfig, product: str) -> Iterator[MoeConfig]:
    for columns, warps in _TILES[config.block_m]:
        for stages in _STAGES:
            blocks = replace(getattr(config, product), block_n=columns, warps=warps, stages=stages)
            yield _with(config, product, blocks)


def _regrouped(config: MoeConfig, product: str) -> Iterator[MoeConfig]:
    for group in _GROUPS:
        yield _with(config, product, replace(getattr(config, product), group=group))


def _with(config: MoeConfig, product: str, blocks: ProductConfig) -> MoeConfig:
    return replace(config, up=blocks) if product == "up" else replace(config, down=blocks)
