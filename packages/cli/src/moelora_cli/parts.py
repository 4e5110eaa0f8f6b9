"""How `moelora prefill` runs into parts: what they are fingerprinted by, and how they become the output."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from moelora.errors import ConfigError, MoeloraError
from moelora.wording import counted
from moelora_cli.options import is_stream
from moelora_cli.progress import Progress

if TYPE_CHECKING:
    from moelora.jobs.parts import PartStore
    from moelora.jobs.rows import Row
    from moelora.jobs.run import PrefillJob
    from moelora.jobs.stats import JobStats

# What does not change a line of the output.
_WITHOUT_EFFECT = frozenset(
    {
        *("model", "adapters", "input_", "output", "overwrite", "report", "metrics_file", "dry_run", "quiet"),
        *("shard", "device", "devices", "worker"),
    }
)
# What "auto" came to on this machine.
_RESOLVED = ("backend", "dtype", "slots", "max_tokens", "max_requests")


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts of a run, and what it is of.

    fingerprint: as far as it is known without an engine. stamps: of the files behind it.
    """

    store: PartStore
    fingerprint: dict[str, str]
    stamps: dict[str, str]


def open_parts(options: dict[str, Any], adapters: dict[str, Path]) -> RunParts:
    """The parts of this run, whose store is held from now on.

    Raises `ConfigError` if the parts that lie there are not of this run, or if another process holds them.
    """
    from moelora.jobs.parts import PartStore

    shard, shards = options["shard"] or (0, 1)
    folder = Path(options["output"]) if options["shard"] else parts_folder(Path(options["output"]))
    worker = worker_facts(options)
    stamps = stamps_of(options, adapters) if worker is None else worker["stamps"]
    fingerprint = fingerprint_of(options, adapters) if worker is None else worker["fingerprint"]
    store = PartStore(folder, shard=shard, shards=shards, overwrite=options["overwrite"], worker=worker is not None)
    with ExitStack() as undo:
        undo.enter_context(store)
        store.check(fingerprint)
        undo.pop_all()
    return RunParts(store, fingerprint, stamps)


def worker_facts(options: dict[str, Any]) -> dict[str, Any] | None:
    """What its parent tells a worker, else None.

    `fingerprint` and `stamps` of the run, its number `parent`, how many `workers` there are.
    """
    return None if options["worker"] is None else json.loads(Path(options["worker"]).read_bytes())


def score_in_parts(
    options: dict[str, Any],
    store: PartStore,
    job: PrefillJob,
    engine: Any,
    read: Callable[[], Iterable[Row]],
    total: int,
    progress: Progress,
) -> None:
    """Scores what has no part yet.

    read: gives the rows from the first on. total: of the input, as `Row.size` counts.
    """
    from moelora.jobs.windows import ShardSize, run_into_parts, window_requests

    worker = options["worker"] is not None
    # Measured, or taken from what is free, anew in each process; all decide between kernels, and so about last bits.
    engine.attention_choice = store.agree("attention", engine.attention_choice)
    engine.eager_buckets = store.agree("eager-buckets", engine.eager_buckets)
    engine.score_chunk_rows = store.agree("score-chunk-rows", engine.score_chunk_rows)
    if store.finished() and not worker:
        progress.note(going_on(store))
    own = ShardSize(total, store.mine)

    def on_window(number: int, window: list[Row]) -> None:
        own.add(number, window)
        if options["shard"] and store.mine(number):
            progress.expect(own.expected())

    size = window_requests(len(engine.adapter_names), engine.slots)
    with telling_what_is_kept(options, store, progress):
        run_into_parts(job, read, size, store, on_part=progress.part_written, on_window=on_window)
    progress.scored(job.stats, job.earlier)


def finish_parts(options: dict[str, Any], store: PartStore) -> None:
    """Without shards or other workers, writes the output and removes the parts."""
    if not options["shard"] and options["worker"] is None:
        output_of_parts(store, options["output"])
        store.discard()


def parts_folder(output: Path) -> Path:
    """Where the parts of a file lie until it is whole."""
    return output.with_name(output.name + ".parts")


def stats_of_made_output(options: dict[str, Any]) -> JobStats | None:
    """What was counted for the output, if a run was killed when it stood there already and its parts did too."""
    output = options["output"]
    if output in (None, "-") or is_stream(options["input_"]) or any(map(options.get, ("shard", "worker", "overwrite"))):
        return None
    if not os.path.isdir(parts_folder(Path(output))):
        return None
    from moelora.jobs.parts import made_before

    return made_before(parts_folder(Path(output)), Path(output))


def going_on(store: PartStore) -> str:
    """What is said when a run takes up what an earlier one has finished."""
    return f"going on with {counted(store.finished(), 'finished part')} in {store.folder}"


@contextmanager
def telling_what_is_kept(options: dict[str, Any], store: PartStore, progress: Progress) -> Iterator[None]:
    """Says what stays of the run if it ends within; not in a worker, whose parent does, nor of a run that is refused.

    Of an error it is said only if there is something: that nothing is kept, nobody expects otherwise.
    """
    try:
        yield
    except MoeloraError:
        raise
    except BaseException as error:
        if options["worker"] is None and (store.finished() or isinstance(error, KeyboardInterrupt)):
            progress.say(what_is_kept(store, overwrite=options["overwrite"]))
        raise


def what_is_kept(store: PartStore, *, overwrite: bool) -> str:
    """What is said when a run ends before its time. overwrite: whether the same command would begin anew."""
    if not store.finished():
        return "no part was finished yet: nothing is kept, and the same command begins anew"
    count = counted(store.finished(), "finished part")
    without = " without --overwrite" if overwrite else ""
    return f"kept {count} in {store.folder}; the same command{without} goes on from there"


def output_of_parts(store: PartStore, output: str | Path) -> None:
    """Puts all parts of a run together, whose store no other process holds, into the file that they are for."""
    from moelora.jobs.parts import note_whole
    from moelora.jobs.writer import clear_drafts

    clear_drafts(output)
    write_output(store.folder, output, on_whole=partial(note_whole, store.folder))


def write_output(
    folder: Path,
    output: str | Path,
    stdout: BinaryIO | None = None,
    *,
    on_whole: Callable[[Path], None] | None = None,
) -> None:
    """Puts the parts in `folder` together into `output`; "-" is `stdout`, needed for nothing else."""
    from moelora.jobs.parts import merge_lines
    from moelora.jobs.writer import open_output

    lines = merge_lines(folder)
    with open_output(output, stdout, on_whole=on_whole) as file:
        for line in lines:
            file.write(line)


def fingerprint_of(options: dict[str, Any], adapters: dict[str, Path]) -> dict[str, str]:
    """What the lines of the output depend on, as far as it is known before an engine is there."""
    from moelora.jobs.fingerprint import run_fingerprint
    from moelora.models.checkpoint import find_model_folder

    return run_fingerprint(
        model=find_model_folder(options["model"]),
        adapters=adapters,
        input_file=Path(options["input_"]),
        options={name: value for name, value in options.items() if name not in _WITHOUT_EFFECT},
    )


def stamps_of(options: dict[str, Any], adapters: dict[str, Path]) -> dict[str, str]:
    """What tells whether the files behind the fingerprint are as they were."""
    from moelora.jobs.fingerprint import run_stamps
    from moelora.models.checkpoint import find_model_folder

    model, input_file = find_model_folder(options["model"]), Path(options["input_"])
    return run_stamps(model=model, adapters=adapters, input_file=input_file)


def refuse_changed(stamps: dict[str, str], options: dict[str, Any], adapters: dict[str, Path]) -> None:
    """Once all is loaded: raises `ConfigError` if a file is no longer the one that the fingerprint is of."""
    from moelora.jobs.fingerprint import changed

    if differences := changed(stamps, stamps_of(options, adapters)):
        raise ConfigError(f"changed while the run began: {', '.join(differences)}; give the command again")


def in_use(engine: Any) -> dict[str, str]:
    """The rest of the fingerprint: what was left open, as the engine has settled it."""
    facts = engine.report()
    device = str(facts.get("device")).partition(":")[0]
    return {
        **{f"option {name} in use": str(facts.get(name)) for name in _RESOLVED},
        "option device kind": device,
    }
