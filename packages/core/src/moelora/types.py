"""The nouns of moelora: requests and their results, the packed batch, phases and modes. No behaviour belongs here.

Shape letters, used as suffixes of tensor names everywhere: T tokens, S request slots, L adapter slots, E experts,
K experts per token, H hidden, I expert width, R rank, V vocabulary, P pairs (= T·K), N rows to score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

BASE_ADAPTER = "__base__"
"""The name of the base model wherever an adapter's name may stand."""

BASE_SLOT = -1
"""The slot of rows that belong to the base model."""


class Phase(StrEnum):
    """What a forward does. Each phase owns its static buffers.

    Attributes:
        PREFILL: Scores whole prompts, several in one forward: all that moelora runs.
        DECODE: Extends each sequence by a token. Reserved for backends that decode; nothing here does.
    """

    PREFILL = "prefill"
    DECODE = "decode"


class GraphMode(StrEnum):
    """What a user asks for with `--graph`.

    Attributes:
        AUTO: Full where it can be captured, else breakable; each bucket eagerly if that was measured to be faster.
        FULL: One CUDA graph of the whole decoder body per bucket.
        BREAKABLE: Graphs of the parts between attentions, which run eagerly on live rows.
        OFF: No graphs.
    """

    AUTO = "auto"
    FULL = "full"
    BREAKABLE = "breakable"
    OFF = "off"


class RunMode(StrEnum):
    """What a batch really did.

    Attributes:
        FULL: It replayed one graph of the whole body.
        BREAKABLE: It replayed the parts between attentions.
        EAGER: It ran without a graph; `EagerReason` says why.
    """

    FULL = "full"
    BREAKABLE = "breakable"
    EAGER = "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One token sequence to score under one adapter.

    Attributes:
        token_ids: At least one token, each in [0, V).
        adapter: A name the engine knows, or `BASE_ADAPTER`.
        choices: Continuations of `token_ids`, each of at least one token. The context runs once for each choice;
            choices that differ in their last token alone, such as those of one token, share a run. The log-probability
            of each is summed over its own tokens only.
        top_k: How many of the most likely tokens after the last one are wanted, in [0, V].
        score_from: The first position whose log-probability is wanted, in [0, len(token_ids)]. Position 0 has none, so
            its entry is None.
    """

    token_ids: Sequence[int]
    adapter: str = BASE_ADAPTER
    choices: Sequence[Sequence[int]] = ()
    top_k: int = 0
    score_from: int = 0


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token and its log-probability.

    Attributes:
        token_id: In [0, V).
        logprob: log p(token | what stands before), in nats.
    """

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceScore:
    """The score of one choice of a request.

    Attributes:
        token_ids: The choice, as the request gave it.
        logprob: The sum of log p(token | context, earlier tokens of the choice), in nats.
        num_tokens: Of the choice alone.
        is_greedy: Every token of the choice was the most likely one at its position.
    """

    token_ids: tuple[int, ...]
    logprob: float
    num_tokens: int
    is_greedy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The scores of one request, or the reason why it has none.

    Attributes:
        num_tokens: Tokens of the request, without its choices.
        logprob_sum: The sum of the entries of `token_logprobs` that are not None, in nats.
        token_logprobs: Entry i is log p(t_j | t_<j) in nats with j = `score_from` + i; that of position 0 is None.
        is_greedy: Every scored token was the most likely one at its position, or as likely as that.
        next_token: The most likely token after the last one; None if nothing was scored.
        top_logprobs: The `top_k` most likely tokens there, best first, equals by ascending id.
        choices: One score per choice, in the order of the request.
        mode: What the batch of the request did; of several, the last.
        error: None, or why there are no scores, or which of them are not finite.
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
class HostRows:
    """The rows of a packed batch as arrays of the host.

    id_T, position_T: int64; positions restart at 0 with each sequence. boundary_S1: int32, the sequences' lengths
    cumulated from 0. slot_T: int32, the adapter slot of each token or -1.
    """

    id_T: np.ndarray
    position_T: np.ndarray
    boundary_S1: np.ndarray
    slot_T: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """The sequences that go through the model in one forward, one behind the other without padding.

    `lengths` and `slots`: one entry per sequence. `input_ids_T`, `position_ids_T`, `cu_seqlens_S1`, `token_slot_T`: the
    arrays of `host` on the `device`, sent in one copy when one of them is first asked for. A graph never asks: what it
    reads lies in buffers of its own, which are filled from `host`.
    """

    host: HostRows
    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    device: torch.device

    @property
    def num_tokens(self) -> int:
        """Live tokens, without padding."""
        return self.host.id_T.size

    @property
    def num_sequences(self) -> int:
        """Live sequences."""
        return len(self.lengths)

    @property
    def input_ids_T(self) -> torch.Tensor:
        """Token ids, int64 on the device."""
        return self._sent[0]

    @property
    def position_ids_T(self) -> torch.Tensor:
        """Positions, int64 on the device."""
        return self._sent[1]

    @property
    def cu_seqlens_S1(self) -> torch.Tensor:
        """Boundaries of the sequences, int32 on the device."""
        return self._sent[2]

    @property
    def token_slot_T(self) -> torch.Tensor:
        """The adapter slot of each token or -1, int32 on the device."""
        return self._sent[3]

    @cached_property
    def _sent(self) -> list[torch.Tensor]:
        from moelora.batching.transfer import send

        return send([getattr(self.host, one.name) for one in fields(HostRows)], self.device)
