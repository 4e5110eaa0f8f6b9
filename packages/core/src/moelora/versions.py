"""Which versions of what are installed. Imports none of it, so that a broken installation can be reported."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "moelora",
    "moelora-kernels",
    "moelora-cli",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "triton",
    "flash-attn-4",
    "peft",
    "numpy",
)
"""Distributions whose versions can change a score or a speed."""


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Versions of Python and of `packages`; None for what is not installed. moelora's own is known without metadata."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if found.get("moelora", "") is None:
        from moelora import __version__

        found["moelora"] = __version__
    return found
