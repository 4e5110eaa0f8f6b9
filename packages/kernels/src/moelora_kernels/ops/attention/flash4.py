"""FlashAttention 4 (distribution `flash-attn-4`), where it is installed: one call, and why it cannot be made."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton

from moelora.errors import ConfigError
from moelora_kernels.ops.attention.kernel import zero_tail

MOST_SEQUENCES = 256
"""With more sequences in a batch the library compiles another kernel, in the middle of a run."""

NOT_INSTALLED = "flash-attn-4 is not installed"

_LEAST_CAPABILITY = 9
_ALIGNED = 8
_ROWS = 16


def flash4_refusal(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    """Why FlashAttention 4 cannot do this, or None."""
    if device.type != "cuda":
        return f"it needs CUDA, the tensors are on {device.type}"
    if (refusal := _loaded()[1]) is not None:
        return refusal
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16, got {dtype}"
    if head_dim % _ALIGNED or value_dim % _ALIGNED:
        return f"its head widths divide by {_ALIGNED}, got {head_dim} and {value_dim}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < _LEAST_CAPABILITY:
        return f"it needs compute capability {_LEAST_CAPABILITY}.0 or above, the device has {major}.{minor}"
    return None


def flash4_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cu_S1: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """The one place that calls the library. Arguments and result as `varlen_attention`; compiles at first use."""
    attend, refusal = _loaded()
    if attend is None:
        raise ConfigError(f"FlashAttention 4 cannot be used: {refusal}")
    options: dict[str, Any] = {} if sinks_H is None else {"learnable_sink": sinks_H}
    if softcap is not None:
        options["softcap"] = float(softcap)
    if window is not None:
        options["window_size"] = (window - 1, 0)
    made = attend(
        q_THD,
        k_TGD,
        # The last block of keys of a request reads on into the rows of the next, whose weights are zero; zero times NaN
        # is NaN. A request's own NaN still shows, through its keys.
        torch.nan_to_num(v_TGD),
        cu_seqlens_q=cu_S1,
        cu_seqlens_k=cu_S1,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=float(scale),
        causal=True,
        **options,
    )
    out_THD: torch.Tensor = made[0] if isinstance(made, tuple) else made
    # Rows behind the last boundary are left as the allocator gave them.
    rows, width = out_THD.shape[0], out_THD[0].numel()
    zero_tail[(triton.cdiv(rows, _ROWS),)](out_THD, cu_S1, cu_S1.shape[0] - 1, rows, width, ROWS=_ROWS, BLOCK=512)
    return out_THD


@cache
def _loaded() -> tuple[Callable[..., Any] | None, str | None]:
    """The library's function, or None and why it is not there."""
    try:
        from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        if error.name in ("flash_attn", "flash_attn.cute"):
            return None, NOT_INSTALLED
        return None, f"flash-attn-4 cannot be imported: it needs {error.name}"
    except Exception as error:  # whatever its compiler finds wrong with this machine
        return None, f"flash-attn-4 cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return flash_attn_varlen_func, None
