"""Packed variable-length causal attention on CUDA: torch's kernel, FlashAttention 4 or our own, behind one function.

Legend: T tokens, S sequence slots, H query heads, G key and value heads, D head width, Dv value width.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import triton

from moelora.errors import ConfigError, choose_from
from moelora_kernels.ops.attention.flash4 import flash4_attention, flash4_refusal
from moelora_kernels.ops.attention.kernel import attend, end_tiles, find_tiles

BACKENDS = ("auto", "torch", "triton", "fa4")
MIN_WIDTH, MAX_WIDTH = 16, 256
_LONG = 2048
"""Sequences from here on are long: their many keys are better read for twice as many queries at once."""
_SPARE_TILES = 32
"""Tiles beyond a full batch's that get programs of their own; batches with more tiles make each program do several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Blocks of the Triton kernel: queries and keys of a step. `split`, `registers`: see `attend`, and per thread.

    Only `block_n`, which does not depend on the batch, is part of a row's bits: keys behind a row add exact zeros, and
    64 and 128 queries take the same matrix instruction.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    split: bool = False
    registers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiles:
    """Tiles of queries of a batch, int32 on the device.

    first_M: their first rows. begin_M, end_M: where their sequences begin (-1: the tile is padding) and end. live_1:
    how many are in use.
    """

    first_M: torch.Tensor
    begin_M: torch.Tensor
    end_M: torch.Tensor
    live_1: torch.Tensor
    config: AttentionConfig


def pick_attention_config(
    dtype: torch.dtype, head_dim: int, value_dim: int, *, longest: int | None = None
) -> AttentionConfig:
    """The configuration for these widths. longest: tokens of the longest sequence, None where a graph must not know.

    One H200, 32/4 heads of 128, ms with 64 queries a tile, and with 128 and split: 64 × 128 tokens 0.091 and 0.135,
    16 × 512 0.147 and 0.177, 4 × 2,048 0.374 and 0.375, 4 × 4,096 1.35 and 1.28, 1 × 16,384 5.49 and 4.75. 64/8 heads
    of 64 with a window of 128 and sinks, 16 × 512: 0.121; with registers as the compiler likes them, which leaves room
    for three programs instead of four, 0.129; with 128 queries 0.165.
    """
    width = max(head_dim, value_dim)
    if dtype is torch.float32:
        return AttentionConfig(
            block_m=32 if width <= 128 else 16, block_n=32 if width <= 128 else 16, warps=4, stages=1
        )
    if width <= 64:
        return AttentionConfig(block_m=64, block_n=64, warps=4, stages=3, registers=128)
    if width <= 128:
        if longest is None or longest < _LONG:
            return AttentionConfig(block_m=64, block_n=64, warps=4, stages=3)
        return AttentionConfig(block_m=128, block_n=64, warps=8, stages=3, split=True)
    return AttentionConfig(block_m=128, block_n=64, warps=8, stages=2)


def attention_tiles(cu_seqlens_S1: torch.Tensor, tokens: int, config: AttentionConfig) -> AttentionTiles:
    """Cuts a batch into tiles on the device, fixed in number: ceil(T/BM) + S + 1. cu_seqlens_S1: int32, from 0.

    Empty sequences at the last boundary are unused slots; the rows from there to `tokens` are padding.
    """
    S = cu_seqlens_S1.shape[0] - 1
    tiles = triton.cdiv(tokens, config.block_m) + S + 1
    sizes = [S + 1, tiles, tiles, tiles]
    ends, first, begin, end = torch.empty(sum(sizes), dtype=torch.int32, device=cu_seqlens_S1.device).split(sizes)
    end_tiles[(1,)](cu_seqlens_S1, ends, tokens, S, BM=config.block_m, BLOCK=min(1024, triton.next_power_of_2(S + 1)))
    find_tiles[(tiles,)](
        cu_seqlens_S1, ends, first, begin, end, S, STEPS=(S + 1).bit_length() + 1, BM=config.block_m, num_warps=1
    )
    return AttentionTiles(first_M=first, begin_M=begin, end_M=end, live_1=ends[S:], config=config)


def varlen_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
    max_seqlen: int,
    *,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
    softcap: float | None = None,
    backend: str = "auto",
    tiles: AttentionTiles | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence over itself: `[T, H, Dv]`, contiguous.

    q_THD `[T, H, D]`, k_TGD `[T, G, D]`, v_TGD `[T, G, Dv]` in one of fp32, bf16, fp16, H a multiple of G, widths up to
    256. cu_seqlens_S1: int32 on the device, ascending from 0; its last entry may lie before T, the rows behind it are
    padding and become zeros. max_seqlen: no sequence is longer. window: a query sees itself and the window - 1 keys
    before it. sinks_H: a logit per head that joins the softmax without a value. softcap c turns scores into
    c·tanh(score / c). `tiles`: `attention_tiles` of this batch, made once for all layers that share its configuration.

    Backend "torch" is `torch.nn.attention.varlen` (16 bits, D = Dv, no softcap; its grid is S × max_seqlen), "triton"
    does all, on a grid that follows tokens, and "fa4" is FlashAttention 4 (16 bits). All capture and none synchronises.
    "auto" is triton: on one H200 (32/4 heads of 128, bf16) it took 0.18 ms for 16 × 512 tokens and 4.9 ms for
    1 × 16,384, torch's 0.34 and 6.6. Where fa4 is the faster, `moelora_kernels.attention` finds out.
    Raises `ConfigError`, with the reason and what to use instead.
    """
    _check(q_THD, k_TGD, v_TGD, cu_seqlens_S1, window, sinks_H, softcap)
    assert scale > 0, f"scale is {scale}"
    if backend not in BACKENDS:
        raise ConfigError(choose_from("attention backend", backend, BACKENDS))
    refusal = torch_refusal(q_THD, v_TGD, softcap)
    if backend == "torch" and refusal is not None:
        raise ConfigError(f"torch's varlen attention cannot run this: {refusal}; use the triton attention backend")
    if backend == "fa4":
        refusal = flash4_refusal(q_THD.device, q_THD.dtype, q_THD.shape[2], v_TGD.shape[2])
        if refusal is not None:
            raise ConfigError(f"FlashAttention 4 cannot run this: {refusal}; use the triton attention backend")
    if q_THD.shape[0] == 0:
        return q_THD.new_empty(0, q_THD.shape[1], v_TGD.shape[2])
    if backend == "torch":
        return _torch_attention(q_THD, k_TGD, v_TGD, cu_seqlens_S1, max_seqlen, scale, window, sinks_H)
    if backend == "fa4":
        return flash4_attention(q_THD, k_TGD, v_TGD, cu_seqlens_S1, max_seqlen, scale, window, sinks_H, softcap)
    return _triton_attention(q_THD, k_TGD, v_TGD, cu_seqlens_S1, scale, window, sinks_H, softcap, tiles)


def torch_refusal(q_THD: torch.Tensor, v_TGD: torch.Tensor, softcap: float | None) -> str | None:
    """Why torch's kernel cannot do this, or None."""
    if q_THD.device.type != "cuda":
        return f"it needs CUDA, the tensors are on {q_THD.device.type}"
    if q_THD.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16, got {q_THD.dtype}"
    if q_THD.shape[2] != v_TGD.shape[2] or q_THD.shape[2] % 8:
        return f"it needs equal head widths that divide by 8, got {q_THD.shape[2]} and {v_TGD.shape[2]}"
    if softcap is not None:
        return "it has no soft-capping"
    return None


def _torch_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cu_S1: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """The one place that calls `varlen_attn`, whose signature differs between torch releases."""
    from torch.nn.attention import varlen

    known = inspect.signature(varlen.varlen_attn).parameters
    options: dict[str, Any] = {"scale": scale}
    left = -1 if window is None else window - 1
    if "window_size" in known:
        options["window_size"] = (left, 0)
    elif left < 0:
        options["is_causal"] = True
    else:
        raise ConfigError("this torch's varlen attention has no window; use the triton attention backend")
    if "enable_gqa" in known and q_THD.shape[1] != k_TGD.shape[1]:
        options["enable_gqa"] = True
    if sinks_H is not None:
        options["return_aux"] = varlen.AuxRequest(lse=True)
    made = varlen.varlen_attn(q_THD, k_TGD, v_TGD, cu_S1, cu_S1, max_seqlen, max_seqlen, **options)
    padding_T = torch.arange(q_THD.shape[0], device=q_THD.device) >= cu_S1[-1]
    if isinstance(made, torch.Tensor):
        return made.masked_fill_(padding_T[:, None, None], 0)
    assert sinks_H is not None, "only sinks ask for the log-sum-exp"
    out, lse = made
    lse_TH = lse.transpose(0, 1) if lse.shape[0] == q_THD.shape[1] and lse.shape[1] == q_THD.shape[0] else lse
    share_TH = torch.sigmoid(lse_TH - sinks_H.float())
    return (out * share_TH[:, :, None]).to(out.dtype).masked_fill_(padding_T[:, None, None], 0)


def _triton_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cu_S1: torch.Tensor,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
    softcap: float | None,
    tiles: AttentionTiles | None,
) -> torch.Tensor:
    T, H, D = q_THD.shape
    Dv = v_TGD.shape[2]
    q_THD, k_TGD, v_TGD = (t if t.stride(2) == 1 else t.contiguous() for t in (q_THD, k_TGD, v_TGD))
    if tiles is None:
        tiles = attention_tiles(cu_S1, T, pick_attention_config(q_THD.dtype, D, Dv))
    cfg = tiles.config
    # The width as two powers of two: 192 is 128 + 64, not 256. One that is a single power has no second part.
    d0 = 1 << (D.bit_length() - 1)
    d1 = max(16, triton.next_power_of_2(D - d0)) if d0 < D else 0
    out = torch.empty(T, H, Dv, dtype=q_THD.dtype, device=q_THD.device)
    programs = min(tiles.first_M.shape[0], triton.cdiv(T, cfg.block_m) + _SPARE_TILES)
    attend[(programs * H,)](
        q_THD,
        k_TGD,
        v_TGD,
        cu_S1 if sinks_H is None else sinks_H,
        out,
        tiles.first_M,
        tiles.begin_M,
        tiles.end_M,
        tiles.live_1,
        T,
        *(s for t in (q_THD, k_TGD, v_TGD, out) for s in t.stride()[:2]),
        float(scale),
        1.0 if softcap is None else float(softcap),
        0 if window is None else window,
        HEADS=H,
        REPEAT=H // k_TGD.shape[1],
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks_H is not None,
        HAS_SOFTCAP=softcap is not None,
        D=D,
        D0=d0,
        D1=d1,
        DV=Dv,
        BV=max(16, triton.next_power_of_2(Dv)),
        PRECISION="ieee" if q_THD.dtype is torch.float32 else "tf32",
        BM=cfg.block_m,
        BN=cfg.block_n,
        SPLIT=cfg.split,
        num_warps=cfg.warps,
        num_stages=cfg.stages,
        maxnreg=cfg.registers,
    )
    return out


def _check(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cu_S1: torch.Tensor,
    window: int | None,
    sinks_H: torch.Tensor | None,
    softcap: float | None,
) -> None:
    reference = "use --backend torch"
    T, H, D = q_THD.shape
    if q_THD.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"attention takes float32, bfloat16 or float16, got {q_THD.dtype}; {reference}")
    if k_TGD.dtype is not q_THD.dtype or v_TGD.dtype is not q_THD.dtype:
        raise ConfigError(f"query, key and value differ in dtype: {q_THD.dtype}, {k_TGD.dtype}, {v_TGD.dtype}")
    if k_TGD.shape[0] != T or v_TGD.shape[:2] != k_TGD.shape[:2] or k_TGD.shape[2] != D or H % k_TGD.shape[1]:
        raise ConfigError(
            f"shapes disagree: query {tuple(q_THD.shape)}, key {tuple(k_TGD.shape)}, value {tuple(v_TGD.shape)}"
        )
    if not MIN_WIDTH <= D <= MAX_WIDTH or not 1 <= v_TGD.shape[2] <= MAX_WIDTH:
        raise ConfigError(
            f"head widths must lie between {MIN_WIDTH} and {MAX_WIDTH}, got {D} and {v_TGD.shape[2]}; {reference}"
        )
    if cu_S1.dtype is not torch.int32 or cu_S1.ndim != 1 or cu_S1.shape[0] < 2:
        raise ConfigError(
            f"cu_seqlens must be int32 [S + 1] with S of at least 1, got {cu_S1.dtype} {tuple(cu_S1.shape)}"
        )
    if window is not None and window < 1:
        raise ConfigError(f"window must be at least 1, got {window}")
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"softcap must be positive, got {softcap}")
    if sinks_H is not None and sinks_H.shape != (H,):
        raise ConfigError(f"sinks must have one entry per query head ({H}), got {tuple(sinks_H.shape)}")


__all__ = [
    "BACKENDS",
    "MAX_WIDTH",
    "MIN_WIDTH",
    "AttentionConfig",
    "AttentionTiles",
    "attention_tiles",
    "flash4_attention",
    "flash4_refusal",
    "pick_attention_config",
    "torch_refusal",
    "varlen_attention",
]
