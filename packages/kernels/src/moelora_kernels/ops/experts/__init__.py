"""The routed experts with LoRA: one function, from token rows to token rows.

Legend: T tokens, K experts per token, E experts, L adapter slots, R rank, H hidden, I expert width, P pairs (= T·K).
Order of the launches: routes, A x of the first product, the first product with B and the activation, A h, the second
product with B, the sum over K. No delta of full width is ever written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moelora.backends.base import ExpertSlots, ExpertsWeights
from moelora.errors import ConfigError
from moelora.types import Phase
from moelora_kernels.ops.experts.buffers import MoeBuffers, padded_rank
from moelora_kernels.ops.experts.config import WIDE_BLOCKS, MoeConfig, ProductConfig
from moelora_kernels.ops.experts.kernel import grouped_product
from moelora_kernels.ops.experts.shrink_combine import combine, shrink
from moelora_kernels.ops.experts.table import pick_config
from moelora_kernels.ops.routes import Routes, build_routes, order_tokens, token_routes

_ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "relu2": 4, "gpt_oss": 5}
_MAX_COLUMN_BLOCKS = 8
"""Programs per tile of the shrink; each walks on through further columns where a tile meets many slots."""


def experts_lora(
    x_TH: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    base: ExpertsWeights,
    up_slots: ExpertSlots | None,
    down_slots: ExpertSlots | None,
    token_slot_T: torch.Tensor,
    *,
    buffers: MoeBuffers,
    has_lora: bool,
    phase: Phase | None = None,
    num_live: torch.Tensor | None = None,
    order_T: torch.Tensor | None = None,
    config: MoeConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Σ_k w_k · (W₂h + B₂A₂h), h = act(W₁x + B₁A₁x), per token with its own slot; the contract of `Backend.experts`.

    x_TH `[T, H]` in fp32, bf16 or fp16, expert_ids_TK int32 or int64 `[T, K]`, weights_TK `[T, K]` in any float dtype,
    token_slot_T int32 `[T]`. Products accumulate in fp32; the weights and the sum over K are fp32. LoRA factors must be
    finite, and zero beyond a slot's rank. num_live: int32 `[1]` on the device; tokens from there on get no expert and a
    row of zeros. order_T: `order_tokens` of this batch, to be made once for all layers. `phase`: checked against
    `buffers`. Returns `[T, H]` in x's dtype, in `out` if given. Capturable: no host synchronisation,
    launches depend on shapes alone. Raises `ConfigError` for what it cannot do, `PhaseError` for the other phase's
    buffers.
    """
    if phase is not None:
        buffers.check_phase(phase)
    _check(x_TH, expert_ids_TK, weights_TK, base, (up_slots, down_slots), token_slot_T, buffers)
    T, K = expert_ids_TK.shape
    E, P = base.num_experts, T * K
    width = base.down.shape[2] if base.transposed else base.down.shape[1]
    out_TH = torch.empty(T, width, dtype=x_TH.dtype, device=x_TH.device) if out is None else out
    if T == 0:
        return out_TH
    if K == 0:
        return out_TH.zero_()
    x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
    expert_ids_TK = expert_ids_TK.contiguous()
    if not has_lora or buffers.slots == 0:
        up_slots = down_slots = None
    lora = up_slots is not None or down_slots is not None
    cfg = config or pick_config(base, tokens=T, top_k=K)
    if lora and order_T is None:
        order_T = order_tokens(token_slot_T, buffers=buffers.routes, num_live=num_live)
    routes = build_routes(
        expert_ids_TK,
        token_slot_T,
        num_experts=E,
        block_m=cfg.block_m,
        has_lora=lora,
        buffers=buffers.routes,
        num_live=num_live,
        order_T=order_T,
    )

    # First product and activation.
    inter = base.down.shape[1] if base.transposed else base.down.shape[2]
    up_out = base.up.shape[2] if base.transposed else base.up.shape[1]
    y_up, wide_up, shared = None, None, False
    if up_slots is not None:
        shared = up_slots.a_LERI.shape[1] == 1 and E > 1
        y_up = buffers.view("y", T if shared else P, padded_rank(up_slots.a_LERI.shape[2]))
        by = routes
        if shared:
            by = token_routes(token_slot_T, block_m=cfg.block_m, buffers=buffers.token_routes, num_live=num_live)
        wide_up = None if shared else _wide(base.up, base, up_slots, cfg.up, buffers, P)
        shrink_rows(
            x_TH,
            up_slots,
            y_up,
            by,
            cfg.shrink,
            wide=wide_up,
            wide_block=cfg.up.block_k,
            gather=True,
            by_token=shared,
            block_m=cfg.block_m,
        )
    halves = _halves(base)
    fused = halves is not None
    h_PI = buffers.view("h", P, inter) if fused else torch.empty(P, up_out, dtype=x_TH.dtype, device=x_TH.device)
    _product(
        x_TH,
        base.up,
        base.up_bias,
        y_up,
        wide_up,
        up_slots,
        h_PI,
        routes,
        cfg.up,
        cfg.block_m,
        base,
        gather=True,
        by_token=shared,
        halves=halves or 0,
        act=_ACTIVATIONS[str(base.activation_name)] if fused else 0,
    )
    if not fused:
        h_PI = base.activation(h_PI).contiguous()

    # Second product, one row per pair, and the sum over K.
    y_down, wide_down = None, None
    if down_slots is not None:
        y_down = buffers.view("y", P, padded_rank(down_slots.a_LERI.shape[2]))
        wide_down = _wide(base.down, base, down_slots, cfg.down, buffers, P)
        shrink_rows(
            h_PI,
            down_slots,
            y_down,
            routes,
            cfg.shrink,
            wide=wide_down,
            wide_block=cfg.down.block_k,
            gather=False,
            by_token=False,
            block_m=cfg.block_m,
        )
    pairs_PH = buffers.view("pairs", P, width)
    _product(
        h_PI, base.down, base.down_bias, y_down, wide_down, down_slots, pairs_PH, routes, cfg.down, cfg.block_m, base
    )
    if base.post_norm is not None:
        pairs_PH = base.post_norm(pairs_PH)
    block = min(1024, triton.next_power_of_2(width))
    combine[(T, triton.cdiv(width, block))](
        pairs_PH,
        expert_ids_TK,
        weights_TK,
        routes.tile_rows_M if num_live is None else num_live,
        out_TH,
        T,
        E,
        width,
        pairs_PH.stride(0),
        out_TH.stride(0),
        weights_TK.stride(0),
        weights_TK.stride(1),
        HAS_LIVE=num_live is not None,
        K=K,
        BH=block,
        num_warps=4,
    )
    return out_TH


def _halves(base: ExpertsWeights) -> int | None:
    """How the first product's columns meet the activation inside its kernel; None: the callable runs on its output."""
    if base.activation_name not in _ACTIVATIONS:
        return None
    if base.activation_name == "gpt_oss":
        return 2 if base.gated and base.interleaved else None
    if not base.gated:
        return 0
    if base.interleaved:
        return 2
    # Columns of [E, in, out] are contiguous: taking gate and up in turn would break every load into single elements.
    return None if base.transposed else 1


def _wide(
    weight: torch.Tensor, base: ExpertsWeights, slots: ExpertSlots, cfg: ProductConfig, buffers: MoeBuffers, P: int
) -> torch.Tensor | None:
    """Where the first LoRA columns stand if they can be steps of the main loop: `[P, 1 or 2 · block_k]`, or None.

    They can if B's rows are stored like W's (contiguous along the depth), a step holds whole slots, and none is ragged.
    """
    rank, depth = slots.b_LEOR.shape[3], weight.shape[1] if base.transposed else weight.shape[2]
    if base.transposed or rank % 16 or cfg.block_k % rank or depth % cfg.block_k:
        return None
    blocks = min(WIDE_BLOCKS, triton.cdiv(buffers.slots * rank, cfg.block_k))
    return buffers.view("wide", P, blocks * cfg.block_k)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor | None,
    wide: torch.Tensor | None,
    slots: ExpertSlots | None,
    out: torch.Tensor,
    routes: Routes,
    cfg: ProductConfig,
    block_m: int,
    base: ExpertsWeights,
    *,
    gather: bool = False,
    by_token: bool = False,
    halves: int = 0,
    act: int = 0,
) -> None:
    """One grouped product: `gather` reads x by token and writes rows, else x is read by row and pairs are written."""
    s_n, s_k = (weight.stride(2), weight.stride(1)) if base.transposed else (weight.stride(1), weight.stride(2))
    n_cols, depth = (weight.shape[2], weight.shape[1]) if base.transposed else (weight.shape[1], weight.shape[2])
    unread = routes.tile_pairs_MB
    bank = None if slots is None else slots.b_LEOR
    rank, padded, s_b_l, s_b_e = 16, 16, 0, 0
    if slots is not None:
        rank = slots.b_LEOR.shape[3]
        padded = padded_rank(rank)
        s_b_l = slots.b_LEOR.stride(0)
        s_b_e = slots.b_LEOR.stride(1) if slots.b_LEOR.shape[1] > 1 else 0
    cap = routes.tile_slots_MC.shape[1]
    grid = (routes.num_tiles * triton.cdiv(n_cols, cfg.block_n),)
    grouped_product[grid](
        x,
        weight,
        unread if bias is None else bias,
        unread if y is None else y,
        unread if wide is None else wide,
        unread if bank is None else bank,
        unread if slots is None else slots.ranks_L,
        out,
        routes.row_slot_P,
        routes.tile_expert_M,
        routes.tile_first_M,
        routes.tile_rows_M,
        routes.tile_pairs_MB,
        routes.tile_slots_MC,
        routes.tile_num_slots_M,
        routes.num_tiles,
        routes.top_k,
        n_cols,
        depth,
        n_cols // 2,
        x.stride(0),
        weight.stride(0),
        s_n,
        s_k,
        s_b_l,
        s_b_e,
        out.stride(0),
        float("inf") if base.limit is None else float(base.limit),
        1.702 if base.alpha is None else float(base.alpha),
        GATHER=gather,
        SCATTER=not gather,
        HALVES=halves,
        COLUMN_RUNS=base.transposed and n_cols % 16 == 0,
        ACT=act,
        HAS_BIAS=bias is not None,
        HAS_LORA=slots is not None,
        WIDE=0 if wide is None else wide.shape[1] // cfg.block_k,
        OFFSET=tl.int32 if max(t.numel() for t in (x, wide, bank) if t is not None) < 2**31 else tl.int64,
        Y_BY_TOKEN=by_token,
        R=rank,
        RP=padded,
        SLOT_CAP=cap,
        EVEN_K=depth % cfg.block_k == 0,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        BM=block_m,
        BN=cfg.block_n,
        BK=cfg.block_k,
        BR=max(16, min(64, triton.next_power_of_2(cap * padded))),
        GROUP=cfg.group,
        HALVE=block_m >= (32 if x.dtype is torch.float32 else 128),
        num_warps=cfg.warps,
        num_stages=cfg.stages,
    )


def shrink_rows(
    x: torch.Tensor,
    slots: ExpertSlots,
    y: torch.Tensor,
    routes: Routes,
    cfg: ProductConfig,
    *,
    wide: torch.Tensor | None = None,
    wide_block: int = 0,
    gather: bool,
    by_token: bool,
    block_m: int,
) -> None:
    """y = A x: by row, or by token where A is shared by all experts. `wide`: see `grouped_product`."""
    cap = routes.tile_slots_MC.shape[1]
    padded = y.shape[1]
    block_c = max(16, min(cfg.block_n, triton.next_power_of_2(cap * padded))) if wide is None else wide_block
    blocks = min(_MAX_COLUMN_BLOCKS, triton.cdiv(cap * padded, block_c))
    warps = cfg.warps
    if gather and block_m >= 128:
        # Gathered rows come out of L2. One H200, 8,192 tokens of Qwen3-30B-A3B, ms: one program a tile over 8 warps
        # 0.060, over 4 warps 0.067; rows in order, which come out of memory, 0.047 and 0.040.
        blocks, warps = 1, 2 * cfg.warps
    a_LERI = slots.a_LERI
    shrink[(routes.num_tiles * blocks,)](
        x,
        a_LERI,
        slots.ranks_L,
        y,
        y if wide is None else wide,
        routes.tile_expert_M,
        routes.tile_first_M,
        routes.tile_rows_M,
        routes.tile_pairs_MB,
        routes.tile_row_slots_MB,
        routes.tile_slots_MC,
        routes.tile_num_slots_M,
        routes.top_k,
        x.shape[1],
        x.stride(0),
        a_LERI.stride(0),
        a_LERI.stride(1) if a_LERI.shape[1] > 1 else 0,
        a_LERI.stride(2),
        blocks,
        GATHER=gather,
        Y_BY_TOKEN=by_token,
        WIDE=0 if wide is None else wide.shape[1] // block_c,
        R=a_LERI.shape[2],
        RP=padded,
        SLOT_CAP=cap,
        EVEN_K=x.shape[1] % cfg.block_k == 0,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        BM=block_m,
        BC=block_c,
        BK=cfg.block_k,
        num_warps=warps,
        num_stages=cfg.stages,
    )


def _check(
    x_TH: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    base: ExpertsWeights,
    slots: tuple[ExpertSlots | None, ExpertSlots | None],
    token_slot_T: torch.Tensor,
    buffers: MoeBuffers,
) -> None:
    """Refuses what the kernels cannot do, with the reason and what to use instead."""
    reference = "use --backend torch for this model"
    if x_TH.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"the experts' kernels take float32, bfloat16 or float16, got {x_TH.dtype}; {reference}")
    if buffers.dtype is not x_TH.dtype:
        raise ConfigError(f"expert scratch was made for {buffers.dtype}, the input is {x_TH.dtype}")
    for name, weight in (("up", base.up), ("down", base.down)):
        if weight.dtype is not x_TH.dtype:
            raise ConfigError(f"the experts' {name} weights are {weight.dtype}, the input {x_TH.dtype}; {reference}")
        if weight.stride(2) != 1 or weight[0].numel() >= 2**31:
            raise ConfigError(
                f"the experts' {name} weights must have contiguous rows and under 2³¹ elements each; {reference}"
            )
    depth = base.up.shape[1] if base.transposed else base.up.shape[2]
    if x_TH.shape[1] != depth:
        raise ConfigError(f"the input is {x_TH.shape[1]} wide, the experts' first weight takes {depth}")
    if expert_ids_TK.dtype not in (torch.int32, torch.int64) or token_slot_T.dtype is not torch.int32:
        raise ConfigError(
            f"expert ids must be int32 or int64 and slots int32, got {expert_ids_TK.dtype} and {token_slot_T.dtype}"
        )
    if weights_TK.shape != expert_ids_TK.shape or token_slot_T.shape[0] != x_TH.shape[0]:
        raise ConfigError(
            f"shapes disagree: ids {tuple(expert_ids_TK.shape)}, weights {tuple(weights_TK.shape)}, "
            f"slots {tuple(token_slot_T.shape)}, input {tuple(x_TH.shape)}"
        )
    for bank in slots:
        if bank is None:
            continue
        if bank.a_LERI.shape[0] > buffers.slots:
            raise ConfigError(f"the bank has {bank.a_LERI.shape[0]} slots, the scratch was sized for {buffers.slots}")
        if bank.a_LERI.shape[2] != bank.b_LEOR.shape[3]:
            raise ConfigError(f"A has rank {bank.a_LERI.shape[2]}, B has rank {bank.b_LEOR.shape[3]}")
        for factor in (bank.a_LERI, bank.b_LEOR):
            if factor.dtype is not x_TH.dtype or not factor.is_contiguous():
                raise ConfigError(f"LoRA factors must be contiguous and {x_TH.dtype}, got {factor.dtype}; {reference}")


__all__ = ["MoeBuffers", "MoeConfig", "ProductConfig", "experts_lora", "padded_rank", "pick_config", "shrink_rows"]
