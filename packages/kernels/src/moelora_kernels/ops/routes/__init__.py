"""Which rows each expert computes, in which tiles: the launch functions and the buffers they fill.

Legend: T tokens, K experts per token, E experts, L adapter slots, P pairs (= T·K), M tiles.
Everything is launched with fixed grids and without a host synchronisation, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from moelora.errors import ConfigError
from moelora_kernels.ops.routes.kernel import count_bins, list_tiles, scatter_items, start_bins, sum_blocks

_BLOCK, _WARPS = 128, 4
"""Elements of a block of the sort, one for each thread. One H200, 131,072 pairs of 16,384 tokens, ms of all launches:
0.033; 0.052 in blocks of 256 over 8 warps, 0.187 in blocks of 64 over 4, 0.278 in blocks of 128 over 8."""
_BIN_BLOCK = 128
MAX_BLOCK_M = 128
"""Rows of the largest tile that a list is sized for."""
MAX_EXPERTS = 4096
"""Above this the bins of one program no longer fit in registers."""


def max_tiles(pairs: int, experts: int, block_m: int) -> int:
    """The most tiles that `pairs` rows in at most `experts` groups can be cut into; the last of each may be partial."""
    return (pairs + min(experts, pairs) * (block_m - 1)) // block_m


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Rows ordered by (expert, slot), and their tiles; all int32 on the device.

    sorted_P: pair id (token·K + k) of each row; rows behind `first_row[E]` belong to no expert. row_slot_P: their
    slots. expert_rows `[E+1]`, first_row `[E+1]`: rows of each expert and its first row; the last entry is for pairs
    without one. tile_expert_M: the expert or -1 for an unused tile; tile_first_M, tile_rows_M: its rows. tile_pairs_MB
    `[M, block_m]`: their pairs, the first one's again behind the last; undefined in unused tiles.
    tile_row_slots_MB: their slots, -1 behind the last. tile_slots_MC, tile_num_slots_M: adapter slots in the tile,
    ascending, then zeros. What names slots is undefined if not `has_lora`.
    `top_k`: K, so that token = pair // K.
    """

    sorted_P: torch.Tensor
    row_slot_P: torch.Tensor
    expert_rows: torch.Tensor
    first_row: torch.Tensor
    tile_expert_M: torch.Tensor
    tile_first_M: torch.Tensor
    tile_rows_M: torch.Tensor
    tile_pairs_MB: torch.Tensor
    tile_row_slots_MB: torch.Tensor
    tile_slots_MC: torch.Tensor
    tile_num_slots_M: torch.Tensor
    num_experts: int
    top_k: int
    block_m: int
    has_lora: bool

    @property
    def num_tiles(self) -> int:
        """Tiles in the list, unused ones included: the grid of whoever follows it."""
        return self.tile_expert_M.shape[0]


class RouteBuffers:
    """Memory for the routes of one phase, sized by capacity; refilled in place for each layer.

    `block_m`: the smallest tile that will be asked for, which gives the most tiles.
    """

    def __init__(
        self, *, max_tokens: int, top_k: int, num_experts: int, num_slots: int, block_m: int, device: torch.device
    ) -> None:
        if num_experts > MAX_EXPERTS:
            raise ConfigError(f"routes hold at most {MAX_EXPERTS} experts, got {num_experts}; use --backend torch")
        pairs = max_tokens * top_k
        if pairs >= 2**31:
            raise ConfigError(f"{max_tokens} tokens × {top_k} experts pass 2³¹ pairs; lower --max-tokens")
        tiles = max_tiles(pairs, num_experts, block_m)
        cap = max(1, min(num_slots, MAX_BLOCK_M))
        bins = max(num_experts, num_slots + 1) + 1
        self.max_tokens, self.max_pairs, self.num_slots = max_tokens, pairs, num_slots

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.sorted_P, self.row_slot_P = ints(pairs), ints(pairs)
        self.order_T, self.order_slot_T = ints(max_tokens), ints(max_tokens)
        self.counts = ints(bins * max(1, triton.cdiv(max(pairs, max_tokens), _BLOCK)))
        self.totals, self.starts, self.tile_ends = ints(bins), ints(bins), ints(bins)
        self.tile_expert, self.tile_first, self.tile_rows = ints(tiles), ints(tiles), ints(tiles)
        rows = pairs + min(num_experts, pairs) * MAX_BLOCK_M
        self.tile_pairs, self.tile_row_slots = ints(rows), ints(rows)
        self.tile_slots, self.tile_num_slots = ints(tiles * cap), ints(tiles)
        self.zeros_T1 = ints(max_tokens if num_experts == 1 else 0).view(-1, 1)


def order_tokens(token_slot_T: torch.Tensor, *, buffers: RouteBuffers, num_live: torch.Tensor | None) -> torch.Tensor:
    """Token ids stably ordered by slot, base first, dead ones last: int32 `[T]`, a view into `buffers`.

    token_slot_T: int32 `[T]`, -1 for the base. num_live: int32 `[1]` on the device; tokens from there on are dead;
    None: all live. A slot outside `[-1, L)` makes its token dead. The result holds for every layer of the batch.
    """
    T = token_slot_T.shape[0]
    _check_tokens(T, buffers)
    order_T, slot_T = buffers.order_T[:T], buffers.order_slot_T[:T]
    _sort(None, token_slot_T, None, num_live, order_T, slot_T, buffers, top_k=1, last=buffers.num_slots + 1, block_m=1)
    return order_T


def build_routes(
    expert_ids_TK: torch.Tensor,
    token_slot_T: torch.Tensor,
    *,
    num_experts: int,
    block_m: int,
    has_lora: bool,
    buffers: RouteBuffers,
    num_live: torch.Tensor | None = None,
    order_T: torch.Tensor | None = None,
) -> Routes:
    """Orders the pairs of a batch by (expert, slot) and cuts them into tiles of at most `block_m` rows of one expert.

    expert_ids_TK: int32 or int64 `[T, K]`, contiguous; an id outside `[0, E)` gives the pair to nobody. token_slot_T:
    int32 `[T]`, see `order_tokens`, whose result for this batch is `order_T` (made here if None). `has_lora` False
    skips all work on slots, which then count as base. Returns views into `buffers`, valid until the next call.
    """
    T, K = expert_ids_TK.shape
    _check_tokens(T, buffers)
    P = T * K
    if buffers.max_pairs < P:
        raise ConfigError(f"{P} pairs exceed the {buffers.max_pairs} that the routes were sized for")
    if buffers.totals.shape[0] < num_experts + 1:
        raise ConfigError(
            f"{num_experts} experts exceed the {buffers.totals.shape[0] - 1} that the routes were sized for"
        )
    if not expert_ids_TK.is_contiguous():
        expert_ids_TK = expert_ids_TK.contiguous()
    if has_lora and order_T is None:
        order_T = order_tokens(token_slot_T, buffers=buffers, num_live=num_live)
    sorted_P, slot_P = buffers.sorted_P[:P], buffers.row_slot_P[:P]
    order = order_T if has_lora else None
    _sort(
        expert_ids_TK,
        token_slot_T,
        order,
        num_live,
        sorted_P,
        slot_P,
        buffers,
        top_k=K,
        last=num_experts,
        block_m=block_m,
    )
    return _tiles(sorted_P, slot_P, buffers, num_experts, K, has_lora, block_m)


def token_routes(
    token_slot_T: torch.Tensor, *, block_m: int, buffers: RouteBuffers, num_live: torch.Tensor | None = None
) -> Routes:
    """Routes of a single expert that every live token chose: tiles of tokens ordered by slot.

    `buffers` must be made with `num_experts=1` and `top_k=1`, and be others than those of the layer's own routes.
    """
    assert buffers.zeros_T1.shape[0] == buffers.max_tokens, "token routes need buffers made for one expert"
    return build_routes(
        buffers.zeros_T1[: token_slot_T.shape[0]],
        token_slot_T,
        num_experts=1,
        block_m=block_m,
        has_lora=True,
        buffers=buffers,
        num_live=num_live,
    )


def _check_tokens(T: int, buffers: RouteBuffers) -> None:
    if buffers.max_tokens < T:
        raise ConfigError(
            f"{T} tokens exceed the {buffers.max_tokens} that the routes were sized for; raise --max-tokens"
        )


def _sort(
    ids_TK: torch.Tensor | None,
    slot_T: torch.Tensor,
    order_T: torch.Tensor | None,
    num_live: torch.Tensor | None,
    sorted_out: torch.Tensor,
    slot_out: torch.Tensor,
    buffers: RouteBuffers,
    *,
    top_k: int,
    last: int,
    block_m: int,
) -> None:
    """One level of the counting sort: pairs by expert, or tokens by slot where there are no ids. Bins are 0 … last."""
    count = sorted_out.shape[0]
    blocks = max(1, triton.cdiv(count, _BLOCK))
    flags = {
        "PAIRS": ids_TK is not None,
        "HAS_SLOT": order_T is not None,
        "HAS_LIVE": num_live is not None,
        "BLOCK": _BLOCK,
        "num_warps": _WARPS,
    }
    unread = buffers.totals
    inputs = (
        unread if ids_TK is None else ids_TK,
        slot_T,
        unread if order_T is None else order_T,
        unread if num_live is None else num_live,
        buffers.counts,
    )
    sizes = (count, slot_T.shape[0], blocks, top_k, last, buffers.num_slots)
    count_bins[(blocks, triton.cdiv(last + 1, _BIN_BLOCK))](*inputs, *sizes, **flags, BINS=_BIN_BLOCK)
    sum_blocks[(last + 1,)](buffers.counts, buffers.totals, blocks, BLOCK=min(1024, triton.next_power_of_2(blocks)))
    start_bins[(1,)](
        buffers.totals,
        buffers.starts,
        buffers.tile_ends,
        last,
        BLOCK_M=block_m,
        BINS=triton.next_power_of_2(last + 1),
    )
    scatter_items[(blocks,)](*inputs, buffers.starts, sorted_out, slot_out, *sizes, **flags)


def _tiles(
    sorted_P: torch.Tensor, slot_P: torch.Tensor, buffers: RouteBuffers, E: int, K: int, has_lora: bool, block_m: int
) -> Routes:
    if block_m > MAX_BLOCK_M:
        raise ConfigError(f"tiles have at most {MAX_BLOCK_M} rows, got {block_m}")
    tiles = max_tiles(sorted_P.shape[0], E, block_m)
    if tiles > buffers.tile_expert.shape[0]:
        raise ConfigError(
            f"tiles of {block_m} rows give {tiles}, more than the {buffers.tile_expert.shape[0]} that the routes were "
            "sized for; size them with the smallest block_m"
        )
    cap = max(1, min(buffers.num_slots, block_m))
    routes = Routes(
        sorted_P=sorted_P,
        row_slot_P=slot_P,
        expert_rows=buffers.totals[: E + 1],
        first_row=buffers.starts[: E + 1],
        tile_expert_M=buffers.tile_expert[:tiles],
        tile_first_M=buffers.tile_first[:tiles],
        tile_rows_M=buffers.tile_rows[:tiles],
        tile_pairs_MB=buffers.tile_pairs[: tiles * block_m].view(tiles, block_m),
        tile_row_slots_MB=buffers.tile_row_slots[: tiles * block_m].view(tiles, block_m),
        tile_slots_MC=buffers.tile_slots[: tiles * cap].view(tiles, cap),
        tile_num_slots_M=buffers.tile_num_slots[:tiles],
        num_experts=E,
        top_k=K,
        block_m=block_m,
        has_lora=has_lora,
    )
    if tiles:
        list_tiles[(tiles,)](
            buffers.totals,
            buffers.starts,
            buffers.tile_ends,
            sorted_P,
            slot_P,
            routes.tile_expert_M,
            routes.tile_first_M,
            routes.tile_rows_M,
            routes.tile_pairs_MB,
            routes.tile_row_slots_MB,
            routes.tile_slots_MC,
            routes.tile_num_slots_M,
            E,
            HAS_SLOT=has_lora,
            SLOT_CAP=cap,
            SLOT_BLOCK=triton.next_power_of_2(cap),
            BLOCK_M=block_m,
            BINS=triton.next_power_of_2(E),
        )
    return routes


__all__ = [
    "MAX_BLOCK_M",
    "MAX_EXPERTS",
    "RouteBuffers",
    "Routes",
    "build_routes",
    "max_tiles",
    "order_tokens",
    "token_routes",
]
