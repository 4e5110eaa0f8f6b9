"""The machine a run finds itself on: its device."""

from __future__ import annotations

import torch

from moelora.errors import ConfigError, choose_from

_DEVICES = ["auto", "cpu", "cuda", "cuda:0"]


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
