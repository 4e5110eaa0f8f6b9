"""The same prompts through transformers alone and with PEFT: padded batches, one adapter at a time.

The peer gets what it is fastest with: torch's own attention, transformers' default experts function, adapters in the
model's dtype, batches of like lengths, and logits a chunk of rows at a time. One PEFT adapter stands for all of them,
so that holding and switching several costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch

from moelora.adapters.base import Catalogue, TargetKind
from moelora.bench.dummy_adapters import PROJECTIONS
from moelora.bench.workloads import Task
from moelora.errors import ConfigError
from moelora.models.base_model import BaseSource, load_plain
from moelora.types import BASE_ADAPTER, Request

NAME = "transformers"

_CHUNK_ROWS = 2048
_PAD = 0


def require_peft(adapters: Iterable[int]) -> None:
    """Raises `ConfigError` without PEFT if any of these numbers of adapters is more than none."""
    if any(adapters) and find_spec("peft") is None:
        raise ConfigError(
            "the peer's adapters need PEFT, which is not installed: python -m pip install 'moelora[verify]'"
        )


class TransformersPeer:
    """transformers, and PEFT if an adapter is wanted, behind what a benchmark calls."""

    def __init__(
        self,
        source: BaseSource,
        catalogue: Catalogue,
        *,
        device: torch.device,
        dtype: torch.dtype,
        rank: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        """rank: of the adapter, which needs PEFT; 0 for none. max_tokens: of a padded batch."""
        torch.manual_seed(seed)
        self._device = device
        self._max_tokens = max_tokens
        attention = "sdpa" if getattr(source.model_class, "_supports_sdpa", False) else "eager"
        self._model = load_plain(source, device=device, dtype=dtype, attention=attention, experts=None)
        self._peft = _add_adapter(self._model, catalogue, rank, device) if rank else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the base and the adapter."""
        held = {p.data_ptr(): p.nbytes for p in (*self._model.parameters(), *self._model.buffers())}
        return sum(held.values())

    @torch.inference_mode()
    def score(self, requests: Sequence[Request], task: Task) -> list[torch.Tensor]:
        """Each request's log-probabilities in fp32 on the host: of every token but the first, or of the best next."""
        out: dict[int, torch.Tensor] = {}
        for adapter, batches in self._planned(requests):
            with self._under(adapter):
                for batch in batches:
                    out.update(zip(batch, self._score_batch([requests[i] for i in batch], task), strict=True))
        return [out[i] for i in range(len(requests))]

    def padding_share(self, requests: Sequence[Request]) -> float:
        """Positions of the padded batches that hold no token, over all positions, in [0, 1]."""
        batches = [batch for _, group in self._planned(requests) for batch in group]
        rows = sum(len(batch) * max(len(requests[i].token_ids) for i in batch) for batch in batches)
        return 1 - sum(len(request.token_ids) for request in requests) / max(rows, 1)

    def _planned(self, requests: Sequence[Request]) -> Iterator[tuple[str, Iterator[list[int]]]]:
        """Each adapter with its batches of indices of requests."""
        order = sorted(range(len(requests)), key=lambda i: (requests[i].adapter, len(requests[i].token_ids)))
        for adapter, group in groupby(order, key=lambda i: requests[i].adapter):
            yield adapter, self._batches(list(group), requests)

    def _under(self, adapter: str) -> AbstractContextManager[Any]:
        if self._peft is None or adapter != BASE_ADAPTER:
            return nullcontext()
        return self._peft.disable_adapter()

    def _batches(self, order: list[int], requests: Sequence[Request]) -> Iterator[list[int]]:
        """Neighbours in length, as many as fit into the budget once padded to the longest, which comes last."""
        batch: list[int] = []
        for i in order:
            if batch and (len(batch) + 1) * len(requests[i].token_ids) > self._max_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _score_batch(self, requests: Sequence[Request], task: Task) -> list[torch.Tensor]:
        lengths = [len(r.token_ids) for r in requests]
        longest = max(lengths)
        ids = torch.tensor([[*r.token_ids, *[_PAD] * (longest - n)] for r, n in zip(requests, lengths, strict=True)])
        mask = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)
        ids = ids.to(self._device)
        # Without padding no mask is needed, and attention takes its faster way.
        given = None if min(lengths) == longest else mask.long().to(self._device)
        body = getattr(self._model, self._model.base_model_prefix)
        hidden_BTH = body(input_ids=ids, attention_mask=given, use_cache=False).last_hidden_state
        if task is Task.PREFILL:
            last = hidden_BTH[torch.arange(len(lengths)), torch.tensor(lengths) - 1]
            return list(self._log_probs(last, None).cpu().split(1))
        wanted = mask[:, 1:].to(self._device)
        scores = self._log_probs(hidden_BTH[:, :-1][wanted], ids[:, 1:][wanted])
        return list(scores.cpu().split([n - 1 for n in lengths]))

    def _log_probs(self, hidden_NH: torch.Tensor, targets_N: torch.Tensor | None) -> torch.Tensor:
        """log p(target) of each row, or of the most likely token where no targets are given."""
        head = self._model.get_output_embeddings()
        parts = []
        for begin in range(0, hidden_NH.shape[0], _CHUNK_ROWS):
            rows = slice(begin, begin + _CHUNK_ROWS)
            logprobs_CV = torch.log_softmax(head(hidden_NH[rows]), dim=-1, dtype=torch.float32)
            if targets_N is None:
                parts.append(logprobs_CV.max(dim=1).values)
            else:
                parts.append(logprobs_CV.gather(1, targets_N[rows].unsqueeze(1))[:, 0])
        return torch.cat(parts) if parts else hidden_NH.new_empty(0, dtype=torch.float32)


def _add_adapter(model: Any, catalogue: Catalogue, rank: int, device: torch.device) -> Any:
    """A random adapter on what dummy adapters target, in the model's dtype. Returns the PEFT model around `model`."""
    from peft import LoraConfig, get_peft_model

    experts = {
        re.sub(r"^.*\.layers\.\d+\.", "", target.name) for target in catalogue if target.kind is TargetKind.EXPERTS
    }
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=list(PROJECTIONS),
        target_parameters=sorted(experts),
        init_lora_weights=False,  # random B, so that no product is with zeros
    )
    with device:
        return get_peft_model(model, config, autocast_adapter_dtype=False).eval()
