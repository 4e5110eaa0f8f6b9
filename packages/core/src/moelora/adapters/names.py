"""Names: what a tensor's key says, and which target of the base model a module of the file means."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from moelora.adapters.base import Catalogue, Target, TargetKind

PEFT_PREFIX = "base_model.model."


class Role(StrEnum):
    """What a tensor is to its module. PLAIN: a weight, bias or parameter of the model itself, stored in full."""

    A = "lora_A"
    B = "lora_B"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    BASE_COPY = "base copy"
    PLAIN = "plain"
    IGNORED = "ignored"
    UNSUPPORTED = "unsupported"


_FACTOR = re.compile(r"(.+)\.(lora_(?:embedding_)?[AB])(?:\.default)?(\.weight|\.bias)?")
# Nearly all names end so, and an adapter may have tens of thousands: they are split without the pattern.
_USUAL = {"A.weight": Role.A, "B.weight": Role.B}
_UNSUPPORTED = (
    "lora_magnitude_vector", "trainable_tokens_delta", "trainable_tokens_original", "lora_diag", "lora_monteclora",
)  # fmt: skip


def parse_key(name: str) -> tuple[str, Role]:
    """Splits a tensor name of an adapter file into module and role.

    The module comes without PEFT's prefix and suffixes; for PLAIN and BASE_COPY it is a parameter's name.
    """
    bare = name.removeprefix(PEFT_PREFIX)
    module, _, ending = bare.rpartition(".lora_")
    usual = _USUAL.get(ending)
    if usual is not None and module and "lora_velora_embed" not in module:
        return module, usual
    if "lora_velora_embed" in bare:  # training state, not read by the forward pass
        return bare, Role.IGNORED
    match = _FACTOR.fullmatch(bare)
    if match:
        module, factor, suffix = match.groups()
        return module, Role.UNSUPPORTED if suffix == ".bias" else Role(factor)
    if any(word in bare for word in _UNSUPPORTED) or "lora_" in bare:
        return bare, Role.UNSUPPORTED
    if ".base_layer." in bare:
        return bare.replace(".base_layer.", ".", 1), Role.BASE_COPY
    return bare.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", "."), Role.PLAIN


_EXPERT = re.compile(
    r"(?P<path>.*\bexperts)\.(?P<expert>\d{1,9})\.(?P<proj>\w+)"
    r"|(?P<path2>.*\bexperts)\.(?P<proj2>gate_up_projs|down_projs)\.(?P<expert2>\d{1,9})"
)
_PROJECTIONS = {
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down",
    "gate_up_proj": "gate_up", "gate_up_projs": "gate_up", "down_projs": "down",
}  # fmt: skip


class ExpertName(NamedTuple):
    """A projection of routed experts by its name in the file: `path` ends with `experts`; expert -1 means all of them.

    part: "gate", "up", "gate_up" or "down". numbered_last: written as `gate_up_projs.<e>`.
    """

    path: str
    expert: int
    part: str
    numbered_last: bool = False


def parse_expert(module: str) -> ExpertName | None:
    """Recognises `…experts.3.gate_proj`, `…experts.3.w1`, `…experts.gate_up_projs.3`; else None."""
    if "experts." not in module:
        return None
    before, _, proj = module.rpartition(".")
    path, _, number = before.rpartition(".")
    if path.endswith(".experts") and number.isascii() and number.isdecimal() and len(number) < 10:  # the usual case
        part = _PROJECTIONS.get(proj)
        return None if part is None else ExpertName(path, int(number), part)
    match = _EXPERT.fullmatch(module)
    if match is None:
        return None
    last = match["path"] is None
    path, expert, proj = match.group("path2", "expert2", "proj2") if last else match.group("path", "expert", "proj")
    part = _PROJECTIONS.get(proj)
    return None if part is None else ExpertName(path, int(expert), part, numbered_last=last)


def parse_all_experts(module: str) -> ExpertName | None:
    """Recognises `…experts.gate_up_proj`, `…experts.w1`, …: one name for all experts; else None."""
    path, _, proj = module.rpartition(".")
    part = _PROJECTIONS.get(proj)
    if part is None or path.rpartition(".")[2] != "experts":
        return None
    return ExpertName(path, -1, part)


def unwrapped(module: str) -> tuple[str, int]:
    """Strips the `.base_layer` levels of nested parameter wrappers; returns the module and how many there were."""
    depth = 0
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
        depth += 1
    return module, depth


def canonical(name: str) -> str:
    """Brings the spellings of one module into one form. Applied to names of files and of models alike.

    Only used to compare names: `layers.0.mlp.router` stands for `model.layers.0.block_sparse_moe.gate`,
    `model.language_model.layers.0.mlp.gate` and others.
    """
    parts = [part for part in name.split(".") if part not in ("language_model", "original_moe")]
    while len(parts) > 1 and parts[0] in ("model", "backbone"):
        del parts[0]
    parts = ["mlp" if part == "block_sparse_moe" else part for part in parts]
    if len(parts) > 2 and parts[0] == "layers" and parts[2] == "attn":
        parts[2] = "self_attn"
    if parts == ["unembed_tokens"]:
        return "lm_head"
    if parts[-2:] == ["router", "layer"]:
        del parts[-1]
    if parts[-2:] == ["mlp", "gate"]:
        parts[-1] = "router"
    if "mlp" in parts[-3:] and "moe_statics" in parts and "gate" not in parts:
        parts.insert(parts.index("moe_statics"), "router")
    if len(parts) > 1 and parts[-2] == "mlp" and parts[-1] in ("input_linear", "output_linear"):
        parts[-1:] = ["experts", "gate_up_proj" if parts[-1] == "input_linear" else "down_proj"]
    if "experts" in parts and parts[-1] in ("w1", "w2", "w3"):
        parts[-1] = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[parts[-1]]
    return ".".join(parts)


class Resolver:
    """Finds the targets that the module names of a file mean. Exact names win; an alias counts only if it is unique."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        aliases: dict[str, list[Target]] = defaultdict(list)
        experts: dict[str, list[Target]] = defaultdict(list)
        for target in catalogue:
            aliases[canonical(target.name)].append(target)
            if target.kind is TargetKind.EXPERTS:
                experts[canonical(target.name.rpartition(".")[0])].append(target)
        self._aliases = {alias: found[0] for alias, found in aliases.items() if len(found) == 1}
        self._experts = dict(experts)
        self._experts_by_path: dict[str, list[Target]] = {}

    def target(self, module: str) -> Target | None:
        """The target that a module name of the file means, or None."""
        return self.catalogue.get(module) or self._aliases.get(canonical(module))

    def experts(self, path: str) -> list[Target]:
        """The 3-D parameters of the experts module that `path` means, in registration order; empty if there is none."""
        known = self._experts_by_path.get(path)
        if known is None:
            known = self._experts.get(canonical(path), [])
            if len({target.name.rpartition(".")[0] for target in known}) > 1:
                known = [target for target in known if target.name.rpartition(".")[0] == path]
            self._experts_by_path[path] = known
        return known

    def parameter_name(self, name: str) -> str:
        """The model's name for a parameter of the file, such as `model.norm.weight`, where its module is known."""
        module, _, leaf = name.rpartition(".")
        target = self.target(module)
        return f"{target.name}.{leaf}" if target else name

    def samples(self, count: int = 6) -> list[str]:
        """Some target names, of different kinds, to show beside names that were not found."""
        shown: dict[str, str] = {}
        for target in self.catalogue:
            shown.setdefault(re.sub(r"\.\d+\.", ".#.", target.name), target.name)
        return _spread(list(shown.values()), count)


def _spread(names: list[str], count: int) -> list[str]:
    step = max(1, len(names) // count)
    return names[::step][:count]


def shortened(names: Iterable[str], limit: int = 5) -> str:
    """The first names in quotes, and how many more there are."""
    listed = list(names)
    more = f", … and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(repr(name) for name in listed[:limit]) + more
