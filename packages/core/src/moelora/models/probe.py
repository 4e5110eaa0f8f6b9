"""Finds out how an architecture may be run, on a small random copy: nothing is taken from a list of names.

The truth is the copy itself as transformers runs it, eagerly, one request at a time. Each attention function is tried
against it: first alone, then with several requests in one row, whose neighbours must not matter. Where they do, the
modules that mix requests are looked for, by calling every module once more on the rows of each request alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moelora.models.architecture import Architecture
from moelora.models.attention import BIASED, EAGER, MASKED, PACKED, register_attention
from moelora.models.calls import Calls
from moelora.models.experts import EXPERTS, register_experts
from moelora.models.functions import torch_functions
from moelora.models.mixers import Loop
from moelora.models.small_config import kinds_of, layers_of_every_kind, small_config
from moelora.models.trial import Trial, Unlike, fill_at_random


class _NoCopy(Exception):  # noqa: N818 - ends up as the reason of a verdict
    """No small model can be made."""


def probe(body: Any) -> Architecture:
    """The verdict for `body`, a decoder without its head, on any device, the meta device included. Never raises."""
    register_attention()
    register_experts()
    model_type = str(body.config.model_type)
    with _own_randomness(), torch.device("cpu"), torch.no_grad(), torch_functions(body):
        try:
            return _verdict(_trial(body), model_type)
        except _NoCopy as error:
            return Architecture(model_type=model_type, packs=False, attention=EAGER, experts=False, reason=str(error))


def _trial(body: Any) -> Trial:
    small = small_copy(body)
    try:
        return Trial(small)
    except Unlike as unlike:
        raise _NoCopy(f"a small copy cannot be run ({unlike})") from unlike
    except Exception as error:  # not a decoder of transformers
        raise _NoCopy(f"a small copy cannot be tried out ({type(error).__name__}: {error})") from error


def small_copy(body: Any) -> torch.nn.Module:
    """A small random model of the class of `body`, with all of its kinds of layers. Raises `_NoCopy`."""
    wanted = layers_of_every_kind(body)
    problem = ""
    for layers in dict.fromkeys([wanted, None]):
        try:
            config = small_config(body.config, layers)
            config._attn_implementation = EAGER  # as `load_base` makes it; functions are plugged in afterwards
            small = type(body)(config)
        except Exception as error:  # whatever odd numbers provoke in a model's code
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            continue
        if kinds_of(body) - kinds_of(small):
            problem = "some kinds of its layers are lost in a smaller one"
            continue
        fill_at_random(small)
        return small.eval().requires_grad_(False)
    raise _NoCopy(f"no small copy could be made to try it out ({problem})")


def _verdict(trial: Trial, model_type: str) -> Architecture:
    alone: Architecture | None = None
    why = ""
    for attention in (PACKED, MASKED, BIASED):
        for experts in (EXPERTS, EAGER):
            try:
                trial.set_functions(attention, experts)
                trial.check_alone()
            except Unlike as unlike:
                why = why or str(unlike)
                continue
            found = _packed(trial, model_type, attention, experts == EXPERTS)
            if found.packs:
                return found
            alone = alone or found
            break
    if alone is not None:
        return alone
    try:
        trial.set_functions(EAGER, EXPERTS)
        trial.check_alone()
        experts = EXPERTS
    except Unlike:
        experts = EAGER
    reason = f"no attention function of moelora gives what its own gives ({why})"
    return Architecture(model_type=model_type, packs=False, attention=EAGER, experts=experts == EXPERTS, reason=reason)


def _packed(trial: Trial, model_type: str, attention: str, experts: bool) -> Architecture:
    """The verdict for functions that are right for a request alone."""
    try:
        syncs = trial.check_packed()
        return Architecture(model_type=model_type, packs=True, attention=attention, experts=experts, syncs=syncs)
    except Unlike as unlike:
        why = str(unlike)
    for loops in _guesses(trial):
        with trial.looping(loops):
            try:
                syncs = trial.check_packed()
            except Unlike:
                continue
        return Architecture(
            model_type=model_type, packs=True, attention=attention, experts=experts, loops=loops, syncs=syncs
        )
    reason = f"requests in one row change each other ({why}), and no part of it could be called once per request"
    return Architecture(model_type=model_type, packs=False, attention=attention, experts=experts, reason=reason)


def _guesses(trial: Trial) -> Iterator[tuple[Loop, ...]]:
    """What to call once per request: functions alone, functions and modules, modules alone."""
    functions = trial.record_functions().loops()
    if functions:
        yield functions
        with trial.looping(functions):
            calls = trial.record_packed()
        yield from ((*functions, *modules) for modules in _modules(calls))
    yield from _modules(trial.record_packed())


def _modules(calls: Calls) -> Iterator[tuple[Loop, ...]]:
    """Classes to call once per request, from the innermost modules that mix requests outwards."""
    chains = calls.mixing()
    tried: list[set[str]] = []
    for height in range(max(map(len, chains), default=0)):
        chosen = [chain[min(height, len(chain) - 1)] for chain in chains]
        names = {type(call.module).__name__ for call in chosen}
        if names not in tried:
            tried.append(names)
            loops = calls.loops(names)
            if loops is not None:
                yield loops


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Leaves the process's random numbers as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
