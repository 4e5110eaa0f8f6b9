"""What every launch function shares: refusals with a reason, and the number of programs a device can hold.

Holds no kernel and no block sizes; those stand beside each op.
"""

from __future__ import annotations

import os
from functools import cache

import torch

from moelora.errors import ConfigError

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that the kernels take."""

INT32_LIMIT = 2**31


def require(condition: bool, reason: str, instead: str) -> None:
    """Raises `ConfigError` with the reason for a refusal and what to use instead, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{reason}; use {instead} instead")


def interpreted() -> bool:
    """True if Triton runs its kernels on the CPU, one program after the other (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def require_device(op: str, *tensors: torch.Tensor) -> None:
    """All tensors on one device that Triton reaches: CUDA, or the CPU under the interpreter."""
    devices = {t.device for t in tensors}
    require(len(devices) == 1, f"{op}: tensors lie on several devices {sorted(map(str, devices))}", "one device")
    kind = next(iter(devices)).type
    require(
        kind == "cuda" or (kind == "cpu" and interpreted()),
        f"{op}: Triton has no kernels for device {kind!r}",
        "the 'torch' backend or this op's naive function",
    )


def require_dtype(op: str, *tensors: torch.Tensor) -> None:
    """All tensors in one dtype out of `FLOAT_DTYPES`."""
    dtypes = {t.dtype for t in tensors}
    names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
    require(len(dtypes) == 1, f"{op}: tensors have several dtypes ({names})", "one dtype")
    require(dtypes <= set(FLOAT_DTYPES), f"{op}: dtype {names} has no kernel", "bfloat16, float16 or float32")


def require_rows(op: str, name: str, tensor: torch.Tensor) -> None:
    """A matrix whose rows are contiguous; the rows may lie apart."""
    require(tensor.dim() == 2, f"{op}: {name} has {tensor.dim()} dimensions", "a matrix [rows, width]")
    require(
        tensor.stride(1) == 1 or tensor.shape[1] <= 1,
        f"{op}: the rows of {name} are not contiguous (strides {tuple(tensor.stride())})",
        f"{name}.contiguous()",
    )


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def hopper_or_later(device: torch.device) -> bool:
    """Whether `device` has bulk copies, and starts a kernel before the one in front of it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def programs(device: torch.device, work: int, per_multiprocessor: int) -> int:
    """Programs of a persistent grid: enough to fill the device, never more than there is work, at least one.

    The interpreter gets three, so that a program really takes several pieces of work one after the other.
    """
    if device.type != "cuda":
        return max(1, min(work, 3))
    index = device.index if device.index is not None else torch.cuda.current_device()
    return max(1, min(work, _multiprocessors(index) * per_multiprocessor))


def power_of_two(value: int, *, least: int = 1) -> int:
    """The smallest power of two that is at least `value` and at least `least`."""
    return max(least, 1 << max(0, value - 1).bit_length())
