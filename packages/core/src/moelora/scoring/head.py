"""From hidden rows to log-probabilities, a chunk of logits at a time.

Letters: N rows to score, H hidden, V vocabulary, C rows of one chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.modeling_outputs import MoeModelOutputWithPast

from moelora.backends.base import Backend, DenseSlots
from moelora.backends.fused_ops import HeadWeights, RowScores
from moelora.batching.packing import HeadRows
from moelora.batching.sequences import NO_TARGET
from moelora.checks import vocab_size_of
from moelora.models.base_model import BaseModel
from moelora.models.context import ForwardContext, forward_context
from moelora.models.decoder import body_name
from moelora.types import BASE_SLOT

_CPU_CHUNK_BYTES = 64 << 20
_CUDA_CHUNK_BYTES = 1 << 30

# From here on the fused head wins: measured on an H200 at a vocabulary of 151,936, where 64 rows are a draw and 1,024
# rows take 1.06 ms against 2.33. Below it reads the whole head as slowly as the library and reduces no faster.
FUSED_ROWS = 256

_ALIKE_ROWS = 16
"""Rows of each chunk of logits if the run is batch-invariant and no fused head knows the model's."""
_LARGE_LOGIT = 100.0
"""The head is recognised on rows with logits up to this one, too."""
_SUM_ERROR = 1e-5
"""Largest difference of two fp32 products, relative to the largest logit of a row."""


class _BodyStub(torch.nn.Module):
    """Stands in for the body while the head runs: hands out hidden states that exist already."""

    hidden_1CH: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        return _BodyOutput(last_hidden_state=self.hidden_1CH)


class _BodyOutput(MoeModelOutputWithPast):
    """Whatever else a head asks of its body's output is None: heads hand it on and do not compute with it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class ScoringHead:
    """lm_head and log-softmax over chosen rows, never over a whole batch.

    The model's own forward runs with its body replaced by a stub, so that whatever it does to its logits (scaling,
    capping) is done here too, for every architecture. Where that proves to be one product, the backend's fused head
    takes its place for many rows, and for all rows if the run is batch-invariant.
    """

    def __init__(
        self,
        base: BaseModel,
        backend: Backend,
        *,
        chunk_rows: int | None = None,
        slots: DenseSlots | None = None,
        replaced: bool = False,
    ) -> None:
        """slots: the bank of lm_head. replaced: some adapter replaces lm_head as a whole, which no fused head knows."""
        self._base = base
        self._slots = slots
        self._fused_head: HeadWeights | None = None
        self._may_fuse = backend.fused_ops is not None and not replaced
        self._backend = backend
        self._vocab = vocab_size_of(base.text_config)
        free = torch.cuda.mem_get_info(base.device)[0] if base.device.type == "cuda" else None
        dtype = base.causal_lm.get_output_embeddings().weight.dtype
        self.chunk_rows = chunk_rows or chunk_rows_of(base.text_config.vocab_size, dtype, free)
        self._stub = _BodyStub()

    def score(self, hidden_TH: torch.Tensor, rows: HeadRows, *, top_k: int) -> RowScores:
        """Scores the rows of a batch; hidden_TH and the result on the device. The fused head waits for nothing."""
        hidden_NH = hidden_TH.index_select(0, rows.position_N)
        if self._fused_head is not None and (rows.count >= FUSED_ROWS or self._backend.batch_invariant):
            ops = self._backend.fused_ops
            assert ops is not None
            x_NH = hidden_NH.to(self._fused_head.weight_VH.dtype)
            scores = ops.score_rows(x_NH, self._fused_head, rows.target_N, rows.slot_N, rows.open_M, top_k)
            if scores is not None:
                return scores
        size, count = self.chunk_rows, rows.count
        if self._backend.batch_invariant:
            # Torch's sums over the vocabulary depend on the number of rows: chunks of one size, the last filled up.
            size = _ALIKE_ROWS
            hidden_NH, rows = _fill(hidden_NH, rows, -count % size)
        parts = [self._score_chunk(hidden_NH, rows, i, i + size, top_k) for i in range(0, rows.count, size)]
        return _join(parts, count)

    def recognise(self, hidden_CH: torch.Tensor) -> None:
        """Finds out whether this model's head is one product, by comparing its logits on a few real hidden rows.

        The product is taken in the dtype of its weight, which some models keep in fp32 whatever the dtype of the body.
        """
        if not self._may_fuse:
            return
        head = self._base.causal_lm.get_output_embeddings()
        weight_VH = head.weight
        # Enlarged rows too: what bends large logits alone, a soft cap, would not show on small ones.
        largest = float(torch.nn.functional.linear(hidden_CH.to(weight_VH.dtype), weight_VH).abs().max())
        hidden_CH = torch.cat([hidden_CH, hidden_CH * (_LARGE_LOGIT / max(largest, _SUM_ERROR))])
        base_slots = torch.full((hidden_CH.shape[0],), BASE_SLOT, dtype=torch.int32)
        own_CV = self.logits(hidden_CH, base_slots.to(hidden_CH.device), has_lora=False)
        bias_V = getattr(head, "bias", None)
        plain_CV = torch.nn.functional.linear(hidden_CH.to(weight_VH.dtype), weight_VH, bias_V)
        if plain_CV.shape != own_CV.shape:  # a head that leaves out padded rows of the vocabulary
            return
        # Both products may be summed and rounded otherwise: the dtype's spacing, and what fp32 sums of thousands lose.
        room = max(4 * max(torch.finfo(x.dtype).eps for x in (own_CV, plain_CV)), _SUM_ERROR)
        own_CV, plain_CV = own_CV.float(), plain_CV.float()
        for scale, softcap in _scalings(self._base.text_config):
            logits_CV = plain_CV * scale
            if softcap is not None:
                logits_CV = softcap * torch.tanh(logits_CV / softcap)
            largest_C1 = own_CV.abs().amax(dim=1, keepdim=True)
            if bool(((own_CV - logits_CV).abs() <= room * largest_C1).all()):
                self._fused_head = HeadWeights(
                    weight_VH=weight_VH,
                    bias_V=bias_V,
                    slots=self._slots,
                    scale=scale,
                    softcap=softcap,
                )
                return

    @property
    def fused(self) -> bool:
        """Whether the fused head serves this model."""
        return self._fused_head is not None

    def logits(self, hidden_CH: torch.Tensor, slots_C: torch.Tensor, *, has_lora: bool) -> torch.Tensor:
        """The model's logits `[C, V]` for hidden rows, LoRA of each row's slot included. slots_C int32, on the device.

        has_lora: False where all rows belong to the base.
        """
        meta = self._backend.rows_metadata(slots_C, has_lora=has_lora)
        model = self._base.causal_lm
        prefix = body_name(model)
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
        self, hidden_NH: torch.Tensor, rows: HeadRows, begin: int, end: int, top_k: int
    ) -> tuple[torch.Tensor, ...]:
        has_lora = bool((rows.slots[begin:end] != BASE_SLOT).any())
        logits_CV = self.logits(hidden_NH[begin:end], rows.slot_N[begin:end], has_lora=has_lora).float()
        target_C = rows.target_N[begin:end]
        first_open, end_open = np.searchsorted(rows.opens, (begin, end))
        open_M = rows.open_M[first_open:end_open] - begin
        wanted_C = logits_CV.gather(1, target_C.clamp(min=0).unsqueeze(1))[:, 0]
        best_C, best_id_C = logits_CV.max(dim=1)
        no_target = target_C == NO_TARGET
        # Only the last row of a request has a top k: for all rows, a k near V would be a batch of logits.
        top_MK, top_id_MK = _best(logits_CV, open_M, min(top_k, self._vocab))
        # In place: the chunk is the only tensor of its size. A row of -inf alone stays NaN rather than raise.
        norm_C = best_C + logits_CV.sub_(best_C.unsqueeze(1)).exp_().sum(dim=1).log()
        logprob_C = (wanted_C - norm_C).masked_fill(no_target, float("nan"))
        greedy_C = (wanted_C == best_C) & ~no_target
        top_MK = top_MK - norm_C[open_M].unsqueeze(1)
        # NaN compares with nothing: a row that holds one has the first ids, here and in the fused head.
        best_id_C.masked_fill_(norm_C.isnan(), 0)
        first_K = torch.arange(top_id_MK.shape[1], device=top_id_MK.device)
        top_id_MK = torch.where(norm_C[open_M].isnan().unsqueeze(1), first_K, top_id_MK)
        return logprob_C, greedy_C, best_id_C, best_C - norm_C, top_id_MK, top_MK


def _best(logits_CV: torch.Tensor, rows_M: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best logits of each chosen row and their ids, best first; equals by ascending id, whatever k is.

    `topk` takes any of equals, and which depends on k, so that a request would notice the top k of its neighbours.
    16-bit logits tie often. Logits and ids are joined into integers that have no equals.
    """
    if k == 0:
        return logits_CV.new_empty(rows_M.numel(), 0), rows_M.new_empty(rows_M.numel(), 0)
    vocab = logits_CV.shape[1]
    back_V = torch.arange(vocab - 1, -1, -1, device=logits_CV.device)
    ids: list[torch.Tensor] = []
    # The integers are twice as wide as the logits: a few rows at a time need no more than the chunk itself.
    for part in rows_M.split(max(logits_CV.shape[0] // 8, 1)):
        # `+ 0.0` makes one of both zeros. Negative floats ascend with falling bits; NaN stays on top, as in `topk`.
        bits = (logits_CV[part] + 0.0).view(torch.int32)
        keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
        ids.append(keys.mul_(vocab).add_(back_V).topk(k, dim=1).indices)
    top_id_MK = torch.cat(ids) if ids else rows_M.new_empty(0, k)
    return logits_CV[rows_M].gather(1, top_id_MK), top_id_MK


def chunk_rows_of(vocab_size: int, dtype: torch.dtype, free: int | None) -> int:
    """Rows of logits held at once. dtype: lm_head's. free: bytes free on a CUDA device, None on the CPU."""
    budget = _CPU_CHUNK_BYTES if free is None else min(_CUDA_CHUNK_BYTES, max(free // 8, _CPU_CHUNK_BYTES))
    return max(1, budget // row_bytes(vocab_size, dtype))


def row_bytes(vocab_size: int, dtype: torch.dtype) -> int:
    """Bytes of one row of logits while it is scored: in the dtype of lm_head and in fp32."""
    return vocab_size * (dtype.itemsize + 4)


def _scalings(config: Any) -> list[tuple[float, float | None]]:
    """What architectures do to their logits, by their config's names: (scale, soft cap) to try."""
    softcap = getattr(config, "final_logit_softcapping", None)
    found: list[tuple[float, float | None]] = [(1.0, None)]
    if softcap:
        found.append((1.0, float(softcap)))
    if getattr(config, "logits_scaling", None):
        found.append((1.0 / float(config.logits_scaling), None))
    if getattr(config, "logit_scale", None):
        found.append((float(config.logit_scale), None))
    return found


def _fill(hidden_NH: torch.Tensor, rows: HeadRows, more: int) -> tuple[torch.Tensor, HeadRows]:
    """`more` base rows behind the others, whose scores nobody reads."""
    if more == 0:
        return hidden_NH, rows
    return torch.cat([hidden_NH, hidden_NH[-1:].expand(more, -1)]), replace(
        rows,
        target_N=torch.cat([rows.target_N, rows.target_N.new_zeros(more)]),
        slot_N=torch.cat([rows.slot_N, rows.slot_N.new_full((more,), BASE_SLOT)]),
        slots=np.concatenate([rows.slots, np.full(more, BASE_SLOT, rows.slots.dtype)]),
    )


def _join(parts: list[tuple[torch.Tensor, ...]], count: int) -> RowScores:
    """The scores of `count` rows from those of their chunks, the last of which may hold more."""
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return RowScores(
        target_logprob_N=columns[0][:count],
        is_greedy_N=columns[1][:count],
        best_id_N=columns[2][:count],
        best_logprob_N=columns[3][:count],
        top_ids_MK=columns[4],
        top_logprobs_MK=columns[5],
    )
