"""moelora: offline batch prefill for Mixture-of-Experts models with many LoRA adapters.

The public names are imported on first use, so that `import moelora` costs nothing and needs neither torch nor triton.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "PrefillEngine": "moelora.engine",
    "EngineOptions": "moelora.engine",
    "Request": "moelora.types",
    "Result": "moelora.types",
    "TokenScore": "moelora.types",
    "ChoiceScore": "moelora.types",
    "Phase": "moelora.types",
    "GraphMode": "moelora.types",
    "RunMode": "moelora.types",
    "BASE_ADAPTER": "moelora.types",
    "PrefillCapacity": "moelora.capacity",
    "MoeloraError": "moelora.errors",
    "AdapterError": "moelora.errors",
    "CheckpointError": "moelora.errors",
    "ConfigError": "moelora.errors",
    "RequestError": "moelora.errors",
}

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'moelora' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
