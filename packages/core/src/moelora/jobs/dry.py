"""The limits of a model as its config states them: all that a dry run needs, so that no weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelora.checks import check_request, vocab_size_of
from moelora.errors import CheckpointError
from moelora.models.checkpoint import find_model_folder
from moelora.types import Request, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class DryScorer:
    """Checks requests like an engine, and scores nothing: for runs that ask for no scores."""

    vocab_size: int
    max_positions: int | None
    adapter_names: list[str]

    def check(self, request: Request) -> str | None:
        """Why the request cannot be scored, or None."""
        return check_request(
            request, adapters=self.adapter_names, vocab_size=self.vocab_size, max_positions=self.max_positions
        )

    def score_stream(
        self, requests: Iterable[Request], on_batch: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Result]]:
        """Nothing, of no requests."""
        for _ in requests:
            raise NotImplementedError("a dry run scores nothing")
        yield from ()

    def stop(self) -> bool:
        """There is never a batch to wait for."""
        return False

    def report(self) -> dict[str, Any]:
        """What an engine would say of its batches: there are none."""
        return {}


def dry_scorer(model: str | Path, adapter_names: Sequence[str]) -> DryScorer:
    """Reads the model's config. Raises `CheckpointError` if there is none or it names no vocabulary."""
    from moelora.models.base_model import read_config

    config = read_config(find_model_folder(model)).get_text_config()
    if not getattr(config, "vocab_size", None):
        raise CheckpointError(f"the config of {model} names no vocab_size")
    positions = getattr(config, "max_position_embeddings", None)
    return DryScorer(vocab_size=vocab_size_of(config), max_positions=positions, adapter_names=list(adapter_names))
