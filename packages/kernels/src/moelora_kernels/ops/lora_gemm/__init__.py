"""y = x Wᵀ (+ bias) + B A x for several projections of one input: LoRA rides in the accumulator of the base.

Adding LoRA to a finished output reads and writes it once more, which alone costs 20 % of the projections of a 2,048
wide model. Here only A x is a launch of its own; its products with B are a few more steps of K. Sums are those of
`invariant_gemm`, so bits are the row's own here too. `naive.py` is the truth, `kernel.py` the Triton code for weights
that lie behind one another, `blocks.py` the metadata, `few_rows.py` the way of batches that are too small for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moelora.backends.base import DenseSlots
from moelora_kernels.launch import programs, require
from moelora_kernels.ops.dense_lora import MAX_FUSED, RowTiles, fill_four, padded_rank, shrink
from moelora_kernels.ops.invariant_gemm import (
    LIST_ROWS,
    GemmConfig,
    LoraOperands,
    bulk_copies,
    descriptor,
    invariant_gemm,
    pick_config,
    rank_block,
)
from moelora_kernels.ops.lora_gemm.blocks import SlotBlocks, most_entries, plan_blocks
from moelora_kernels.ops.lora_gemm.few_rows import joined, joined_projections
from moelora_kernels.ops.lora_gemm.kernel import projections_kernel
from moelora_kernels.ops.lora_gemm.naive import naive_lora_gemm
from moelora_kernels.overlap import overlapping

__all__ = [
    "LIST_ROWS",
    "SlotBlocks",
    "joined",
    "joined_projections",
    "lora_gemm",
    "most_entries",
    "naive_lora_gemm",
    "plan_blocks",
]


def lora_gemm(
    x_TK: torch.Tensor,
    weights_NK: Sequence[torch.Tensor],
    biases_N: Sequence[torch.Tensor | None],
    slots: Sequence[DenseSlots | None],
    rows: RowTiles,
    blocks: SlotBlocks,
    *,
    scratch: torch.Tensor | None = None,
    config: GemmConfig | None = None,
) -> list[torch.Tensor]:
    """Returns x Wᵀ (+ bias) + B A x for several projections of one input; `slots` None: the base product alone.

    x `[T, K]`, every W `[N_i, K]`, bias `[N_i]` or None, factors as in `DenseSlots`: one dtype. `rows` and `blocks` are
    the metadata of the same batch. `scratch` as for `dense_lora`. A x is rounded to x's dtype; everything else is
    accumulated in fp32 and rounded once. Factors must be finite: a slot's rows pass through the product of every slot
    of their 128 rows, times zero. Weights that lie behind one another in memory, as `joined` finds, take one launch.
    Raises `ConfigError` for what has no kernel.
    """
    outs: list[torch.Tensor | None] = [None] * len(weights_NK)
    adapted = [i for i, one in enumerate(slots) if one is not None and one.a_LRI.shape[1] > 0 and x_TK.shape[0] > 0]
    for start in range(0, len(adapted), MAX_FUSED):
        some = adapted[start : start + MAX_FUSED]
        theirs = [one for i in some if (one := slots[i]) is not None]
        for one in theirs:
            require(
                one.b_LOR.dtype == x_TK.dtype,
                f"lora_gemm: B is {one.b_LOR.dtype}, x {x_TK.dtype}",
                "a bank in the dtype of the activations, or dense_lora",
            )
        y_TR = shrink(x_TK, theirs, rows, scratch=scratch, by_token=True)
        weights, biases = [weights_NK[i] for i in some], [biases_N[i] for i in some]
        made = _in_one_launch(x_TK, weights, biases, theirs, y_TR, blocks, config)
        for i, out in zip(some, made or _one_by_one(x_TK, weights, biases, theirs, y_TR, blocks, config), strict=True):
            outs[i] = out
    return [
        out if out is not None else invariant_gemm(x_TK, weight, bias, config=config)
        for out, weight, bias in zip(outs, weights_NK, biases_N, strict=True)
    ]


def _one_by_one(
    x_TK: torch.Tensor,
    weights_NK: Sequence[torch.Tensor],
    biases_N: Sequence[torch.Tensor | None],
    slots: Sequence[DenseSlots],
    y_TR: torch.Tensor,
    blocks: SlotBlocks,
    config: GemmConfig | None,
) -> list[torch.Tensor]:
    outs, end = [], 0
    for weight, bias, one in zip(weights_NK, biases_N, slots, strict=True):
        first, end = end, end + padded_rank(one.a_LRI.shape[1])
        lora = LoraOperands(
            y_TR[:, first:end], one.b_LOR, one.ranks_L, blocks.token_slot_T, blocks.first, blocks.slot, overlap=True
        )
        assert one.b_LOR.shape[1] == weight.shape[0]
        outs.append(invariant_gemm(x_TK, weight, bias, lora=lora, config=config))
    return outs


def _in_one_launch(
    x_TK: torch.Tensor,
    weights_NK: Sequence[torch.Tensor],
    biases_N: Sequence[torch.Tensor | None],
    slots: Sequence[DenseSlots],
    y_TR: torch.Tensor,
    blocks: SlotBlocks,
    config: GemmConfig | None,
) -> list[torch.Tensor] | None:
    """All projections over one grid; None if weights lie apart, banks differ in rank, or bulk copies do not reach."""
    weight_NK, bias_N = joined(weights_NK), joined(biases_N)
    ranks = {one.b_LOR.shape[2] for one in slots}
    if weight_NK is None or (bias_N is None and any(bias is not None for bias in biases_N)) or len(ranks) > 1:
        return None
    (rank,) = ranks
    T, K = x_TK.shape
    outs = [torch.empty((T, weight.shape[0]), dtype=x_TK.dtype, device=x_TK.device) for weight in weights_NK]
    config = config or pick_config(
        x_TK.dtype, T, weight_NK.shape[0], bulk_copies=bulk_copies(x_TK, weight_NK, *outs), most_rows=LIST_ROWS
    )
    if not config.bulk:
        return None
    tiles = -(-T // config.block_m) * sum(-(-out.shape[1] // config.block_n) for out in outs)
    block_r = rank_block(rank)
    projections_kernel[(programs(x_TK.device, tiles, 1),)](
        descriptor(x_TK, config.block_m, config.block_k), descriptor(weight_NK, config.block_n, config.block_k),
        weight_NK if bias_N is None else bias_N,
        *fill_four([descriptor(out, config.block_m, config.block_n) for out in outs]),
        T, K, *fill_four([out.shape[1] for out in outs]),
        y_TR, *fill_four([one.b_LOR for one in slots]), *fill_four([one.ranks_L for one in slots]),
        rank, padded_rank(rank), y_TR.stride(0),
        blocks.token_slot_T, blocks.first, blocks.slot,
        NUM=len(outs), BIAS=bias_N is not None, ONE_BLOCK=rank <= block_r, LIST_ROWS=LIST_ROWS,
        GROUP_M=config.group_m, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        BLOCK_R=block_r, num_warps=config.warps, num_stages=config.stages, **overlapping(x_TK.device, x_TK.shape[0]),
    )  # fmt: skip
    return outs
