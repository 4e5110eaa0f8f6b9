"""What is known of an architecture: how it may be run. Found by the probe (`probe.py`), obeyed by the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moelora.models.mixers import Loop
from moelora.types import GraphMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How a model may be run.

    packs: several requests may share a row. attention: the name of the attention function. experts: the experts
    function is called for all routed experts, and honoured. loops: token mixers that are called once per request.
    syncs: where the body reads a value on the host, which no graph can capture: "file:line (operation)".
    reason: why it does not pack, or does not take our functions; empty if there is nothing to say.
    """

    model_type: str
    packs: bool
    attention: str
    experts: bool
    loops: tuple[Loop, ...] = ()
    syncs: tuple[str, ...] = ()
    reason: str = ""

    @property
    def graph_modes(self) -> tuple[GraphMode, ...]:
        """The modes that its structure allows."""
        if not self.packs or self.syncs:
            return ()
        return (GraphMode.BREAKABLE,) if self.loops else (GraphMode.FULL, GraphMode.BREAKABLE)

    @property
    def looped(self) -> tuple[str, ...]:
        """The classes and functions that are called once per request."""
        return tuple(loop.name for loop in self.loops)

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Architecture:
        """Reads what `to_json` gave. Raises `KeyError` or `TypeError` for anything else."""
        kinds = {"model_type": str, "packs": bool, "attention": str, "experts": bool, "reason": str}
        for name, kind in kinds.items():
            if not isinstance(found[name], kind):
                raise TypeError(f"{name} is {found[name]!r}")
        loops = tuple(
            Loop(
                name=loop["name"],
                namespace=loop["namespace"],
                inputs={k: tuple(v) for k, v in loop["inputs"].items()},
                outputs={k: tuple(v) for k, v in loop["outputs"].items()},
            )
            for loop in found["loops"]
        )
        return Architecture(**{**found, "loops": loops, "syncs": tuple(found["syncs"])})
