"""The second opinion: transformers alone for the base, with PEFT for adapters, with merged weights where PEFT is wrong.

One sequence per forward, with the eager attention and the eager experts of transformers; nothing of moelora runs here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from moelora.adapters.base import Adapter, Catalogue, TargetKind
from moelora.adapters.describe import AdapterDescription, describe
from moelora.adapters.loader import load_adapter
from moelora.backends.fused_ops import RowScores
from moelora.batching.sequences import NO_TARGET
from moelora.batching.sequences import Sequence as Tokens
from moelora.errors import ConfigError
from moelora.models.base_model import BaseSource, load_plain
from moelora.scoring.results import HostScores, ResultBuilder
from moelora.types import BASE_ADAPTER, Request, Result, RunMode
from moelora.verify.merge import merged

PEFT_LAYOUTS = frozenset({"D", "E", "W", "W2", "whole"})
"""Layouts that PEFT reads as they are meant. Per-expert keys it rewrites, with mistakes; others it does not know."""

# Before it, PEFT laid wrapped parameters out the other way round; a square one of an older file is read wrongly.
_WRAPPED_SINCE = (0, 19, 1)
_CHUNK_ROWS = 256


class ReferenceKind(StrEnum):
    """What a row was compared with."""

    PLAIN = "plain"
    PEFT = "peft"
    MERGED = "merged"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceChoice:
    """The reference of one adapter. reason: why it is not PEFT; empty if it is."""

    kind: ReferenceKind
    reason: str = ""


def choose_reference(path: str | Path, catalogue: Catalogue, *, lora_b_layout: str | None = None) -> ReferenceChoice:
    """Decides from the headers of an adapter whether PEFT is to be trusted with it."""
    found = describe(path, catalogue, lora_b_layout=lora_b_layout, check_values=False)
    foreign = [layout for layout in found.layouts if layout not in PEFT_LAYOUTS]
    if foreign:
        return _merged(f"PEFT does not apply layout {', '.join(foreign)} as it is meant")
    if "W" in found.layouts and _version(found) < _WRAPPED_SINCE:
        return _merged("its wrapped parameters are older than PEFT 0.19.1, and square ones would be read wrongly")
    return ReferenceChoice(kind=ReferenceKind.PEFT)


def require_peft(choices: Mapping[str, ReferenceChoice]) -> None:
    """Raises `ConfigError` if an adapter is to be compared with PEFT, and PEFT is not installed."""
    names = [name for name, choice in choices.items() if choice.kind is ReferenceKind.PEFT]
    if names and find_spec("peft") is None:
        raise ConfigError(
            f"adapter {names[0]!r} is to be compared with PEFT, which is not installed: "
            "python -m pip install 'moelora[verify]'"
        )


class Reference:
    """Scores requests without moelora's engine. Holds one plain model of the dtype given."""

    def __init__(
        self,
        source: BaseSource,
        catalogue: Catalogue,
        *,
        device: torch.device,
        dtype: torch.dtype,
        lora_b_layout: str | None = None,
        seed: int = 0,
    ) -> None:
        self._source = source
        self._catalogue = catalogue
        self._device = device
        self._dtype = dtype
        self._b_layout = lora_b_layout
        self._seed = seed
        self._model: Any = None

    def score(
        self, name: str, path: Path | None, choice: ReferenceChoice, requests: Sequence[Request]
    ) -> tuple[list[Result], ReferenceChoice]:
        """The results of `requests`, all of one adapter, and the reference that was used in the end.

        Where PEFT refuses the adapter or leaves a part of it out, merged weights take its place. path: None for the
        base.
        """
        if name == BASE_ADAPTER or path is None:
            return self._score(self._plain(), requests), ReferenceChoice(kind=ReferenceKind.PLAIN)
        adapter = self._load(name, path)
        if choice.kind is ReferenceKind.PEFT:
            with self._peft(adapter) as (model, trouble):
                trouble = trouble or _left_out(model, adapter, self._catalogue)
                if not trouble:
                    return self._score(model, requests), choice
            choice = _merged(trouble)
        model = self._plain()
        with torch.no_grad(), merged(model, adapter, self._catalogue):
            return self._score(model, requests), choice

    def _plain(self) -> Any:
        if self._model is None:
            torch.manual_seed(self._seed)
            self._model = load_plain(self._source, device=self._device, dtype=self._dtype)
        return self._model

    @contextmanager
    def _peft(self, adapter: Adapter) -> Iterator[tuple[Any, str]]:
        """The base with the adapter in PEFT, or None and what is in the way.

        Afterwards the adapter is taken off; where PEFT leaves something of it in the base, that is loaded anew.
        """
        from peft import PeftModel

        plain = self._plain()
        names = [name for name, _ in plain.named_parameters()]
        model = None
        trouble = ""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                model = PeftModel.from_pretrained(plain, str(adapter.path), local_files_only=True).eval()
            except Exception as error:  # whatever it raises, it cannot serve as the reference
                trouble = f"PEFT refuses it: {' '.join(str(error).split())[:160]}"
        if any("missing adapter keys" in str(warning.message) for warning in said):
            trouble = "PEFT does not find all of its keys"
        try:
            yield model, trouble
        finally:
            self._model = None
            # Saved modules stay behind in the base, and so does what was half applied.
            if not trouble and model is not None and not adapter.replacements:
                plain = model.unload()
                self._model = plain if [name for name, _ in plain.named_parameters()] == names else None

    def _load(self, name: str, path: Path) -> Adapter:
        return load_adapter(
            path,
            name=name,
            catalogue=self._catalogue,
            dtype=self._dtype,
            base_weight=self._source.stored_tensor,
            lora_b_layout=self._b_layout,
        )

    def _score(self, model: Any, requests: Sequence[Request]) -> list[Result]:
        return [self._score_one(model, request) for request in requests]

    def _score_one(self, model: Any, request: Request) -> Result:
        builder = ResultBuilder(0, request)
        result = None
        for sequence in builder.sequences:
            scores = _rows(_logits(model, sequence, self._device), sequence)
            result = builder.add(sequence, HostScores.of(scores), 0, 0, RunMode.EAGER)
        assert result is not None
        return result


@torch.inference_mode()
def _logits(model: Any, sequence: Tokens, device: torch.device) -> torch.Tensor:
    ids = torch.tensor([sequence.token_ids], dtype=torch.int64, device=device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def _rows(logits_TV: torch.Tensor, sequence: Tokens) -> RowScores:
    """Log-softmax in fp32, a few rows at a time, by torch's own function."""
    positions = torch.tensor([run.first + i for run in sequence.runs for i in range(len(run.targets))])
    targets_N = torch.tensor([int(target) for run in sequence.runs for target in run.targets])
    wanted, greedy, best_id, best = [], [], [], []
    for begin in range(0, len(positions), _CHUNK_ROWS):
        piece = slice(begin, begin + _CHUNK_ROWS)
        logprobs_CV = torch.log_softmax(logits_TV[positions[piece].to(logits_TV.device)].float(), dim=-1)
        targets_C = targets_N[piece].to(logits_TV.device)
        wanted_C = logprobs_CV.gather(1, targets_C.clamp(min=0).unsqueeze(1))[:, 0]
        best_C, best_id_C = logprobs_CV.max(dim=1)
        wanted.append(wanted_C.cpu())
        greedy.append(((wanted_C == best_C) & (targets_C != NO_TARGET)).cpu())
        best_id.append(best_id_C.cpu())
        best.append(best_C.cpu())
    none = torch.empty(sum(run.is_open for run in sequence.runs), 0)
    return RowScores(
        target_logprob_N=torch.cat(wanted),
        is_greedy_N=torch.cat(greedy),
        best_id_N=torch.cat(best_id),
        best_logprob_N=torch.cat(best),
        top_ids_MK=none.long(),
        top_logprobs_MK=none,
    )


def _left_out(model: Any, adapter: Adapter, catalogue: Catalogue) -> str:
    """What of the adapter the PEFT model has no factors for, as a sentence; empty if nothing."""
    held = {name.partition("base_model.model.")[2] for name, _ in model.named_parameters() if "lora_" in name}
    for name in adapter.factors:
        is_experts = catalogue.targets[name].kind is TargetKind.EXPERTS
        module = name.rpartition(".")[0] if is_experts else name
        if not any(one.startswith(f"{module}.") for one in held):
            return f"PEFT leaves out {name}"
    return ""


def _merged(reason: str) -> ReferenceChoice:
    return ReferenceChoice(kind=ReferenceKind.MERGED, reason=reason)


def _version(found: AdapterDescription) -> tuple[int, ...]:
    text = found.config.peft_version if found.config is not None else None
    return tuple(int(part) for part in (text or "").split(".")[:3] if part.isdigit())
