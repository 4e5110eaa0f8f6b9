"""From hidden rows to log-probabilities, a chunk of logits at a time.

Letters: N rows to score, H hidden, V vocabulary, C rows of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast

from moelora.backends.base import Backend
from moelora.batching.sequences import NO_TARGET
from moelora.models.base_model import BaseModel
from moelora.models.context import ForwardContext, forward_context
from moelora.types import BASE_SLOT

_CPU_CHUNK_BYTES = 64 << 20
_CUDA_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """Scores of N rows on the host, in fp32.

    target_logprob_N: log p(target), NaN where there was no target. is_greedy_N: the target's logit is the largest of
    its row. best_id_N, best_logprob_N: the arg-max. top_ids_NK, top_logprobs_NK: the K best, best first; K may be 0.
    """

    target_logprob_N: torch.Tensor
    is_greedy_N: torch.Tensor
    best_id_N: torch.Tensor
    best_logprob_N: torch.Tensor
    top_ids_NK: torch.Tensor
    top_logprobs_NK: torch.Tensor


class _BodyStub(torch.nn.Module):
    """Stands in for the body while the head runs: hands out hidden states that exist already."""

    hidden_1CH: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden_1CH)


class ScoringHead:
    """lm_head and log-softmax over chosen rows, never over a whole batch.

    The model's own forward runs with its body replaced by a stub, so that whatever it does to its logits (scaling,
    capping) is done here too, for every architecture.
    """

    def __init__(self, base: BaseModel, backend: Backend, *, chunk_rows: int | None = None) -> None:
        self._base = base
        self._backend = backend
        self._vocab = base.text_config.vocab_size
        self._chunk_rows = chunk_rows
        self._stub = _BodyStub()

    def chunk_rows(self) -> int:
        """Rows of one chunk of logits, from what is free: model dtype and an fp32 copy, V wide each."""
        if self._chunk_rows is not None:
            return self._chunk_rows
        budget = _CPU_CHUNK_BYTES
        if self._base.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._base.device)
            budget = min(_CUDA_CHUNK_BYTES, max(free // 8, _CPU_CHUNK_BYTES))
        return max(1, budget // (self._vocab * (self._base.dtype.itemsize + 4)))

    def score(
        self, hidden_NH: torch.Tensor, targets_N: torch.Tensor, slots_N: torch.Tensor, *, top_k: int
    ) -> RowScores:
        """Scores N rows. hidden_NH on the device; targets_N int64 (NO_TARGET: none) and slots_N int32 on the host."""
        rows = self.chunk_rows()
        parts = [
            self._score_chunk(hidden_NH[i : i + rows], targets_N[i : i + rows], slots_N[i : i + rows], top_k)
            for i in range(0, hidden_NH.shape[0], rows)
        ]
        return _join(parts)

    def logits(self, hidden_CH: torch.Tensor, slots_C: torch.Tensor) -> torch.Tensor:
        """The model's logits `[C, V]` for hidden rows, LoRA of each row's slot included. slots_C int32 on the host."""
        has_lora = bool((slots_C != BASE_SLOT).any())
        meta = self._backend.rows_metadata(slots_C.to(self._base.device), has_lora=has_lora)
        model = self._base.causal_lm
        prefix: str = model.base_model_prefix
        body = getattr(model, prefix)
        self._stub.hidden_1CH = hidden_CH.unsqueeze(0)
        setattr(model, prefix, self._stub)
        try:
            with forward_context(ForwardContext(backend=self._backend, meta=meta, segments=None)):
                return model(inputs_embeds=self._stub.hidden_1CH, use_cache=False).logits[0]
        finally:
            setattr(model, prefix, body)
            del self._stub.hidden_1CH

    def _score_chunk(
        self, hidden_CH: torch.Tensor, targets_C: torch.Tensor, slots_C: torch.Tensor, top_k: int
    ) -> tuple[torch.Tensor, ...]:
        logits_CV = self.logits(hidden_CH, slots_C).float()
        targets_C = targets_C.to(logits_CV.device)
        wanted_C = logits_CV.gather(1, targets_C.clamp(min=0).unsqueeze(1))[:, 0]
        best_C, best_id_C = logits_CV.max(dim=1)
        top_CK, top_id_CK = logits_CV.topk(min(top_k, self._vocab), dim=1)
        # In place: the chunk is the only tensor of its size. A row of -inf alone stays NaN rather than raise.
        norm_C = best_C + logits_CV.sub_(best_C.unsqueeze(1)).exp_().sum(dim=1).log()
        no_target = targets_C == NO_TARGET
        logprob_C = (wanted_C - norm_C).masked_fill(no_target, float("nan"))
        greedy_C = (wanted_C == best_C) & ~no_target
        return logprob_C, greedy_C, best_id_C, best_C - norm_C, top_id_CK, top_CK - norm_C.unsqueeze(1)


def _join(parts: list[tuple[torch.Tensor, ...]]) -> RowScores:
    columns = [torch.cat(column).cpu() for column in zip(*parts, strict=True)]
    return RowScores(
        target_logprob_N=columns[0],
        is_greedy_N=columns[1],
        best_id_N=columns[2],
        best_logprob_N=columns[3],
        top_ids_NK=columns[4],
        top_logprobs_NK=columns[5],
    )
