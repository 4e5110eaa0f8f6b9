"""The nouns of moelora: requests and their results, the packed batch, phases and modes. Holds no behaviour.

Shape letters, used as suffixes of tensor names everywhere: T tokens, S request slots, L adapter slots, E experts,
K experts per token, H hidden, I expert width, R rank, V vocabulary, P pairs (= T·K), N rows to score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BASE_ADAPTER = "__base__"
"""The name of the base model wherever an adapter's name may stand."""

BASE_SLOT = -1
"""The slot of rows that belong to the base model."""


class Phase(StrEnum):
    """Prefill scores whole prompts; decode extends them. Each owns its static buffers."""

    PREFILL = "prefill"
    DECODE = "decode"


class GraphMode(StrEnum):
    """What a user asks for with `--graph`."""

    AUTO = "auto"
    FULL = "full"
    BREAKABLE = "breakable"
    OFF = "off"


class RunMode(StrEnum):
    """What a batch really did."""

    FULL = "full"
    BREAKABLE = "breakable"
    EAGER = "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One token sequence to score under one adapter.

    `token_ids` has at least one token, each in `[0, vocab_size)`. `choices` are continuations of it, each with at least
    one token; the log-probability of each is summed over its own tokens only. `top_k` asks for the k most likely
    tokens of the position after the last one. `score_from` is the first position whose log-probability is wanted;
    position 0 has none, so its entry is None.
    """

    token_ids: Sequence[int]
    adapter: str = BASE_ADAPTER
    choices: Sequence[Sequence[int]] = ()
    top_k: int = 0
    score_from: int = 0


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token and its log-probability in nats."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceScore:
    """One choice of a request: the sum of log p(token | context, earlier choice tokens), in nats."""

    token_ids: tuple[int, ...]
    logprob: float
    num_tokens: int
    is_greedy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The scores of one request, or the reason why it has none.

    `token_logprobs[i]` is log p(t_j | t_<j) in nats with j = `score_from` + i; the entry of position 0 is None.
    `logprob_sum` sums the entries that are not None. `is_greedy`: every scored token was the arg-max of its position.
    `next_token` is the arg-max after the last token; `top_logprobs` are the `top_k` best there, best first. A row whose
    scores are not finite keeps them and says so in `error`.
    """

    num_tokens: int
    logprob_sum: float = 0.0
    token_logprobs: list[float | None] = field(default_factory=list)
    is_greedy: bool = True
    next_token: TokenScore | None = None
    top_logprobs: list[TokenScore] = field(default_factory=list)
    choices: list[ChoiceScore] = field(default_factory=list)
    mode: RunMode = RunMode.EAGER
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """The sequences that go through the model in one forward, one behind the other without padding.

    `input_ids_T`, `position_ids_T`: int64 on the device; positions restart at 0 with each sequence.
    `cu_seqlens_S1`: int32 on the device, `lengths` cumulated from 0. `token_slot_T`: int32 on the device, the adapter
    slot of each token or -1. `lengths` and `slots` are the same facts on the host, one entry per sequence.
    """

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    cu_seqlens_S1: torch.Tensor
    token_slot_T: torch.Tensor
    lengths: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Live tokens, without padding."""
        return sum(self.lengths)

    @property
    def num_sequences(self) -> int:
        """Live sequences."""
        return len(self.lengths)
