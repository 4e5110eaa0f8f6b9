"""y = x Wᵀ (+ bias) with the same bits for a row whatever else is in the batch: what `--batch-invariant` stands on.

Library products choose their algorithm by the number of rows, and with it the order of their sums. `naive.py` is the
truth up to rounding, `kernel.py` the Triton code, `config.py` its block sizes. `ops/lora_gemm` adds LoRA inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from moelora_kernels.launch import (
    INT32_LIMIT,
    hopper_or_later,
    programs,
    require,
    require_device,
    require_dtype,
    require_rows,
)
from moelora_kernels.ops.invariant_gemm.config import GemmConfig, pick_config
from moelora_kernels.ops.invariant_gemm.kernel import pointer_gemm_kernel, tma_gemm_kernel
from moelora_kernels.ops.invariant_gemm.naive import naive_invariant_gemm
from moelora_kernels.overlap import overlapping

__all__ = [
    "LIST_ROWS",
    "GemmConfig",
    "LoraOperands",
    "bulk_copies",
    "descriptor",
    "invariant_gemm",
    "naive_invariant_gemm",
    "pick_config",
    "rank_block",
]

LIST_ROWS = 128
"""Rows of the blocks whose slots `LoraOperands` lists; no tile of a product with LoRA is taller."""


@dataclass(frozen=True, slots=True)
class LoraOperands:
    """The LoRA side of a product, for `ops/lora_gemm`. y_TR: A x by token, `[T, ≥ R]`, x's dtype, any row stride.

    b_LNR, ranks_L: as in `DenseSlots`. token_slot_T: int32. block_first, block_slot: int32, see `SlotBlocks`.
    overlap: y comes from the kernel in front, and nothing else does, so that the product may begin beside that one.
    """

    y_TR: torch.Tensor
    b_LNR: torch.Tensor
    ranks_L: torch.Tensor
    token_slot_T: torch.Tensor
    block_first: torch.Tensor
    block_slot: torch.Tensor
    overlap: bool = False


def invariant_gemm(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    out_MN: torch.Tensor | None = None,
    lora: LoraOperands | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Returns x Wᵀ (+ bias), `[M, N]`, in `out_MN` if given.

    x `[M, K]`, W `[N, K]`, bias `[N]`, out `[M, N]`: one dtype, rows contiguous, rows may lie apart. Products and sums
    are fp32 (bfloat16 and float16 products are exact in it, float32 products are IEEE, not tf32); LoRA and then the
    bias are added in fp32; one rounding at the end. Raises `ConfigError` for what has no kernel.
    """
    given = [t for t in (x_MK, w_NK, bias_N, out_MN) if t is not None]
    require_dtype("invariant_gemm", *given)
    require_device("invariant_gemm", *given)
    require_rows("invariant_gemm", "x", x_MK)
    require_rows("invariant_gemm", "W", w_NK)
    (rows, inner), width = x_MK.shape, w_NK.shape[0]
    assert w_NK.shape[1] == inner, f"x {tuple(x_MK.shape)}, W {tuple(w_NK.shape)}"
    assert bias_N is None or bias_N.shape == (width,)
    require(max(rows, width, inner) < INT32_LIMIT, f"invariant_gemm: {rows}×{inner}×{width}", "fewer rows at once")
    if out_MN is None:
        out_MN = torch.empty((rows, width), dtype=x_MK.dtype, device=x_MK.device)
    require_rows("invariant_gemm", "out", out_MN)
    assert out_MN.shape == (rows, width)
    if rows == 0 or width == 0:
        return out_MN
    config = config or pick_config(
        x_MK.dtype,
        rows,
        width,
        bulk_copies=bulk_copies(x_MK, w_NK, out_MN),
        most_rows=256 if lora is None else LIST_ROWS,
    )
    assert lora is None or config.block_m <= LIST_ROWS
    tiles = -(-rows // config.block_m) * -(-width // config.block_n)
    if config.bulk:
        tma_gemm_kernel[(programs(x_MK.device, tiles, 1),)](
            descriptor(x_MK, config.block_m, config.block_k), descriptor(w_NK, config.block_n, config.block_k),
            bias_N if bias_N is not None else w_NK, descriptor(out_MN, config.block_m, config.block_n),
            rows, width, inner, *_lora_arguments(lora, x_MK),
            BIAS=bias_N is not None, FLATTEN=config.flatten,
            **_lora_constants(lora, x_MK), **_block_constants(config),
        )  # fmt: skip
        return out_MN
    pointer_gemm_kernel[(tiles,)](
        x_MK, w_NK, bias_N if bias_N is not None else w_NK, out_MN,
        rows, width, inner, x_MK.stride(0), w_NK.stride(0), out_MN.stride(0), *_lora_arguments(lora, x_MK),
        BIAS=bias_N is not None, **_lora_constants(lora, x_MK), **_block_constants(config),
    )  # fmt: skip
    return out_MN


def bulk_copies(*matrices: torch.Tensor) -> bool:
    """Tensor descriptors want Hopper or later, and rows that start at multiples of 16 bytes."""
    return all(
        hopper_or_later(t.device) and t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0
        for t in matrices
    )


def descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Bulk copies of `[rows, columns]` blocks of a matrix."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def _lora_arguments(lora: LoraOperands | None, unused: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
    if lora is None:
        return (unused,) * 6 + (16, 16)
    return (
        lora.y_TR, lora.b_LNR, lora.ranks_L, lora.token_slot_T, lora.block_first, lora.block_slot,
        lora.b_LNR.shape[2], lora.y_TR.stride(0),
    )  # fmt: skip


def _lora_constants(lora: LoraOperands | None, x_MK: torch.Tensor) -> dict[str, bool | int]:
    rank = lora.b_LNR.shape[2] if lora is not None else 16
    block_r = rank_block(rank)
    overlap = lora is not None and lora.overlap
    start = overlapping(x_MK.device, x_MK.shape[0]) if overlap else {"OVERLAP": False}
    return {
        "LORA": lora is not None, "ONE_BLOCK": rank <= block_r, "LIST_ROWS": LIST_ROWS, "BLOCK_R": block_r, **start
    }  # fmt: skip


def rank_block(rank: int) -> int:
    """Ranks that one step of LoRA takes."""
    return 16 if rank <= 16 else 32 if rank <= 32 else 64


def _block_constants(config: GemmConfig) -> dict[str, int]:
    return {
        "GROUP_M": config.group_m,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
