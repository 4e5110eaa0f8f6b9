"""`moelora tune`: the fastest blocks of the experts' kernels for this GPU and a model's shape, into a table."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moelora.errors import ConfigError
from moelora_cli.command import EXIT_DONE, MoeloraCommand
from moelora_cli.options import BucketsType, DeviceType, quiet_libraries, stdout_for_results
from moelora_cli.progress import Progress

if TYPE_CHECKING:
    from moelora_kernels.ops.experts.table import Tuned


@click.command(cls=MoeloraCommand, short_help="Fit the experts' kernels to this GPU and a model's shape.")
@click.argument("model")
@click.option("--tokens", type=BucketsType(), metavar="N,N,…", help="Token counts to tune. Default: 128 to 16,384.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16"]),
    default="bfloat16",
    show_default=True,
    help="Of weights and activations.",
)
@click.option(
    "--device",
    type=DeviceType(),
    metavar="auto|cuda|cuda:N",
    default="auto",
    show_default=True,
    help="The GPU to tune for.",
)
@click.option(
    "--output",
    metavar="FOLDER",
    help="Where the table is kept; runs find it if MOELORA_TUNED names the folder. Default: in moelora-kernels.",
)
@click.option("--quiet", is_flag=True, help="No progress.")
def tune(**options: Any) -> int:
    """Times the experts' kernels at many block sizes, with random weights of MODEL's shape, and keeps the fastest.

    A folder with a config is enough. Block sizes whose results differ from the built-in ones in any bit are refused.
    The table has one file per GPU; shapes that were tuned before stay in it.
    """
    with stdout_for_results() as stdout, Progress(quiet=options["quiet"]) as progress:
        if stdout is None:
            raise ConfigError("standard output is closed, and nothing else would be written")
        quiet_libraries()
        stdout.write(_tune(options, progress).encode())
        stdout.flush()
    return EXIT_DONE


def _tune(options: dict[str, Any], progress: Progress) -> str:
    """Tunes every kind of experts layer of the model, writes the table, and returns what to print."""
    if find_spec("moelora_kernels") is None:
        raise ConfigError("there is nothing to tune without kernels: install the package moelora-kernels")
    from moelora.environment import resolve_device
    from moelora.models.base_model import DTYPES, open_base
    from moelora.models.experts import is_experts_module, moe_shapes
    from moelora_kernels.ops.experts.table import ExpertsKey, device_name, load_table, save_table, table_path
    from moelora_kernels.tune import TOKENS, layer_weights, tune_experts

    device, dtype = resolve_device(options["device"]), DTYPES[options["dtype"]]
    if device.type != "cuda":
        raise ConfigError(f"the experts' kernels are tuned on a CUDA device, not on {device}")
    source = open_base(options["model"], load_format="dummy")
    config = source.config.get_text_config()
    layers = [module for module in source.skeleton().modules() if is_experts_module(module)]
    if not layers:
        raise ConfigError(f"{source.architecture.model_type} has no routed experts: there is nothing to tune")
    kinds = {shape: layer for layer in layers for shape in moe_shapes(layer, config, {})}
    path = table_path(device_name(device), Path(options["output"]) if options["output"] else None)
    table = load_table(path) if path.exists() else {}
    printed = []
    for shape, layer in kinds.items():
        named = f"{shape.num_experts} experts of {shape.hidden} × {shape.inter} in {options['dtype']}"
        progress.event(f"tuning {named}")
        base = layer_weights(layer, device, dtype)
        tuned: list[Tuned] = []
        for one in tune_experts(base, shape, tokens=options["tokens"] or TOKENS, on_event=progress.event):
            tuned.append(one)
            table[ExpertsKey.of(base, shape.top_k)] = tuple(tuned)
            save_table(path, table)  # minutes lie between two of them
        printed.append(
            _lines(f"{shape.num_experts} experts of {shape.hidden} × {shape.inter}, {options['dtype']}", tuned)
        )
    printed.append(f"written to {path}\n")
    return "".join(printed)


def _lines(title: str, tuned: Sequence[Tuned]) -> str:
    """What was found for one shape, a line for each token count."""
    lines = [title, f"{'tokens':>8} {'built in':>10} {'tuned':>10}  {'rows':>4}  up, down: columns/warps/stages/group"]
    for one in tuned:
        blocks = (f"{p.block_n}/{p.warps}/{p.stages}/{p.group}" for p in (one.config.up, one.config.down))
        times = f"{one.tokens:8,} {one.default_ms:7.3f} ms {one.ms:7.3f} ms"
        lines.append(f"{times}  {one.config.block_m:4}  {', '.join(blocks)}")
    return "\n".join(lines) + "\n"
