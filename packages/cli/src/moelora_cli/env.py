"""`moelora env`: versions, devices, backends. Works on any machine, whatever is missing there."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from typing import Any

import click

from moelora_cli.command import EXIT_DONE, MoeloraCommand
from moelora_cli.layout import entry


@click.command(cls=MoeloraCommand, short_help="Versions, devices and backends of this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def env(as_json: bool) -> int:
    """Shows what moelora finds here: versions, devices, and which backends and kernels can run."""
    facts = collect()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return EXIT_DONE
    for section, content in facts.items():
        click.echo(f"{section}:")
        entries = content if isinstance(content, dict) else {"": content}
        width = max((len(key) for key in entries), default=0)
        for key, value in entries.items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            text = "not installed" if shown is None else str(shown)
            click.echo("\n".join(entry(f"  {key:<{width}}  ", text)))
    return EXIT_DONE


def collect() -> dict[str, Any]:
    """All facts by section. A probe that fails gives the reason in place of its facts."""
    return {
        "versions": _probe(_versions),
        "machine": _probe(_machine),
        "devices": _probe(_devices),
        "backends": _probe(_backends),
        "kernels": _probe(_kernels),
    }


def _probe(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return probe()
    except Exception as error:  # a report about a broken installation must not break with it
        return {"unavailable": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def _versions() -> dict[str, Any]:
    from moelora.versions import versions

    return dict(versions())


def _machine() -> dict[str, Any]:
    import os

    return {"system": platform.platform(), "cpu": platform.machine(), "cores": os.cpu_count()}


def _devices() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"cpu": f"{torch.get_num_threads()} threads"}
    if not torch.cuda.is_available():
        found["cuda"] = "no device" if torch.version.cuda else "not in this build of torch"
        return found
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, "
            f"compute capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}"
        )
    return found


def _backends() -> dict[str, Any]:
    """Each backend that is installed: what it can do, or why it cannot be used."""
    from moelora.backends import backend_names, get_backend

    found: dict[str, Any] = {}
    for name in backend_names():
        try:
            can = get_backend(name).capabilities
            modes = ", ".join(sorted(mode.value for mode in can.graph_modes)) or "none"
            found[name] = f"devices {', '.join(sorted(can.device_types))}; graphs {modes}"
        except Exception as error:
            found[name] = f"unavailable: {' '.join(str(error).split())[:200]}"
    return found


def _kernels() -> dict[str, Any]:
    """Operations with kernels of moelora's own, and whether Triton can compile them here."""
    import pkgutil
    from importlib.util import find_spec

    if find_spec("moelora_kernels") is None:
        return {"moelora-kernels": None}
    from moelora_kernels import ops

    names = [module.name for module in pkgutil.iter_modules(ops.__path__)]
    return {"operations": names or ["none"], "triton": _triton()}


def _triton() -> str:
    from importlib.util import find_spec

    if find_spec("triton") is None:
        return "not installed: the torch backend is used"
    import torch

    return "compiles for the GPU" if torch.cuda.is_available() else "interpreted only: no GPU"
