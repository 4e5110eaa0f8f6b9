"""The small batches that an engine runs before any other: the model runs, and every adapted target is reached."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from moelora.adapters.bank import BankLayout
from moelora.batching.packing import pack
from moelora.batching.sequences import Sequence
from moelora.capacity import PrefillCapacity
from moelora.checks import vocab_size_of
from moelora.errors import CheckpointError
from moelora.graphs.eager import EagerRunner
from moelora.models.base_model import BaseModel
from moelora.models.lora import InstalledLora
from moelora.models.projections import Projections
from moelora.models.residual_sums import ResidualSums, seeing_residual_sums
from moelora.models.rotary import NormsBeforeRotary, seeing_norms_before_rotary
from moelora.models.substitutes import Substitutes
from moelora.scoring.head import ScoringHead
from moelora.types import BASE_ADAPTER, BASE_SLOT

_PROBE_TOKENS = 149
"""A prime that no other dimension of a model has or divides, and longer than what indexers and compressors wait for.

Two thirds of it are more than the chunks of 64 tokens that kernels of linear attention cut a request into.
"""

_HEAD_ROWS = 3
"""As many rows as no other dimension of a head has: an adapter that replaces it learns here where they are counted."""

_MODEL_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError)
"""What a model's code raises where it cannot run."""

_AGREES = 1e-2
"""Of the norm of what a body gives: kernels may be others where rows lie apart, and round otherwise."""


def check_installed(
    installed: InstalledLora,
    *,
    base: BaseModel,
    runner: EagerRunner,
    head: ScoringHead,
    layout: BankLayout,
    capacity: PrefillCapacity,
    max_positions: int | None,
    substitutes: Substitutes,
) -> None:
    """Runs one batch of base rows, and others of them where something is to be found out: see the functions below.

    max_positions: as `PrefillEngine.max_positions`. `installed` counts calls, and stops checking after this.
    substitutes: takes in what turns out to be possible together.

    Raises:
        CheckpointError: If the model does not run.
        AdapterError: If the model does not call a target, or calls it with what is no row per token.
    """
    length = _prime(min(_PROBE_TOKENS, capacity.max_tokens, max_positions or _PROBE_TOKENS))
    with seeing_residual_sums(base.body) as sums, seeing_norms_before_rotary(base.body) as norms:
        hidden_TH = _try_alone(base, runner, head, length)
    installed.check_calls()
    projections = installed.projections
    projections.rows_apart = projections.any_joined and _reads_rows_apart(projections, base, runner, hidden_TH)
    depends_on_others = bool(base.functions) or bool(layout.replaced)
    if depends_on_others and capacity.max_requests > 1 and capacity.max_tokens > 1:
        # What cannot tell two requests of a batch apart shows it now: kernels that know boundaries are then used for
        # all batches alike, and modules that some adapter replaces must see rows of tokens.
        with torch.inference_mode():
            _run_together(base, runner, _prime(min(_PROBE_TOKENS, capacity.max_tokens)))
    _switch_on_what_is_equal([*sums, *norms], substitutes, base, runner, capacity, length)
    installed.checking = False


@torch.inference_mode()
def _try_alone(base: BaseModel, runner: EagerRunner, head: ScoringHead, length: int) -> torch.Tensor:
    """One request of `length` tokens, through body and head. Returns what the body gave, `[T, H]`."""
    try:
        hidden_TH = _run_alone(base, runner, length)
        base_rows = torch.full((_HEAD_ROWS,), BASE_SLOT, dtype=torch.int32, device=base.device)
        head.logits(hidden_TH[-1:].repeat(_HEAD_ROWS, 1), base_rows, has_lora=False)
        head.recognise(hidden_TH[-2:])
    except torch.OutOfMemoryError:
        raise
    except _MODEL_ERRORS as error:
        model_type, dtype = base.architecture.model_type, str(base.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"moelora cannot run {model_type} in {dtype} ({type(error).__name__}: {error})"
        ) from error
    return hidden_TH


@torch.inference_mode()
def _reads_rows_apart(
    projections: Projections, base: BaseModel, runner: EagerRunner, expected_TH: torch.Tensor
) -> bool:
    """Whether the model gives the same when rows of its projections lie apart: some views cannot be made then."""
    try:
        with projections.spreading():
            hidden_TH = _run_alone(base, runner, expected_TH.shape[0])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return bool((hidden_TH - expected_TH).norm() <= _AGREES * expected_TH.norm())


@torch.inference_mode()
def _switch_on_what_is_equal(
    fusions: Iterable[ResidualSums | NormsBeforeRotary],
    substitutes: Substitutes,
    base: BaseModel,
    runner: EagerRunner,
    capacity: PrefillCapacity,
    length: int,
) -> None:
    """Keeps on those of `fusions` with which the model gives the same, bit for bit, as without them.

    Two requests show it where there may be two, and one of several tokens among them: some modules run each by itself,
    and a token alone attends to itself whatever its query is.
    """
    found = [fusion for fusion in fusions if fusion.labels]
    if not found:
        return
    run = _run_together if capacity.max_requests > 1 and length > 2 else _run_alone
    expected_TH = run(base, runner, length)
    for fusion in found:
        fusion.switch(True)
        try:
            equal = torch.equal(run(base, runner, length), expected_TH)
        except torch.OutOfMemoryError:
            raise
        except _MODEL_ERRORS:
            equal = False
        fusion.switch(equal)
        (substitutes.used if equal else substitutes.kept).update(fusion.labels)


def _run_alone(base: BaseModel, runner: EagerRunner, length: int) -> torch.Tensor:
    return runner.run(pack([_base_rows(_tokens(base, length))], {}, base.device)).hidden_TH


def _run_together(base: BaseModel, runner: EagerRunner, total: int) -> torch.Tensor:
    """What the body gives for two requests of `total` tokens, in one batch."""
    second, ids = max(total // 3, 1), _tokens(base, total)
    return runner.run(pack([_base_rows(ids[:n]) for n in (total - second, second)], {}, base.device)).hidden_TH


def _tokens(base: BaseModel, count: int) -> tuple[int, ...]:
    """Ids that differ: one alone may have an embedding of zeros, as padding tokens do, and shows nothing then."""
    vocab_size = vocab_size_of(base.text_config)
    return tuple(i % vocab_size for i in range(count))


def _base_rows(token_ids: tuple[int, ...]) -> Sequence:
    return Sequence(request=0, adapter=BASE_ADAPTER, token_ids=token_ids, runs=(), top_k=0)


def _prime(most: int) -> int:
    """The largest prime up to `most`, or 1."""
    return next((n for n in range(most, 1, -1) if all(n % i for i in range(2, n))), 1)
