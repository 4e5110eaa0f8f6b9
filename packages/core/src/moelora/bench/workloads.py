"""The work that is timed: prompts of random tokens, the same in every run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from moelora.errors import ConfigError, choose_from
from moelora.types import BASE_ADAPTER, Request

_SEED = 17


class Task(StrEnum):
    """What is asked of every prompt: the log-probability of each of its tokens, or only the token after it."""

    SCORING = "scoring"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`prompts` prompts of `shortest` to `longest` tokens, lengths drawn evenly. base: a share of them is under it."""

    name: str
    prompts: int
    shortest: int
    longest: int
    base: bool = True

    @property
    def text(self) -> str:
        """For people."""
        size = f"{self.shortest}" if self.shortest == self.longest else f"{self.shortest}–{self.longest}"
        return f"{self.prompts} × {size}"

    def scaled(self, *, prompts: float = 1.0, tokens: float = 1.0) -> Workload:
        """The same with fewer prompts and shorter ones; never less than one prompt of two tokens."""
        return Workload(
            name=self.name,
            prompts=max(round(self.prompts * prompts), 1),
            shortest=max(round(self.shortest * tokens), 2),
            longest=max(round(self.longest * tokens), 2),
            base=self.base,
        )

    def lengths(self) -> list[int]:
        """The length of each prompt: the same ones whenever this is called."""
        draw = random.Random(_SEED)
        return [draw.randint(self.shortest, self.longest) for _ in range(self.prompts)]

    def requests(self, task: Task, *, vocab_size: int, adapters: list[str]) -> list[Request]:
        """The prompts as requests. Request i is under adapter i mod (n + 1): the base first, then `adapters`.

        Without `base` under number i mod n. A single prompt is under the first adapter: it would else be a base run.
        """
        draw = random.Random(_SEED + 1)
        names = [BASE_ADAPTER, *adapters] if (self.base and self.prompts > 1) or not adapters else adapters
        return [
            Request(
                token_ids=draw.choices(range(vocab_size), k=length),
                adapter=names[i % len(names)],
                score_from=0 if task is Task.SCORING else length,
            )
            for i, length in enumerate(self.lengths())
        ]


WORKLOADS = {
    one.name: one
    for one in (
        Workload(name="W1", prompts=256, shortest=256, longest=768),
        Workload(name="W2", prompts=64, shortest=16, longest=256),
        Workload(name="W3", prompts=32, shortest=4096, longest=4096),
        Workload(name="W4", prompts=1, shortest=512, longest=512),
    )
}
"""Ragged prompts of medium length, short ones, long ones, and a single one, whose time rather than rate matters."""


def find_workload(name: str) -> Workload:
    """The workload of that name. Raises `ConfigError` naming the others."""
    if name not in WORKLOADS:
        raise ConfigError(choose_from("workload", name, WORKLOADS))
    return WORKLOADS[name]
