"""Backends by name, made on first use: built-in, of the entry-point group `moelora.backends`, or MODULE:CLASS."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

from moelora.backends.base import Backend
from moelora.errors import ConfigError, choose_from

_BUILT_IN = {
    "torch": "moelora.backends.torch_reference:TorchBackend",
    # Named here too, so that a source checkout on PYTHONPATH finds them without installed entry points.
    "triton": "moelora_kernels.backends:TritonBackend",
    "csgmv": "moelora_kernels.backends:CsgmvBackend",
}


def backend_names() -> list[str]:
    """Names that `get_backend` accepts here: built-ins whose package is installed, then entry points."""
    names = [n for n, where in _BUILT_IN.items() if find_spec(where.split(".")[0].split(":")[0]) is not None]
    names += [e.name for e in entry_points(group="moelora.backends") if e.name not in names]
    return names


def get_backend(name: str) -> Backend:
    """Makes the backend called `name`, or the class `name` points to as MODULE:CLASS.

    Raises `ConfigError` naming the valid choices, what could not be imported, or what is no `Backend`.
    """
    where = _BUILT_IN.get(name)
    if where is None:
        found = {e.name: e.value for e in entry_points(group="moelora.backends")}
        if name not in found and ":" not in name:
            raise ConfigError(choose_from("backend", name, backend_names()))
        where = found.get(name, name)
    module, _, attribute = where.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"backend {name!r} needs {module.split('.')[0]}, which cannot be imported here ({error}); "
            f"available: {', '.join(backend_names())}"
        ) from error
    if not (isinstance(factory, type) and issubclass(factory, Backend)):
        raise ConfigError(f"backend {name!r}: {where} is no subclass of moelora.backends.base.Backend")
    return factory()
