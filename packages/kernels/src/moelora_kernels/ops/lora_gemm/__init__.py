"""y = x Wᵀ (+ bias) + B A x in one product per projection: LoRA rides in the accumulator of the base.

Adding LoRA to a finished output reads and writes it once more, which alone costs 20 % of the projections of a 2,048
wide model. Here only A x is a launch of its own; its products with B are a few more steps of K. The kernel is that of
`invariant_gemm`, so bits are the row's own here too. `naive.py` is the truth, `blocks.py` the metadata.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moelora.backends.base import DenseSlots
from moelora_kernels.launch import require
from moelora_kernels.ops.dense_lora import MAX_FUSED, RowTiles, padded_rank, shrink
from moelora_kernels.ops.invariant_gemm import LIST_ROWS, GemmConfig, LoraOperands, invariant_gemm
from moelora_kernels.ops.lora_gemm.blocks import SlotBlocks, most_entries, plan_blocks
from moelora_kernels.ops.lora_gemm.naive import naive_lora_gemm

__all__ = ["LIST_ROWS", "SlotBlocks", "lora_gemm", "most_entries", "naive_lora_gemm", "plan_blocks"]


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
    of their 128 rows, times zero. Raises `ConfigError` for what has no kernel.
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
        end = 0
        for i, one in zip(some, theirs, strict=True):
            first, end = end, end + padded_rank(one.a_LRI.shape[1])
            lora = LoraOperands(
                y_TR[:, first:end], one.b_LOR, one.ranks_L, blocks.token_slot_T, blocks.first, blocks.slot
            )
            assert one.b_LOR.shape[1] == weights_NK[i].shape[0]
            outs[i] = invariant_gemm(x_TK, weights_NK[i], biases_N[i], lora=lora, config=config)
    return [
        out if out is not None else invariant_gemm(x_TK, weight, bias, config=config)
        for out, weight, bias in zip(outs, weights_NK, biases_N, strict=True)
    ]
