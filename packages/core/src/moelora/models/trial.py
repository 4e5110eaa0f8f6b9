"""One small model, a few requests, and the runs that are compared: alone, packed, and module by module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from moelora.backends.base import LoraMetadata
from moelora.backends.torch_reference import TorchBackend
from moelora.models.attention import EAGER
from moelora.models.calls import Calls
from moelora.models.context import ForwardContext, Segments, forward_context, row_of
from moelora.models.decoder import plug_functions
from moelora.models.experts import attach_slots, is_experts_module
from moelora.models.functions import FunctionCalls
from moelora.models.mixers import Loop, install_loops, is_looped, looped_functions, remove_loops
from moelora.models.small_config import VOCAB
from moelora.models.syncs import SyncFinder, own_work
from moelora.models.unregistered import adopt_experts
from moelora.types import BASE_SLOT, Phase

LENGTHS = (1, 53, 13, 22)
"""Of the requests: one passes every threshold that `small_config` sets, one is as short as can be. The sum is prime."""

TOLERANCE = 1e-4
"""Of the largest value of a result, in fp32: rounding stays two orders below, a leak two orders above."""


class Unlike(Exception):  # noqa: N818 - an answer, not an error of the user's
    """Two runs that should agree do not, or one of them fails; says how."""


def fill_at_random(model: nn.Module, strength: float = 1.5) -> None:
    """Weights large enough for every part to matter; what an architecture initialises in its own way moves a little.

    strength: of matrices, 1 for outputs as large as inputs.
    """
    for parameter in model.parameters():
        data = parameter.data
        if data.ndim > 1:
            data.normal_(0.0, min(0.5, strength / data.shape[-1] ** 0.5))
        elif not torch.isfinite(data).all() or data.abs().max() > 1e4:
            data.normal_(0.0, 0.2)
        else:
            data.add_(0.1 * torch.randn_like(data))
    for name, buffer in model.named_buffers():
        if "bias" in name and buffer.is_floating_point():
            buffer.normal_(0.0, 0.1)


class Trial:
    """Runs of `body` on fixed random requests. The reference is made at once, with transformers' own functions."""

    def __init__(self, body: nn.Module) -> None:
        self.body = body
        self._backend = _QuietBackend()
        self._functions: dict[str, Any] = {}
        generator = torch.Generator().manual_seed(0)
        self._ids = [torch.randint(4, VOCAB, (n,), generator=generator) % self._vocab() for n in LENGTHS]
        self._others = [torch.randint(4, VOCAB, (n,), generator=generator) % self._vocab() for n in LENGTHS]
        self.set_functions(EAGER, EAGER)
        self._truth = [self._run_plain(ids) for ids in self._ids]
        own = self._run_plain(self._ids[-1], count=False)
        _compare(self._truth[-1], own, "positions from 0 instead of the model's own")
        self._reached: set[int] = set()
        for module in body.modules():
            if is_experts_module(module):
                attach_slots(module, up=None, down=None, reached=partial(self._reached.add, id(module)))

    def set_functions(self, attention: str, experts: str) -> None:
        """Chooses from transformers' registries."""
        plug_functions(self.body, attention=attention, experts=experts)
        adopt_experts(self.body, on=experts != EAGER)

    def check_alone(self) -> None:
        """Raises `Unlike` unless each request alone gives what transformers gives."""
        for ids, truth in zip(self._ids, self._truth, strict=True):
            _compare(self._run([ids]), truth, "a request alone")

    def check_packed(self) -> tuple[str, ...]:
        """Raises `Unlike` unless requests in one row give what each gives alone, whatever their neighbours are.

        Returns where the body reads values on the host meanwhile.
        """
        order = [2, 0, 3, 1]
        with SyncFinder() as finder, _unseen_loops(self.body):
            packed = self._run(self._ids)
        self._compare_row(packed, range(len(self._ids)), self._ids)
        moved = [self._ids[i] for i in order]
        self._compare_row(self._run(moved), order, moved)
        for kept in ((0, 2), (1, 3)):
            mixed = [self._ids[i] if i in kept else other for i, other in enumerate(self._others)]
            self._compare_row(self._run(mixed), [i if i in kept else -1 for i in range(len(mixed))], mixed)
        return finder.places

    def record_packed(self) -> Calls:
        """A packed run with the arguments and the result of every module's first call."""
        calls = Calls(self.body, self._context(self._ids), TOLERANCE)
        with calls.recording(), suppress(Unlike):  # the calls until then say which module fails
            self._run(self._ids)
        return calls

    def record_functions(self) -> FunctionCalls:
        """The same for the functions of modelling files."""
        calls = FunctionCalls(self.body, self._context(self._ids), TOLERANCE)
        with calls.recording(), suppress(Unlike):
            self._run(self._ids)
        return calls

    @contextmanager
    def looping(self, loops: Sequence[Loop]) -> Iterator[None]:
        """While it lasts, runs call what `loops` names once per request."""
        install_loops(self.body, loops)
        self._functions = {key: _unseen(call) for key, call in looped_functions(loops).items()}
        try:
            yield
        finally:
            self._functions = {}
            remove_loops(self.body)

    def _compare_row(self, row_TH: torch.Tensor, which: Sequence[int], requests: Sequence[torch.Tensor]) -> None:
        begin = 0
        for i, ids in zip(which, requests, strict=True):
            end = begin + ids.shape[0]
            if i >= 0:
                _compare(row_TH[begin:end], self._truth[i], f"{len(requests)} requests in one row")
            begin = end

    def _vocab(self) -> int:
        embedding: Any = self.body.get_input_embeddings()  # type: ignore[operator]
        return int(embedding.weight.shape[0])

    def _run_plain(self, ids: torch.Tensor, *, count: bool = True) -> torch.Tensor:
        """As transformers runs a request. count: tell positions, from 0; else the model finds its own."""
        positions = torch.arange(ids.shape[0]).unsqueeze(0) if count else None
        try:
            hidden_TH = _hidden(self.body, ids.unsqueeze(0), positions)
        except Exception as error:  # whatever odd numbers provoke in a model's code
            raise Unlike(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}") from error
        if not bool(torch.isfinite(hidden_TH).all()):
            raise Unlike("its results are not finite")
        return hidden_TH

    def _context(self, requests: Sequence[torch.Tensor]) -> ForwardContext:
        lengths = tuple(ids.shape[0] for ids in requests)
        boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        slots = torch.full((sum(lengths),), BASE_SLOT, dtype=torch.int32)
        return ForwardContext(
            backend=self._backend,
            meta=LoraMetadata(phase=Phase.PREFILL, token_slot_T=slots, has_lora=False),
            segments=Segments(cu_seqlens_S1=boundaries, lengths=lengths, longest=max(lengths)),
        )

    def _run(self, requests: Sequence[torch.Tensor]) -> torch.Tensor:
        """One row of all requests under our functions: `[T, H]`. Raises `Unlike` if that fails."""
        ids = torch.cat(list(requests)).unsqueeze(0)
        positions = torch.cat([torch.arange(r.shape[0]) for r in requests]).unsqueeze(0)
        try:
            with forward_context(self._context(requests)), row_of(positions, self._functions):
                return _hidden(self.body, ids, positions)
        except Exception as error:  # whatever a model's code makes of a row that it does not expect
            raise Unlike(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}") from error


def _hidden(body: nn.Module, ids_1T: torch.Tensor, positions_1T: torch.Tensor | None) -> torch.Tensor:
    hidden: torch.Tensor = body(input_ids=ids_1T, position_ids=positions_1T, use_cache=False).last_hidden_state[0]
    return hidden


def _compare(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    difference = float((got - want).abs().max()) / max(float(want.abs().max()), 1e-6)
    if not difference <= TOLERANCE:
        raise Unlike(f"{what}: off by {difference:.0e} of the largest value")


@contextmanager
def _unseen_loops(body: nn.Module) -> Iterator[None]:
    """Hides what looped modules do from a `SyncFinder`: they run between the parts of a graph."""
    hidden = []
    for module in body.modules():
        if is_looped(module):
            hidden.append((module, module.forward))
            module.forward = _unseen(module.forward)
    try:
        yield
    finally:
        for module, forward in hidden:
            module.forward = forward


def _unseen(forward: Any) -> Any:
    def unseen(*args: Any, **kwargs: Any) -> Any:
        with own_work():
            return forward(*args, **kwargs)

    return unseen


class _QuietBackend(TorchBackend):
    """The reference backend, whose own reading of values says nothing about the architecture."""

    def attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with own_work():
            return super().attention(*args, **kwargs)

    def experts(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with own_work():
            return super().experts(*args, **kwargs)
