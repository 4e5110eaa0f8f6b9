"""Dense LoRA: out += B A x for rows of many adapters, with the metadata of either backend.

`tiles.py` cuts rows into tiles, `kernel.py` has the kernels, `config.py` their block sizes, `naive.py` the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moelora.backends.base import DenseSlots
from moelora_kernels.launch import (
    FLOAT_DTYPES,
    INT32_LIMIT,
    programs,
    require,
    require_device,
    require_rows,
)
from moelora_kernels.ops.dense_lora.config import DenseConfig, pick_config
from moelora_kernels.ops.dense_lora.kernel import expand_kernel, gather_kernel, shrink_kernel, shrink_narrow_kernel
from moelora_kernels.ops.dense_lora.naive import naive_dense_lora, naive_embedding_lora
from moelora_kernels.ops.dense_lora.tiles import TileList, cut_tiles, make_tile_list, pick_tile_rows
from moelora_kernels.overlap import overlapping, overlaps

__all__ = [
    "MAX_FUSED",
    "MAX_RANK",
    "DenseConfig",
    "RowTiles",
    "TileList",
    "cut_tiles",
    "dense_lora",
    "embedding_lora",
    "expand_every_slot",
    "fill_four",
    "make_tile_list",
    "naive_dense_lora",
    "naive_embedding_lora",
    "padded_rank",
    "pick_config",
    "pick_tile_rows",
    "scratch_numel",
    "shrink",
]

MAX_RANK = 256
_SHRINK_BLOCKS = 64
"""Blocks of rows that shrink cuts a batch into, at least. One H200, LoRA on q, k, v, o riding in their products, over
the bare ones: 8,192 rows +13.6 % with 64, 14.7 with 128, 15.7 with 256; 2,048 rows +23, 30 and 30 %."""
MAX_FUSED = 4
"""Projections of one input that share a launch; more are done in several."""

_SHARED_BYTES = 227 * 1024
"""Shared memory of a Hopper multiprocessor, for all programs on it."""
_STEP_BYTES = 200 * 1024
"""What the steps under way in one program may take of it."""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Which rows belong to which slot, for the launch functions.

    tiles: the tile list, of at most `tile_rows` rows each. perm_T: int32 `[rows]`, the row of the batch behind each row
    that the tiles count, or None where they count rows of the batch itself.
    """

    tiles: TileList
    tile_rows: int
    perm_T: torch.Tensor | None = None


def padded_rank(rank: int) -> int:
    """Columns of scratch for one projection: the rank up to a multiple of 16, so that its rows stay aligned."""
    return -(-rank // 16) * 16


def scratch_numel(rows: int, max_rank: int) -> int:
    """Elements of scratch that `rows` rows can need in one launch."""
    return rows * MAX_FUSED * padded_rank(max_rank)


def dense_lora(
    x_TK: torch.Tensor,
    outs_TN: Sequence[torch.Tensor],
    slots: Sequence[DenseSlots],
    rows: RowTiles,
    *,
    scratch: torch.Tensor | None = None,
    config: DenseConfig | None = None,
) -> None:
    """out += B A x in place, for each projection of one input; rows that are in no tile are left alone.

    x_TK `[T, K]` and every out `[T, N_i]`: one dtype out of bfloat16, float16, float32, rows contiguous, rows may lie
    apart. Factors `[L, R_i, K]`, `[L, N_i, R_i]`, contiguous, in the same dtype, or in any of the three if x is float32
    (a router's product). Ranks 0 to 256. `scratch`: flat, x's dtype, at least `scratch_numel(T, max rank)` elements;
    allocated here if None. Rounding as in `naive_dense_lora`. Raises `ConfigError` for what has no kernel.
    """
    if not outs_TN:
        return
    for out_TN, one in zip(outs_TN, slots, strict=True):
        _check_factors("dense_lora", x_TK.dtype, out_TN, one, rows)
        require_rows("dense_lora", "x", x_TK)
        require_device("dense_lora", x_TK, out_TN)
        assert out_TN.shape[0] == x_TK.shape[0], f"x has {x_TK.shape[0]} rows, out {out_TN.shape[0]}"
        wide = one.a_LRI.shape[2]
        assert wide == x_TK.shape[1], f"x is {x_TK.shape[1]} wide, A takes {wide}"
    if x_TK.shape[0] == 0 or rows.tiles.capacity == 0:
        return
    for start in range(0, len(outs_TN), MAX_FUSED):
        some, their_slots = outs_TN[start : start + MAX_FUSED], slots[start : start + MAX_FUSED]
        pieces = [(out, one) for out, one in zip(some, their_slots, strict=True) if out.shape[1] and one.a_LRI.shape[1]]
        if pieces:
            outs, live = zip(*pieces, strict=True)
            _fused(x_TK, outs, live, rows, scratch, config)


def embedding_lora(
    ids_T: torch.Tensor,
    out_TN: torch.Tensor,
    slots: DenseSlots,
    rows: RowTiles,
    *,
    scratch: torch.Tensor | None = None,
    config: DenseConfig | None = None,
) -> None:
    """out += B A[:, id] in place. ids_T: int32 or int64 `[T]`; A is `[L, R, vocabulary]`; the rest as `dense_lora`."""
    _check_factors("embedding_lora", out_TN.dtype, out_TN, slots, rows)
    require_device("embedding_lora", ids_T, out_TN)
    require(
        ids_T.dtype in (torch.int32, torch.int64), f"embedding_lora: ids are {ids_T.dtype}", "torch.int64 token ids"
    )
    assert ids_T.shape == out_TN.shape[:1], f"{tuple(ids_T.shape)} ids for {out_TN.shape[0]} rows"
    rank = slots.a_LRI.shape[1]
    if out_TN.numel() == 0 or rank == 0 or rows.tiles.capacity == 0:
        return
    config = config or pick_config(out_TN.dtype, rows.tile_rows, rank)
    y_TR = _scratch(scratch, out_TN.shape[0], padded_rank(rank), out_TN)
    gather_kernel[(programs(out_TN.device, rows.tiles.capacity, 8),)](
        ids_T.contiguous(), y_TR, slots.a_LRI, slots.ranks_L,
        rank, slots.a_LRI.shape[2], y_TR.shape[1], *_tile_arguments(rows), y_TR.stride(0),
        GATHER=rows.perm_T is not None, BLOCK_M=config.block_m, BLOCK_R=16,
    )  # fmt: skip
    _expand(y_TR, [out_TN], [slots], rows, config)


def _fused(
    x_TK: torch.Tensor,
    outs_TN: Sequence[torch.Tensor],
    slots: Sequence[DenseSlots],
    rows: RowTiles,
    scratch: torch.Tensor | None,
    config: DenseConfig | None,
) -> None:
    config = config or pick_config(x_TK.dtype, rows.tile_rows, max(one.a_LRI.shape[1] for one in slots))
    y_TR = shrink(x_TK, slots, rows, scratch=scratch, config=config)
    _expand(y_TR, outs_TN, slots, rows, config)


def shrink(
    x_TK: torch.Tensor,
    slots: Sequence[DenseSlots],
    rows: RowTiles,
    *,
    scratch: torch.Tensor | None = None,
    by_token: bool = False,
    config: DenseConfig | None = None,
) -> torch.Tensor:
    """Returns A x of up to `MAX_FUSED` projections side by side, `[T, Σ padded_rank(R_i)]`, in x's dtype.

    A row of y is defined only where a tile covers it, and only up to its slot's rank, rounded up to 16. Rows stand in
    the order that the tiles count, or with `by_token` in that of the batch.
    """
    config = config or pick_config(x_TK.dtype, rows.tile_rows, max(one.a_LRI.shape[1] for one in slots))
    assert config.block_m >= rows.tile_rows, "a tile does not fit into a block"
    y_TR = _scratch(scratch, x_TK.shape[0], sum(padded_rank(one.a_LRI.shape[1]) for one in slots), x_TK)
    # Tiles that suit expand can be too few to keep every multiprocessor reading x: then each is shared.
    block_m = config.block_m
    while block_m > 64 or (block_m > 16 and x_TK.shape[0] < _SHRINK_BLOCKS * block_m):
        block_m //= 2
    parts = config.block_m // block_m
    work = rows.tiles.capacity * parts
    four = fill_four(slots)
    factors = (*(one.a_LRI for one in four), *(one.ranks_L for one in four), *(one.a_LRI.shape[1] for one in four))
    widths = (x_TK.shape[1], x_TK.stride(0), y_TR.stride(0))
    constants = {
        "NUM": len(slots),
        "GATHER": rows.perm_T is not None,
        "BY_TOKEN": by_token,
        "PARTS": parts,
        "OVERLAP": overlaps(x_TK.device, x_TK.shape[0]),
        "BLOCK_M": block_m,
        "BLOCK_K": config.block_k,
    }
    if len(slots) > 1 and all(one.a_LRI.shape[1] <= 16 for one in slots) and x_TK.dtype is not torch.float32:
        block_c = 16 * _pow2_count(len(slots))
        grid, options = _shrink_launch(config, block_m + block_c, work, x_TK)
        shrink_narrow_kernel[grid](
            x_TK, y_TR, *factors, *_tile_arguments(rows), *widths, BLOCK_C=block_c, **constants, **options
        )
        return y_TR
    # Four accumulators of 64 ranks would spill; fewer ranks a pass read x again, from cache.
    block_r = min(config.shrink_block_r, 128 // _pow2_count(len(slots)))
    grid, options = _shrink_launch(config, block_m + len(slots) * block_r, work, x_TK)
    shrink_kernel[grid](
        x_TK, y_TR, *factors, *_column_ends(slots), *_tile_arguments(rows), *widths,
        BLOCK_R=block_r, **constants, **options,
    )  # fmt: skip
    return y_TR


def expand_every_slot(
    y_TC: torch.Tensor, outs_TN: Sequence[torch.Tensor], slots: Sequence[DenseSlots], rows: RowTiles
) -> None:
    """out += B y in place where y has been made for every slot, whichever a row has: `[T, Σ L·R_i]`, x's dtype.

    Projection by projection, slot by slot. At most `MAX_FUSED` projections; the rest as `dense_lora`.
    """
    require(len(outs_TN) <= MAX_FUSED, f"dense_lora: {len(outs_TN)} projections", f"at most {MAX_FUSED} at once")
    for out_TN, one in zip(outs_TN, slots, strict=True):
        _check_factors("dense_lora", y_TC.dtype, out_TN, one, rows)
        require_rows("dense_lora", "y", y_TC)
    assert y_TC.shape == (outs_TN[0].shape[0], sum(one.a_LRI.shape[0] * one.a_LRI.shape[1] for one in slots))
    ranks = [one.a_LRI.shape[1] for one in slots]
    if y_TC.numel() == 0 or rows.tiles.capacity == 0:
        return
    _expand(y_TC, outs_TN, slots, rows, pick_config(y_TC.dtype, rows.tile_rows, max(ranks)), every_slot=True)


def _expand(
    y_TR: torch.Tensor,
    outs_TN: Sequence[torch.Tensor],
    slots: Sequence[DenseSlots],
    rows: RowTiles,
    config: DenseConfig,
    *,
    every_slot: bool = False,
) -> None:
    four, outs = fill_four(slots), fill_four(outs_TN)
    group, work = _column_groups([out.shape[1] for out in outs_TN], rows, config)
    require(work < INT32_LIMIT, f"dense_lora: {work} pieces of work", "a smaller max_tokens")
    max_rank = max(one.b_LOR.shape[2] for one in slots)
    expand_kernel[(programs(y_TR.device, work, config.expand_programs),)](
        y_TR, *(one.b_LOR for one in four), *outs, *(one.ranks_L for one in four),
        *(one.b_LOR.shape[2] for one in four), *(out.shape[1] for out in outs), *(out.stride(0) for out in outs),
        *_column_ends(slots, every_slot=every_slot)[:3], *_tile_arguments(rows), y_TR.stride(0), group,
        NUM=len(slots), GATHER=rows.perm_T is not None, EVERY_SLOT=every_slot,
        ONE_BLOCK=max_rank <= config.expand_block_r, STAGES=config.expand_stages,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_R=config.expand_block_r,
        num_warps=config.expand_warps, **overlapping(y_TR.device, y_TR.shape[0]),
    )  # fmt: skip


def _column_groups(widths: Sequence[int], rows: RowTiles, config: DenseConfig) -> tuple[int, int]:
    """Blocks of columns that one piece of work walks over, and the pieces that the list can give at most.

    Long walks hide memory latency; short ones give small batches enough programs. Bits do not depend on it.
    """
    blocks = [-(-width // config.block_n) for width in widths]
    group = config.expand_group
    while group > 1 and rows.tiles.capacity * sum(-(-count // group) for count in blocks) < 1024:
        group //= 2
    return group, rows.tiles.capacity * sum(-(-count // group) for count in blocks)


def _tile_arguments(rows: RowTiles) -> tuple[torch.Tensor, ...]:
    tiles = rows.tiles
    perm = rows.perm_T if rows.perm_T is not None else tiles.count_1
    return tiles.count_1, tiles.start_C, tiles.rows_C, tiles.slot_C, perm


def _column_ends(slots: Sequence[DenseSlots], *, every_slot: bool = False) -> list[int]:
    """Where each projection's columns of scratch end; the last end fills up the four."""
    ends, end = [], 0
    for one in slots:
        end += one.a_LRI.shape[0] * one.a_LRI.shape[1] if every_slot else padded_rank(one.a_LRI.shape[1])
        ends.append(end)
    return fill_four(ends)


def fill_four(values: Sequence[Any]) -> list[Any]:
    """The kernels take four of each; unused ones repeat the last and are never read."""
    return [*values, *[values[-1]] * (MAX_FUSED - len(values))]


def _shrink_launch(config: DenseConfig, lines: int, work: int, x_TK: torch.Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Grid, warps and stages of a shrink. lines: rows of x and A in one step; more stages than fit are not taken."""
    step = lines * config.block_k * x_TK.element_size()
    stages = max(2, min(config.shrink_stages, _STEP_BYTES // step))
    resident = max(1, min(config.shrink_programs, _SHARED_BYTES // (stages * step)))
    return (programs(x_TK.device, work, resident),), {"num_warps": config.shrink_warps, "num_stages": stages}


def _pow2_count(count: int) -> int:
    return 1 if count == 1 else 2 if count == 2 else 4


def _scratch(scratch: torch.Tensor | None, rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """`[rows, width]` at the head of the scratch, or newly allocated without one."""
    if scratch is None:
        return torch.empty((rows, width), dtype=like.dtype, device=like.device)
    assert scratch.dtype == like.dtype
    assert scratch.numel() >= rows * width, f"scratch of {scratch.numel()} elements, {rows}×{width} needed"
    return scratch[: rows * width].view(rows, width)


def _check_factors(op: str, dtype: torch.dtype, out_TN: torch.Tensor, slots: DenseSlots, rows: RowTiles) -> None:
    a_LRI, b_LOR = slots.a_LRI, slots.b_LOR
    require(dtype in FLOAT_DTYPES, f"{op}: dtype {dtype} has no kernel", "bfloat16, float16 or float32")
    require(out_TN.dtype == dtype, f"{op}: x is {dtype}, out {out_TN.dtype}", "one dtype")
    for name, factor in (("A", a_LRI), ("B", b_LOR)):
        require(
            factor.dtype == dtype or (dtype == torch.float32 and factor.dtype in FLOAT_DTYPES),
            f"{op}: {name} is {factor.dtype}, x {dtype}",
            "a bank in the dtype of the activations",
        )
        require(factor.is_contiguous(), f"{op}: {name} is not contiguous", f"{name}.contiguous()")
        slot_numel = factor[0].numel() if factor.shape[0] else 0
        require(
            slot_numel < INT32_LIMIT, f"{op}: one slot of {name} has {slot_numel} elements", "fewer ranks or columns"
        )
    rank = a_LRI.shape[1]
    require(rank <= MAX_RANK, f"{op}: rank {rank} is over {MAX_RANK}", "the 'torch' backend, which takes any rank")
    require_rows(op, "out", out_TN)
    require_device(op, out_TN, a_LRI, b_LOR, slots.ranks_L, rows.tiles.count_1)
    assert slots.ranks_L.dtype == torch.int32
    assert b_LOR.shape == (a_LRI.shape[0], out_TN.shape[1], rank), (
        f"B is {tuple(b_LOR.shape)}, A {tuple(a_LRI.shape)}, out {tuple(out_TN.shape)}"
    )
