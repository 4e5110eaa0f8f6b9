"""How `moelora prefill` runs into parts: what they are fingerprinted by, and how they become the output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelora.errors import ConfigError
from moelora_cli.progress import Progress

if TYPE_CHECKING:
    from moelora.jobs.rows import Row
    from moelora.jobs.run import PrefillJob

# What does not change a line of the output.
_WITHOUT_EFFECT = frozenset(
    {
        *("model", "adapters", "input_", "output", "overwrite", "report", "metrics_file", "dry_run", "quiet"),
        *("shard", "device", "devices", "worker"),
    }
)
# What "auto" came to on this machine.
_RESOLVED = ("backend", "dtype", "slots", "max_tokens", "max_requests")


class RefusedOutputError(ConfigError):
    """The parts at the output belong to another run, or another process holds them; nothing was scored."""


def score_in_parts(
    options: dict[str, Any],
    adapters: dict[str, Path],
    job: PrefillJob,
    engine: Any,
    read: Callable[[], Iterable[Row]],
    progress: Progress,
) -> None:
    """Scores what has no part yet; without shards or other workers, then writes the output and removes the parts.

    Raises `RefusedOutputError` before any scoring if the parts that lie there are not of this run.
    """
    from moelora.jobs.parts import PartStore
    from moelora.jobs.windows import run_into_parts, window_requests

    output = Path(options["output"])
    shard, shards = options["shard"] or (0, 1)
    alone = not options["shard"] and not options["worker"]
    folder = output if options["shard"] else parts_folder(output)
    try:
        store = PartStore(
            folder,
            _fingerprint(options, adapters, engine),
            shard=shard,
            shards=shards,
            overwrite=options["overwrite"],
            worker=bool(options["worker"]),
        )
    except ConfigError as error:
        raise RefusedOutputError(str(error)) from None
    with store:
        # `--graph auto` measures anew in each process; the choice decides between kernels, and so about last bits.
        engine.eager_buckets = store.agree("eager-buckets", engine.eager_buckets)
        if store.finished() and not options["worker"]:
            progress.say(f"going on with {store.finished():,} finished parts in {folder}")
        try:
            run_into_parts(job, read, window_requests(len(adapters), engine.slots), store)
        except BaseException:
            if store.finished() == 0 and alone:
                store.discard()
            elif store.finished() and not options["worker"]:
                progress.say(parts_are_safe(folder))
            raise
        if alone:
            write_output(folder, output)
            store.discard()


def parts_folder(output: Path) -> Path:
    """Where the parts of a file lie until it is whole."""
    return output.with_name(output.name + ".parts")


def parts_are_safe(folder: Path) -> str:
    """What is said when a run ends before its time."""
    from moelora.jobs.parts import count_parts

    return f"{count_parts(folder):,} parts are safe in {folder}; the same command goes on from there"


def write_output(folder: Path, output: str | Path) -> None:
    """Puts the parts in `folder` together into `output`; "-" is standard output."""
    from moelora.jobs.parts import merge_lines
    from moelora.jobs.writer import open_output

    lines = merge_lines(folder)
    with open_output(output, sys.stdout.buffer) as file:
        for line in lines:
            file.write(line)


def _fingerprint(options: dict[str, Any], adapters: dict[str, Path], engine: Any) -> dict[str, str]:
    from moelora.jobs.fingerprint import run_fingerprint
    from moelora.models.checkpoint import find_model_folder

    facts = engine.report()
    return run_fingerprint(
        model=find_model_folder(options["model"]),
        adapters=adapters,
        input_file=Path(options["input_"]),
        options={
            **{name: value for name, value in options.items() if name not in _WITHOUT_EFFECT},
            **{f"{name} in use": facts.get(name) for name in _RESOLVED},
            "device kind": str(facts.get("device")).partition(":")[0],
        },
    )
