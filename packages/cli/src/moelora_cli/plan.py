"""`moelora plan`: what `prefill` with the same options would do. Loads no weights."""

from __future__ import annotations

import json
from typing import Any, BinaryIO

import click

from moelora.errors import ConfigError
from moelora.wording import counted, repeated
from moelora_cli.command import EXIT_DONE, EXIT_REFUSED, EXIT_ROW_ERRORS, MoeloraCommand, size
from moelora_cli.layout import entry
from moelora_cli.options import (
    engine_options,
    engine_options_of,
    is_stream,
    job_options_of,
    model_options,
    quiet_libraries,
    row_options,
    score_options,
    share_options,
    stdout_for_results,
)
from moelora_cli.progress import Progress
from moelora_cli.workers import check_devices, device_names


@click.command(cls=MoeloraCommand, short_help="What prefill would do: batches, fallbacks, memory.")
@model_options
@click.option(
    "--input", "input_", required=True, metavar="FILE|-", help="Rows: JSON Lines or Parquet; - is standard input."
)
@row_options
@score_options
@engine_options
@share_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", is_flag=True, help="No progress.")
def plan(**options: Any) -> int:
    """Shows what `moelora prefill` with the same options would do, without loading weights or scoring.

    Reads the config, the headers of checkpoint and adapters, and all of --input. The exit code is that of the run as
    far as it can be known: 3 if some rows have errors, 2 if something would be refused or does not fit on the device.
    """
    with stdout_for_results() as stdout:
        return _plan(options, stdout)


def _plan(options: dict[str, Any], stdout: BinaryIO | None) -> int:
    from moelora.jobs.adapter_list import resolve_adapters
    from moelora.jobs.reader import open_rows
    from moelora.jobs.rows import parse_rows
    from moelora.jobs.shards import parse_shard

    if stdout is None:
        raise ConfigError("standard output is closed, and nothing else would be written")
    shard = parse_shard(options["shard"])
    if shard is not None and is_stream(options["input_"]):
        raise ConfigError("--shard needs a file as --input and a folder as --output")
    options["shard"] = shard
    check_devices(options)
    devices = [options["device"]] if options["devices"] is None else device_names(options["devices"])
    options["device"] = devices[0]
    adapters = resolve_adapters(options["adapters"])
    job_options = job_options_of(options, list(adapters))
    with open_rows(options["input_"]) as lines, Progress(quiet=options["quiet"]) as progress:
        quiet_libraries()
        from moelora.jobs.plan import PlanningEngine
        from moelora.jobs.run import PrefillJob
        from moelora.jobs.text import load_encoder
        from moelora.jobs.windows import window_requests, windows
        from moelora.jobs.writer import Discard

        encoder = load_encoder(options["model"])
        engine = PlanningEngine(
            options["model"],
            adapters=adapters,
            options=engine_options_of(options),
            workers=len(devices),
            on_event=progress.event,
        )
        job = PrefillJob(engine, encoder, job_options, on_progress=progress.counts)
        rows = parse_rows(lines)
        planned = total = 0
        if is_stream(options["input_"]):
            job.run(rows, Discard())
        else:  # which is scored in windows, so that it can be resumed
            for number, window in windows(rows, window_requests(len(adapters), engine.slots), job.requests_of):
                total = number + 1
                if shard is None or number % shard[1] == shard[0]:
                    engine.begin_window(number)
                    job.run(window, Discard())
                    planned += 1
    stats, report = job.stats, engine.report()
    facts: dict[str, Any] = {
        "windows": {"planned": planned, "total": total},
        "shard": None if shard is None else f"{shard[0]}/{shard[1]}",
        "devices": _device_facts(devices, report["memory"]),
        "rows": stats.rows,
        "output_rows": stats.output_rows,
        "error_rows": stats.error_rows,
        "first_errors": list(stats.first_errors),
        "requests": stats.requests,
        "tokens": stats.tokens,
        "truncated_rows": stats.truncated_rows,
        "truncated_tokens": stats.truncated_tokens,
        "engine": report,
    }
    text = json.dumps(facts, indent=2, ensure_ascii=False) if options["as_json"] else "\n".join(_lines(facts))
    stdout.write(text.encode() + b"\n")
    stdout.flush()
    if any(one["fits"] is False for one in facts["devices"]):
        return EXIT_REFUSED
    return EXIT_ROW_ERRORS if stats.error_rows else EXIT_DONE


def _device_facts(devices: list[str], memory: dict[str, Any]) -> list[dict[str, Any]]:
    """What each device has free, and whether the parts of one worker fit there."""
    import torch

    from moelora.environment import resolve_device
    from moelora.memory import free_device_memory

    facts = []
    for name in devices:
        device = torch.device(resolve_device(name))
        free, total = free_device_memory(device)
        fits = None if free is None else memory["needed"] <= free
        facts.append({"device": str(device), "free": free, "total": total, "fits": fits})
    return facts


def _lines(facts: dict[str, Any]) -> list[str]:
    """The plan for people."""
    from moelora.jobs.report import rows_and_lines

    engine, longer = facts["engine"], ""
    if engine["longer_sequences"]:
        longer = f"; {counted(engine['longer_sequences'], 'longer sequence')}, "
        longer += f"of up to {counted(engine['largest_batch'], 'token')}, alone"
    lines = [
        ("model", f"{engine['architecture']} in {engine['dtype']} on {engine['device']}, backend {engine['backend']}"),
        ("rows", rows_and_lines(facts["rows"], facts["output_rows"], facts["error_rows"])),
        (
            "tokens",
            f"{facts['tokens']:,} in {counted(facts['requests'], 'request')}; "
            f"{engine['tokens']:,} run through the model",
        ),
        (
            "batches",
            f"{engine['batches']:,}, {engine['fill_share']:.0%} full; "
            f"at most {counted(engine['max_tokens'], 'token')} and {counted(engine['max_requests'], 'request')} each"
            f"{longer}",
        ),
    ]
    windows = facts["windows"]
    if facts["shard"] is not None:
        lines.append(("shard", f"{facts['shard']}: {windows['planned']:,} of {counted(windows['total'], 'window')}"))
    if len(facts["devices"]) > 1:
        names = repeated(one["device"] for one in facts["devices"])
        lines.append(("workers", f"{names}, for {counted(windows['total'], 'window')}"))
    if facts["truncated_rows"]:
        cut = counted(facts["truncated_tokens"], "token")
        lines.append(("cut", f"{cut} of {counted(facts['truncated_rows'], 'row')}"))
    if not engine["packed"]:
        lines.append(("alone", f"one request per batch: {engine['packing_reason']}"))
    lines += [("graphs", line) for line in _graph_lines(engine)]
    if engine["adapters"]:
        loads = f"loaded {counted(engine['adapter_loads'], 'time')} in all"
        loads = f"{engine['adapters']:,} in {counted(engine['slots'], 'slot')}, {loads}"
        lines.append(("adapters", f"{loads}; {size(engine['bytes_per_slot'])} per slot"))
    lines += [("memory", line) for line in _memory_lines(engine, facts["devices"])]
    lines += [("row error", error) for error in facts["first_errors"]]
    width = max(len(label) for label, _ in lines)
    labels = ["" if i and lines[i - 1][0] == label else label for i, (label, _) in enumerate(lines)]
    return [line for label, (_, text) in zip(labels, lines, strict=True) for line in entry(f"{label:<{width}}  ", text)]


def _graph_lines(engine: dict[str, Any]) -> list[str]:
    from moelora.capacity import EagerReason

    lines = [f"{one['count']:,} {one['mode']} at {one['bucket']}" for one in engine["passes"] if one["bucket"]]
    if lines:
        lines = [", ".join(lines), f"{engine['padding_share']:.1%} of the tokens in graphs and out of them are padding"]
        lines.append("capture may fail, and auto runs eagerly where that is measured to be faster")
    return lines + [f"{n:,} eager: {EagerReason(reason).text}" for reason, n in engine["eager_reasons"].items()]


def _memory_lines(engine: dict[str, Any], devices: list[dict[str, Any]]) -> list[str]:
    from moelora.environment import free_host_memory
    from moelora.jobs.report import MEMORY_PARTS

    memory, parts = engine["memory"], dict(MEMORY_PARTS)
    if engine["longer_sequences"]:
        parts["activations"] = f"activations of the longest sequence, {counted(engine['largest_batch'], 'token')}"
    lines = [f"{size(memory[key]):>10}  {text}" for key, text in parts.items()]
    lines.append(f"{size(memory['needed']):>10}  together; the last two take turns")
    lines.append(f"not counted: {', '.join(memory['not_counted'])}")
    for one in devices:
        if one["free"] is not None:
            left = one["free"] - memory["needed"]
            said = f"fits, {size(left)} left" if one["fits"] else f"does not fit, {size(-left)} too much"
            lines.append(f"{one['device']}: {said} ({size(one['free'])} of {size(one['total'])} are free)")
            if engine["longer_sequences"] and not one["fits"]:
                lines.append(
                    "a longer sequence that does not fit is an error of its row; --max-length bounds sequences"
                )
        elif (host := free_host_memory()) is not None and host < memory["needed"]:
            lines.append(f"{one['device']}: more than this machine has free, {size(host)}")
    return lines
