"""`moelora bench`: throughput, share of the floor, cost of LoRA, gain of graphs, on workloads of random prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from moelora.errors import ConfigError
from moelora_cli.bench_tables import tables
from moelora_cli.command import EXIT_DONE, MoeloraCommand
from moelora_cli.options import (
    NOT_NEGATIVE,
    POSITIVE,
    BucketsType,
    attention_option,
    base_options,
    quiet_libraries,
    stdout_for_results,
)
from moelora_cli.progress import Progress

if TYPE_CHECKING:
    from moelora.bench.run import BenchOptions
    from moelora.engine import EngineOptions

_QUICK = 1 / 8
_QUICK_REPEAT = 2


@click.command(cls=MoeloraCommand, short_help="Throughput, LoRA overhead, graph gain, share of the floor.")
@click.argument("model")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="W1|W2|W3|W4",
    help="256 prompts of 256–768 tokens, 64 of 16–256, 32 of 4,096, one of 512; repeatable. Default: all.",
)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    type=click.Choice(["scoring", "prefill"]),
    help="Log-probabilities of every token, or the next token alone; repeatable. Default: both.",
)
@click.option(
    "--adapters",
    multiple=True,
    type=NOT_NEGATIVE,
    metavar="N",
    default=(8,),
    show_default=True,
    help="Random adapters on q, k, v, o and all experts; prompt i is under number i mod (N + 1), 0: base; "
    "a single prompt is under the first adapter; repeatable.",
)
@click.option("--without-base", is_flag=True, help="Prompt i is under adapter i mod N, none under the base.")
@click.option(
    "--rank", "ranks", multiple=True, type=POSITIVE, default=(16,), show_default=True, help="Their rank; repeatable."
)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    default=("auto",),
    show_default=True,
    metavar="auto|triton|csgmv|torch",
    help="LoRA kernels; repeatable.",
)
@click.option(
    "--graph",
    "graphs",
    multiple=True,
    type=click.Choice(["auto", "full", "breakable", "off"]),
    default=("auto",),
    show_default=True,
    help="CUDA graphs; repeatable: the gain is that over off.",
)
@click.option("--peer", type=click.Choice(["transformers"]), help="The same work on transformers with PEFT as well.")
@click.option("--repeat", type=POSITIVE, default=5, show_default=True, help="Timed calls; the median counts.")
@attention_option
@click.option("--batch-invariant", is_flag=True, help="Time runs whose rows have the same bits in any batch.")
@click.option(
    "--max-tokens",
    type=POSITIVE,
    default=16384,
    show_default=True,
    help="Most tokens of one batch; a longer prompt runs alone.",
)
@click.option("--buckets", type=BucketsType(), metavar="N,N,…", help="Graphs to capture. Default: what is needed.")
@click.option("--layers", type=POSITIVE, help="Cut the model to so many layers; needs --load-format dummy.")
@click.option(
    "--scale",
    type=click.FloatRange(min=0, max=1000, min_open=True),
    default=1.0,
    show_default=True,
    help="Fewer and shorter prompts by this factor; above 1, more of them.",
)
@click.option("--quick", is_flag=True, help="An eighth of the prompts, two timed calls, no profile.")
@click.option("--no-profile", is_flag=True, help="Leave out the time by part, which needs one more call each.")
@base_options
@click.option("--seed", type=NOT_NEGATIVE, default=0, show_default=True, help="For random weights.")
@click.option("--json", "json_", metavar="FILE|-", help="All numbers as one JSON object; - is standard output.")
@click.option(
    "--plot",
    metavar="FILE",
    help="Shares of the floor as bars, with tokens per second: .png, .svg or .pdf; needs matplotlib.",
)
@click.option("--quiet", is_flag=True, help="No progress.")
def bench(**options: Any) -> int:
    """Times MODEL on random prompts: with adapters and without, beside the least time that the device would allow.

    Times are taken around the whole call, results on the host included, after one call that warms up. The ceilings of
    the device are measured in the same run.
    """
    with stdout_for_results() as stdout:
        return _bench(options, stdout)


def _bench(options: dict[str, Any], stdout: BinaryIO | None) -> int:
    if stdout is None:
        raise ConfigError("standard output is closed, and nothing else would be written")
    for path in (options["json_"], options["plot"]):
        _check_writable(path)
    plot = _plotter(options["plot"])
    with Progress(quiet=options["quiet"]) as progress:
        quiet_libraries()
        from moelora.bench.run import run_bench

        report = run_bench(options["model"], _bench_options(options), _engine_options(options), progress.event)
    facts = json.dumps(report.facts(), indent=2, ensure_ascii=False).encode() + b"\n"
    if options["json_"] == "-":
        stdout.write(facts)
    else:
        stdout.write(tables(report).encode())
    stdout.flush()
    if options["json_"] not in (None, "-"):
        Path(options["json_"]).write_bytes(facts)
    plot(report)
    return EXIT_DONE


def _check_writable(path: str | None) -> None:
    """Refuses before any work a file that could not be written after it."""
    if path is None or path == "-":
        return
    if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a folder, or its folder does not exist")


def _plotter(path: str | None) -> Callable[[Any], None]:
    """Draws the report into `path`. Refuses before any work what could not be drawn after it."""
    if path is None:
        return lambda report: None
    from moelora_cli.bench_plot import check_plot, draw

    check_plot(path)
    return lambda report: draw(report, path)


def _bench_options(options: dict[str, Any]) -> BenchOptions:
    from moelora.bench.run import BenchOptions
    from moelora.bench.workloads import WORKLOADS, Task, find_workload
    from moelora.types import GraphMode

    quick = options["quick"]
    chosen = [find_workload(name) for name in options["workloads"]] or list(WORKLOADS.values())
    return BenchOptions(
        workloads=tuple(
            replace(one, base=not options["without_base"]).scaled(
                prompts=options["scale"] * (_QUICK if quick else 1), tokens=min(options["scale"], 1.0)
            )
            for one in chosen
        ),
        tasks=tuple(Task(name) for name in options["tasks"]) or tuple(Task),
        backends=options["backends"],
        graphs=tuple(GraphMode(name) for name in options["graphs"]),
        adapters=options["adapters"],
        ranks=options["ranks"],
        repeat=min(options["repeat"], _QUICK_REPEAT) if quick else options["repeat"],
        layers=options["layers"],
        profile=not (quick or options["no_profile"]),
        peer=options["peer"] is not None,
    )


def _engine_options(options: dict[str, Any]) -> EngineOptions:
    from moelora.engine import EngineOptions

    return EngineOptions(
        device=options["device"],
        dtype=options["dtype"],
        max_tokens=options["max_tokens"],
        buckets=options["buckets"],
        load_format=options["load_format"],
        seed=options["seed"],
        attention=options["attention"],
        batch_invariant=options["batch_invariant"],
    )
