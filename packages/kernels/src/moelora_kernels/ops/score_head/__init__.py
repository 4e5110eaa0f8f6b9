"""The scoring head: log-probabilities of rows without their logits ever being written.

Legend: N rows, V vocabulary, H hidden, L adapter slots, R rank, C tiles of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from moelora.backends.base import DenseSlots, ExpertSlots
from moelora.errors import ConfigError
from moelora_kernels.launch import programs
from moelora_kernels.ops.experts import ProductConfig, padded_rank, shrink_rows
from moelora_kernels.ops.invariant_gemm import bulk_copies, descriptor
from moelora_kernels.ops.routes import RouteBuffers, Routes, token_routes
from moelora_kernels.ops.score_head.kernel import join_tiles, score_tile, score_tiles_bulk

MAX_TOP_K = 64
_SCRATCH_BYTES = 256 << 20
"""Partial results of one launch; more rows are taken in several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Blocks of the head. One for all row counts: a row's sums then never depend on how many others there are."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int
    flatten: bool = True


_SIXTEEN_BITS = HeadConfig(block_m=128, block_n=256, block_k=64, warps=8, stages=3, group=8)
_SMALL = HeadConfig(block_m=32, block_n=64, block_k=32, warps=4, stages=2, group=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """fp32 and int64, `[N]` each: the target's log-probability (NaN without a target), the arg-max (lowest id on ties)
    and its log-probability, the log-sum-exp of the logits; `[N, k]` the k best, best first, ties in ascending id; id -1
    where fewer than k logits are above minus infinity."""

    target_logprob: torch.Tensor
    argmax_id: torch.Tensor
    argmax_logprob: torch.Tensor
    lse: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def score_rows(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    slots: DenseSlots | None = None,
    row_slot_N: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    top_k: int = 0,
    config: HeadConfig | None = None,
) -> RowScores:
    """Log-probabilities of `targets_N` under softmax(cap(scale · (W x + bias + B A x))), each row with its own slot.

    hidden_NH `[N, H]` (the rows already gathered) and weight_VH `[V, H]` in fp32, bf16 or fp16; targets_N int64 or
    int32, an id outside `[0, V)` means none. row_slot_N: int32 `[N]`, -1 for the base; needed with `slots`, whose
    factors must be finite, in the rows' dtype, or in any of the three under fp32 rows. logit_scale multiplies the
    logits, `softcap` c then turns them into c·tanh(logit / c). top_k is at most 64. Log-probabilities are in nats, all
    reductions fp32. A row's bits depend on the row alone. One whose log-sum-exp is NaN has arg-max 0 and top
    ids 0 … k-1. Runs outside graphs: it allocates its results and scratch.
    Raises `ConfigError` for what it cannot do.
    """
    N = hidden_NH.shape[0]
    V = weight_VH.shape[0]
    _check(hidden_NH, weight_VH, targets_N, slots, row_slot_N, softcap, top_k)
    device = hidden_NH.device
    # Triton's interpreter, on the CPU, spells products out and has no room for the large blocks.
    large = hidden_NH.dtype is not torch.float32 and device.type != "cpu"
    cfg = config or (_SIXTEEN_BITS if large else _SMALL)
    tiles_v = triton.cdiv(V, cfg.block_n)
    per_row = tiles_v * (12 + 8 * top_k)
    step = max(cfg.block_m, _SCRATCH_BYTES // per_row // cfg.block_m * cfg.block_m)
    logit_N = torch.full((N,), torch.nan, dtype=torch.float32, device=device)
    lse_N, best_N = torch.empty_like(logit_N), torch.empty_like(logit_N)
    best_id_N = torch.empty(N, dtype=torch.int32, device=device)
    top_NK = torch.empty(N, top_k, dtype=torch.float32, device=device)
    top_id_NK = torch.empty(N, top_k, dtype=torch.int64, device=device)
    for first in range(0, N, step):
        part = slice(first, min(first + step, N))
        x, n = hidden_NH[part], min(step, N - first)
        y, routes = None, None
        if slots is not None and row_slot_N is not None:
            routes = _row_routes(row_slot_N[part], slots.a_LRI.shape[0], cfg.block_m)
            y = _shrink_y(x, slots, routes, cfg)
        top, top_id = _score(
            x, weight_VH, targets_N[part].contiguous(), bias_V, slots, y, routes, logit_scale, softcap, top_k, cfg,
            logit_N[part], lse_N[part], best_N[part], best_id_N[part], n,
        )  # fmt: skip
        if top_k:
            # Tiles ascend and so do ids among equals, so a stable sort leaves ties in ascending order of id.
            ordered = top.view(n, -1).sort(dim=-1, descending=True, stable=True)
            top_NK[part] = ordered.values[:, :top_k]
            top_id_NK[part] = top_id.view(n, -1).gather(1, ordered.indices[:, :top_k])
    # NaN compares with nothing: a row that holds one has the first ids.
    no_best_N = lse_N.isnan()
    best_id_N.masked_fill_(no_best_N, 0)
    top_id_NK = torch.where(no_best_N[:, None], torch.arange(top_k, device=device), top_id_NK)
    return RowScores(
        target_logprob=logit_N - lse_N,
        argmax_id=best_id_N.long(),
        argmax_logprob=best_N - lse_N,
        lse=lse_N,
        top_ids=top_id_NK,
        top_logprobs=top_NK - lse_N[:, None],
    )


def _row_routes(row_slot_N: torch.Tensor, num_slots: int, block_m: int) -> Routes:
    n = row_slot_N.shape[0]
    buffers = RouteBuffers(
        max_tokens=n, top_k=1, num_experts=1, num_slots=num_slots, block_m=block_m, device=row_slot_N.device
    )
    return token_routes(row_slot_N, block_m=block_m, buffers=buffers)


def _shrink_y(x: torch.Tensor, slots: DenseSlots, routes: Routes, cfg: HeadConfig) -> torch.Tensor:
    """A x per row, `[N, RP]`: the head as an experts layer of one expert."""
    y = torch.empty(x.shape[0], padded_rank(slots.a_LRI.shape[1]), dtype=x.dtype, device=x.device)
    one = ExpertSlots(a_LERI=slots.a_LRI[:, None], b_LEOR=slots.b_LOR[:, None], ranks_L=slots.ranks_L)
    blocks = ProductConfig(block_n=min(64, cfg.block_n), block_k=cfg.block_k, warps=4, stages=cfg.stages)
    shrink_rows(x, one, y, routes, blocks, gather=True, by_token=True, block_m=cfg.block_m)
    return y


def _score(
    x: torch.Tensor,
    weight_VH: torch.Tensor,
    targets: torch.Tensor,
    bias_V: torch.Tensor | None,
    slots: DenseSlots | None,
    y: torch.Tensor | None,
    routes: Routes | None,
    logit_scale: float,
    softcap: float | None,
    top_k: int,
    cfg: HeadConfig,
    logit: torch.Tensor,
    lse: torch.Tensor,
    best: torch.Tensor,
    best_id: torch.Tensor,
    n: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fills `logit`, `lse`, `best`, `best_id`; returns the candidates for the k best, `[n, C·k]` in order of id."""
    V, H = weight_VH.shape
    tiles_v, tiles_n = triton.cdiv(V, cfg.block_n), triton.cdiv(n, cfg.block_m)
    part_max = torch.empty(n, tiles_v, dtype=torch.float32, device=x.device)
    part_sum = torch.empty_like(part_max)
    part_arg = torch.empty(n, tiles_v, dtype=torch.int32, device=x.device)
    top = torch.empty(n, tiles_v, top_k, dtype=torch.float32, device=x.device)
    top_id = torch.empty(n, tiles_v, top_k, dtype=torch.int32, device=x.device)
    unread = best_id
    results = (logit, part_max, part_sum, part_arg, top, top_id)
    scales = (float(logit_scale), 1.0 if softcap is None else float(softcap))
    constants = {
        "HAS_BIAS": bias_V is not None,
        "HAS_SOFTCAP": softcap is not None,
        "TOP_K": top_k,
        "BM": cfg.block_m,
        "BN": cfg.block_n,
        "BK": cfg.block_k,
        "GROUP": cfg.group,
        "num_warps": cfg.warps,
        "num_stages": cfg.stages,
    }
    bias = unread if bias_V is None else bias_V
    if routes is None and x.dtype is not torch.float32 and bulk_copies(x, weight_VH):
        score_tiles_bulk[(programs(x.device, tiles_v * tiles_n, 1),)](
            descriptor(x, cfg.block_m, cfg.block_k), descriptor(weight_VH, cfg.block_n, cfg.block_k),
            bias, targets, *results, n, tiles_n, V, H, *scales, FLATTEN=cfg.flatten, **constants,
        )  # fmt: skip
    else:
        rank = 16 if slots is None else slots.b_LOR.shape[2]
        cap = 1 if routes is None else routes.tile_slots_MC.shape[1]
        lora = (unread,) * 9 if routes is None or slots is None or y is None else (
            y, slots.b_LOR, slots.ranks_L, routes.tile_pairs_MB, routes.row_slot_P, routes.tile_first_M,
            routes.tile_rows_M, routes.tile_slots_MC, routes.tile_num_slots_M,
        )  # fmt: skip
        score_tile[(tiles_v * tiles_n,)](
            x, weight_VH, bias, targets, *lora, *results, n, tiles_n, V, H, x.stride(0), weight_VH.stride(0),
            0 if slots is None else slots.b_LOR.stride(0), *scales,
            HAS_LORA=routes is not None, R=rank, RP=padded_rank(rank), SLOT_CAP=cap,
            BR=max(16, min(64, triton.next_power_of_2(cap * padded_rank(rank)))), EVEN_K=H % cfg.block_k == 0,
            PRECISION="ieee" if x.dtype is torch.float32 else "tf32", **constants,
        )  # fmt: skip
    block = min(1024, triton.next_power_of_2(tiles_v))
    join_tiles[(n,)](part_max, part_sum, part_arg, lse, best, best_id, tiles_v, BLOCK=block, num_warps=4)
    return top, top_id


def _check(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    slots: DenseSlots | None,
    row_slot_N: torch.Tensor | None,
    softcap: float | None,
    top_k: int,
) -> None:
    if hidden_NH.dtype not in (torch.float32, torch.bfloat16, torch.float16) or weight_VH.dtype is not hidden_NH.dtype:
        raise ConfigError(
            f"the scoring head takes rows and lm_head in one of float32, bfloat16, float16, got {hidden_NH.dtype} and "
            f"{weight_VH.dtype}; use --backend torch"
        )
    if hidden_NH.shape[1] != weight_VH.shape[1] or targets_N.shape != hidden_NH.shape[:1]:
        raise ConfigError(
            f"shapes disagree: rows {tuple(hidden_NH.shape)}, lm_head {tuple(weight_VH.shape)}, "
            f"targets {tuple(targets_N.shape)}"
        )
    if hidden_NH.stride(1) != 1 or weight_VH.stride(1) != 1:
        raise ConfigError("rows and lm_head must be contiguous along the hidden dimension; call .contiguous() first")
    if not 0 <= top_k <= MAX_TOP_K or top_k > weight_VH.shape[0]:
        raise ConfigError(f"top_k must lie between 0 and {min(MAX_TOP_K, weight_VH.shape[0])}, got {top_k}")
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"softcap must be positive, got {softcap}")
    if slots is not None:
        if row_slot_N is None or row_slot_N.dtype is not torch.int32 or row_slot_N.shape != targets_N.shape:
            raise ConfigError("LoRA on lm_head needs row_slot_N, int32, one entry per row")
        for name, factor in (("A", slots.a_LRI), ("B", slots.b_LOR)):
            if not factor.is_contiguous():
                raise ConfigError("LoRA factors of lm_head must be contiguous")
            if factor.dtype is not hidden_NH.dtype and hidden_NH.dtype is not torch.float32:
                raise ConfigError(
                    f"{name} of lm_head is {factor.dtype}, its rows are {hidden_NH.dtype}; use a bank in their dtype"
                )


__all__ = ["MAX_TOP_K", "HeadConfig", "RowScores", "score_rows"]
