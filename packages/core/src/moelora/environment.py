"""The machine a run finds itself on: its device, and the versions of what it uses."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from moelora.errors import ConfigError, choose_from

_DEVICES = ["auto", "cpu", "cuda", "cuda:0"]
_PACKAGES = ("moelora", "moelora-kernels", "torch", "transformers", "triton", "safetensors")


def resolve_device(device: str) -> torch.device:
    """The torch device for "auto", "cpu", "cuda" or "cuda:N". Raises `ConfigError` for one that is not here."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ConfigError(choose_from("device", device, _DEVICES)) from None
    if resolved.type not in {"cpu", "cuda"}:
        raise ConfigError(choose_from("device", device, _DEVICES))
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ConfigError(f"device {device!r}: this machine has no usable CUDA device; valid: cpu")
        if (resolved.index or 0) >= count:
            raise ConfigError(f"device {device!r}: this machine has {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    return resolved


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape a result; those not installed are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
