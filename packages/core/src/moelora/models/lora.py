"""LoRA on the modules of a loaded model: on what some adapter of the run targets, nothing on the rest.

Plain linear layers go to `projections`; what is no `torch.nn.Linear` keeps its own product and gets a hook behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from moelora.adapters.bank import AdapterBank
from moelora.adapters.base import Catalogue, Target, TargetKind
from moelora.backends.base import DenseSlots, ExpertSlots
from moelora.errors import AdapterError
from moelora.models.context import current_context
from moelora.models.experts import attach_slots, is_experts_module, up_parameter
from moelora.models.projections import Projections, rows_of
from moelora.models.replacement import install_replacement
from moelora.models.weak_methods import weakly


class InstalledLora:
    """What was installed, and which of it the model has really called: a target never called would drop an adapter."""

    def __init__(self, targets: Sequence[str]) -> None:
        self.targets = frozenset(targets)
        self.called: set[str] = set()
        self.projections = Projections(self.called)
        self.checking = True
        """While the engine runs its own small batches, in which what cannot be applied is to be refused."""

    def check_calls(self) -> None:
        """After the first forward. Raises `AdapterError` naming targets whose LoRA would have no effect."""
        self.projections.finish()
        dead = sorted(self.targets - self.called)
        if dead:
            raise AdapterError(
                f"{len(dead)} adapted targets are never called by this model, so their factors would be dropped: "
                f"{', '.join(dead[:5])}"
            )


def install_lora(model: torch.nn.Module, catalogue: Catalogue, bank: AdapterBank) -> InstalledLora:
    """Wraps, in place, every module of `model` that the bank has factors or replacements for."""
    installed = InstalledLora([*bank.slots, *bank.layout.replaced])
    modules = dict(model.named_modules())
    experts: dict[str, dict[str, ExpertSlots]] = {}
    for name, slots in bank.slots.items():
        target = catalogue.targets[name]
        if isinstance(slots, ExpertSlots):
            owner, _, parameter = name.rpartition(".")
            experts.setdefault(owner, {})[parameter] = slots
        elif target.kind is TargetKind.EMBEDDING:
            modules[name].register_forward_hook(_embedding_hook(target, slots, installed))
        elif target.kind is TargetKind.ROUTER:
            _install_router(modules[name], target, slots, installed)
        else:
            assert target.kind is TargetKind.LINEAR, f"{name} is of kind {target.kind}"
            if type(modules[name]) is torch.nn.Linear:
                installed.projections.add(modules[name], target, slots)
                continue
            modules[name].register_forward_hook(_linear_hook(target, slots, installed))
    for owner, by_parameter in experts.items():
        _install_experts(modules[owner], owner, by_parameter, installed)
    for name in sorted(bank.layout.replaced):
        install_replacement(modules[name], name, bank, installed)
    return installed


def _linear_hook(target: Target, slots: DenseSlots, installed: InstalledLora) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        context = current_context()
        installed.called.add(target.name)
        if context.meta.has_lora:
            x_TI, meta = rows_of(target, inputs[0])
            if x_TI.shape[0]:
                context.backend.linear(x_TI, output.view(-1, output.shape[-1]), slots, meta)

    return hook


def _embedding_hook(target: Target, slots: DenseSlots, installed: InstalledLora) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        context = current_context()
        installed.called.add(target.name)
        if not context.meta.has_lora:
            return
        out_TH = output.view(-1, output.shape[-1])
        scale = getattr(module, "embed_scale", None)
        if scale is None:
            context.backend.embedding(inputs[0].reshape(-1), out_TH, slots, context.meta)
            return
        # The adapter changes the table, and the module scales what it looks up.
        delta_TH = torch.zeros_like(out_TH)
        context.backend.embedding(inputs[0].reshape(-1), delta_TH, slots, context.meta)
        out_TH += delta_TH * scale

    return hook


class _RouterTap(TorchFunctionMode):
    """Adds the delta to the one `F.linear` of a router's forward that uses a weight of the router's shape."""

    def __init__(self, target: Target, slots: DenseSlots) -> None:
        self._target = target
        self._slots = slots
        self.taps = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is functional.linear and tuple(args[1].shape) == self._target.shape:
            self.taps += 1
            context = current_context()
            if context.meta.has_lora:
                x_TI, meta = rows_of(self._target, args[0])
                context.backend.linear(x_TI, out.view(-1, out.shape[-1]), self._slots, meta)
        return out


def _install_router(module: torch.nn.Module, target: Target, slots: DenseSlots, installed: InstalledLora) -> None:
    original = weakly(module.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _RouterTap(target, slots) as tap:
            out = original(*args, **kwargs)
        assert tap.taps <= 1, f"{target.name} multiplies by its weight {tap.taps} times"
        if tap.taps:
            installed.called.add(target.name)
        return out

    module.forward = forward


def _install_experts(
    module: torch.nn.Module, owner: str, by_parameter: dict[str, ExpertSlots], installed: InstalledLora
) -> None:
    if not is_experts_module(module):
        raise AdapterError(f"{owner} ({type(module).__name__}) is outside transformers' registry of experts functions")
    names = [f"{owner}.{parameter}" for parameter in by_parameter]
    attach_slots(
        module,
        up=by_parameter.get(up_parameter(module)),
        down=by_parameter.get("down_proj"),
        # Only the experts function itself can tell that it was reached.
        reached=lambda: installed.called.update(names),
    )
