"""Verdicts of the probe, kept on disk: by what was probed, and by the versions of everything that could change it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moelora.models.architecture import Architecture
from moelora.models.probe import probe
from moelora.models.small_config import NOT_ARCHITECTURE
from moelora.versions import versions

_VERSIONS = ("moelora", "torch", "transformers", "kernels", "flash-linear-attention", "causal-conv1d", "mamba-ssm")
"""Distributions whose versions may change a verdict."""

_known: dict[str, Architecture] = {}


def find_verdict(model_class: Any, config: Any, make_decoder: Callable[[], torch.nn.Module]) -> Architecture:
    """The verdict for a model class and a config: from memory, from disk, or by probing what `make_decoder` returns."""
    digest = _digest(model_class, config.get_text_config())
    if digest not in _known:
        file = cache_folder() / f"{digest}.json"
        verdict = _read(file)
        if verdict is None:
            verdict = probe(make_decoder())
            _write(file, verdict)
        _known[digest] = verdict
    return _known[digest]


def cache_folder() -> Path:
    """Where verdicts lie: under `$XDG_CACHE_HOME`, or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moelora" / "architectures"


def _digest(model_class: Any, config: Any) -> str:
    settings = {key: value for key, value in config.to_dict().items() if key not in NOT_ARCHITECTURE}
    asked = {
        "class": f"{model_class.__module__}.{model_class.__name__}",
        "config": settings,
        "versions": versions(_VERSIONS),
        "code": _code(),
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _code() -> str:
    """Of the modules beside this one: a checkout changes without its version."""
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def _read(file: Path) -> Architecture | None:
    try:
        return Architecture.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # absent, or not one of ours: it is found out anew


def _write(file: Path, verdict: Architecture) -> None:
    """Whole or not at all. A cache that cannot be written only costs time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as part:
            json.dump(verdict.to_json(), part)
        os.replace(part.name, file)
    except OSError:
        return
