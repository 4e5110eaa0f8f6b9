"""The k largest of each row, for routers. `naive.py` is the truth, `kernel.py` the Triton code."""

from __future__ import annotations

import torch

from moelora_kernels.launch import FLOAT_DTYPES, INT32_LIMIT, power_of_two, require, require_device, require_rows
from moelora_kernels.ops.top_k.kernel import top_k_kernel
from moelora_kernels.ops.top_k.naive import naive_top_k, naive_top_k_softmax

__all__ = ["MAX_K", "MAX_WIDTH", "naive_top_k", "naive_top_k_softmax", "top_k", "top_k_softmax"]

MAX_WIDTH = 1024
MAX_K = 32
_BLOCK = 512
"""Elements of a program. By the width alone: how threads share a row, and so the order of its sum, follows from the
shape of a program."""


def top_k(x_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in x's dtype and int64 indices, `[T, k]`: largest first, equals in ascending order of index, NaN first.

    x `[T, E]` in fp32, bf16 or fp16, rows contiguous, rows may lie apart; E at most 1,024, k at most 32 and E. Unlike
    torch's, whose order among equals is left open, a row's result depends on the row alone. One H200, 16,384 rows of
    128, k 8: torch takes 0.11 ms. Raises `ConfigError` for what has no kernel.
    """
    return _run(x_TE, k, dtype=x_TE.dtype)


def top_k_softmax(
    logits_TE: torch.Tensor, k: int, *, normed: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row's softmax in `dtype`, and int64 indices: `top_k` of logits, whose order is the same.

    The softmax is fp32, and rounded once. normed: the k of a row are divided by their sum before that.
    """
    return _run(logits_TE, k, dtype=dtype, softmax=True, normed=normed)


def _run(
    x_TE: torch.Tensor, k: int, *, dtype: torch.dtype, softmax: bool = False, normed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    require_device("top_k", x_TE)
    require_rows("top_k", "x", x_TE)
    rows, width = x_TE.shape
    require(
        {x_TE.dtype, dtype} <= set(FLOAT_DTYPES),
        f"top_k: {x_TE.dtype} into {dtype} has no kernel",
        "bfloat16, float16 or float32",
    )
    require(width <= MAX_WIDTH, f"top_k: rows of {width} elements, over {MAX_WIDTH}", "torch.topk")
    require(1 <= k <= min(MAX_K, width), f"top_k: k is {k}, for rows of {width} and at most {MAX_K}", "torch.topk")
    require(rows < INT32_LIMIT, f"top_k: {rows} rows", "fewer rows at once")
    values = torch.empty((rows, k), dtype=dtype, device=x_TE.device)
    indices = torch.empty((rows, k), dtype=torch.int64, device=x_TE.device)
    if rows == 0:
        return values, indices
    block_e = power_of_two(width, least=2)
    block_t = max(1, _BLOCK // block_e)
    top_k_kernel[(-(-rows // block_t),)](
        x_TE, values, indices, rows, width, x_TE.stride(0),
        K=k, SOFTMAX=softmax, NORMED=normed,
        BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_K=power_of_two(k, least=2), num_warps=4,
    )  # fmt: skip
    return values, indices
