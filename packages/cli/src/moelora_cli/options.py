"""Options that several commands take, and what each command makes of them. Imports click alone."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from moelora.errors import ConfigError

if TYPE_CHECKING:
    from moelora.engine import EngineOptions
    from moelora.jobs.run import JobOptions


class AtLeast(click.IntRange):
    """An integer from `min` on. click's own calls it an "integer range" where it refuses what is no integer at all."""

    name = "integer"


POSITIVE = AtLeast(min=1)
NOT_NEGATIVE = AtLeast(min=0)


class DeviceType(click.ParamType):
    """auto, cpu, cuda or cuda:N."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuses what cannot name a device; whether the device is there, the engine finds out."""
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value)):
            self.fail(f"{value!r} is no device; valid: auto, cpu, cuda, cuda:N", param, ctx)
        return str(value)


class BucketsType(click.ParamType):
    """Token counts, ascending, joined by commas."""

    name = "buckets"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """A tuple of ascending positive integers."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(re.fullmatch(r"[0-9]{1,12}", part) for part in parts):
            self.fail(f"{value!r} is no list of token counts like 16,64,256", param, ctx)
        sizes = tuple(int(part) for part in parts)
        if sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
            self.fail(f"{value!r}: token counts must be positive and ascend", param, ctx)
        return sizes


def _all(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator for several options, which stand in the help in this order."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


model_options = _all(
    click.argument("model"),
    click.option(
        "--adapters",
        multiple=True,
        metavar="NAME=PATH|FOLDER|FILE.jsonl",
        help="An adapter, a folder of adapters, or a list with name and path; repeatable.",
    ),
)
"""The base model and its adapters."""

row_options = _all(
    click.option(
        "--default-adapter",
        metavar="NAME",
        help="For rows that name none: a name, * (all; the default if there are adapters) or __base__.",
    ),
    click.option("--with-base", is_flag=True, help="Let * include the base model."),
    click.option("--max-length", type=POSITIVE, help="Most tokens of a prompt with its longest choice."),
    click.option(
        "--on-long",
        type=click.Choice(["error", "truncate-left"]),
        default="error",
        show_default=True,
        help="What becomes of a longer row: an error, or the prompt is cut on its left.",
    ),
)
"""How rows become requests."""

score_options = _all(
    click.option(
        "--logprobs",
        type=click.Choice(["sum", "tokens"]),
        default="sum",
        show_default=True,
        help="Only the sum over the prompt, or each token's log-probability too.",
    ),
    click.option("--top-k", type=NOT_NEGATIVE, default=0, show_default=True, help="Best tokens after the prompt."),
)
"""What is said of each row."""

share_options = _all(
    click.option(
        "--devices",
        metavar="all|0,1|cpu:N",
        help="One worker process per device (all GPUs, these, or N on the CPU) over one input and output.",
    ),
    click.option(
        "--shard",
        metavar="I/N|auto",
        help="Score the I-th of N parts (from 0) into the folder --output; auto: as torchrun or Slurm say.",
    ),
)
"""How the input is shared between processes."""

_WHERE = (
    click.option(
        "--device",
        type=DeviceType(),
        metavar="auto|cpu|cuda|cuda:N",
        default="auto",
        show_default=True,
        help="Where to run; auto: CUDA if there is any.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
        default="auto",
        show_default=True,
        help="Of weights and activations; auto: the checkpoint's own on CUDA, float32 on the CPU.",
    ),
)

_LOAD_FORMAT = click.option(
    "--load-format",
    type=click.Choice(["auto", "safetensors", "dummy"]),
    default="auto",
    show_default=True,
    help="dummy: random weights from the config alone.",
)

base_options = _all(*_WHERE, _LOAD_FORMAT)
"""Where a model runs, and what it is read from."""

attention_option = click.option(
    "--attention",
    type=click.Choice(["auto", "triton", "fa4"]),
    default="auto",
    show_default=True,
    help="Kernel of attention (triton and csgmv); auto: FlashAttention 4, if installed, where it was faster.",
)
"""Which kernel attention runs on."""

engine_options = _all(
    click.option(
        "--backend",
        default="auto",
        show_default=True,
        metavar="auto|triton|csgmv|torch",
        help="LoRA kernels; auto: triton on CUDA, torch elsewhere. MODULE:CLASS is one of your own.",
    ),
    click.option(
        "--graph",
        type=click.Choice(["auto", "full", "breakable", "off"]),
        default="auto",
        show_default=True,
        help="CUDA graphs of the body; auto: the faster of graph and eager for each bucket.",
    ),
    *_WHERE,
    click.option("--max-tokens", type=POSITIVE, help="Most tokens of one batch; a longer sequence runs alone."),
    click.option("--max-requests", type=POSITIVE, help="Most requests of one batch."),
    click.option("--slots", type=POSITIVE, help="Adapters that lie on the device at once."),
    click.option("--buckets", type=BucketsType(), metavar="N,N,…", help="Token counts to capture graphs for."),
    _LOAD_FORMAT,
    attention_option,
    click.option(
        "--batch-invariant",
        is_flag=True,
        help="Same bits for a row, whatever shares its batch (triton and csgmv, on CUDA).",
    ),
    click.option(
        "--lora-b-layout",
        type=click.Choice(["rank_major", "grouped_by_expert"]),
        help="Column order of B in adapters of fused experts that do not state it.",
    ),
    click.option("--seed", type=NOT_NEGATIVE, default=0, show_default=True, help="For --load-format dummy."),
)
"""How the engine runs."""


def engine_options_of(options: dict[str, Any]) -> EngineOptions:
    """What `engine_options` gave, for the engine."""
    from moelora.engine import EngineOptions
    from moelora.types import GraphMode

    return EngineOptions(
        backend=options["backend"],
        graph=GraphMode(options["graph"]),
        device=options["device"],
        dtype=options["dtype"],
        max_tokens=options["max_tokens"],
        max_requests=options["max_requests"],
        slots=options["slots"],
        buckets=options["buckets"],
        load_format=options["load_format"],
        attention=options["attention"],
        batch_invariant=options["batch_invariant"],
        lora_b_layout=options["lora_b_layout"],
        seed=options["seed"],
    )


def job_options_of(options: dict[str, Any], names: list[str]) -> JobOptions:
    """What `row_options` gave, and `score_options` where the command has them. Refuses an unknown default adapter."""
    from moelora.jobs.run import JobOptions, default_adapters

    job_options = JobOptions(
        default_adapter=options["default_adapter"],
        with_base=options["with_base"],
        logprobs=options.get("logprobs", "sum"),
        top_k=options.get("top_k", 0),
        max_length=options["max_length"],
        on_long=options["on_long"],
    )
    default_adapters(job_options, names)
    return job_options


def is_stream(source: str) -> bool:
    """Whether an input can be read only once: standard input, a named pipe, what a shell puts in for `<(…)`."""
    return source == "-" or (os.path.exists(source) and not os.path.isfile(source) and not os.path.isdir(source))


@contextlib.contextmanager
def stdout_for_results() -> Iterator[BinaryIO | None]:
    """Keeps standard output for results (None if it is closed): what libraries print goes to stderr meanwhile."""
    stdout = None if sys.stdout is None else sys.stdout.buffer
    with contextlib.redirect_stdout(sys.stderr):
        yield stdout


def refuse_closed(stdout: BinaryIO | None, output: str | None) -> None:
    """Raises `ConfigError` if `output` is "-" and standard output was closed by whoever started us."""
    if stdout is None and output == "-":
        raise ConfigError("standard output is closed; give --output FILE")


def quiet_libraries() -> None:
    """Keeps bars and hints of the libraries off stderr; warnings of what a user could change, and errors, stay."""
    # Of transformers about an attribute that PEFT reads; it comes with every model that PEFT wraps.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()
