"""`moelora prefill --devices`: one process per device over one input and one output.

Workers share the folder of parts and claim window by window, so that work goes to whoever is free. A claim dies with
its process, and another worker takes the window up.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelora.errors import ConfigError
from moelora.wording import counted, repeated
from moelora_cli.command import EXIT_DONE, EXIT_REFUSED, EXIT_ROW_ERRORS, JobFailedError
from moelora_cli.interrupts import STOP_WORKER, interrupts, unwinding
from moelora_cli.options import is_stream
from moelora_cli.parts import going_on, open_parts, output_of_parts, parts_folder, telling_what_is_kept
from moelora_cli.progress import Progress, read_workers
from moelora_cli.reports import asked_for, tell, write_reports

if TYPE_CHECKING:
    from moelora.jobs.stats import JobStats

_FLAGS = ("with_base", "batch_invariant")
_VALUES = (
    *("default_adapter", "logprobs", "top_k", "max_length", "on_long", "backend", "graph", "dtype", "max_tokens"),
    *("max_requests", "slots", "load_format", "lora_b_layout", "seed", "attention"),
)
_POLL_SECONDS = 0.1
_WORKED = (EXIT_DONE, EXIT_ROW_ERRORS)


def check_devices(options: dict[str, Any]) -> None:
    """Refuses what `--devices` cannot be combined with, and what names no devices."""
    if options["devices"] is None:
        return
    if not re.fullmatch(r"all|cpu:[1-9]\d?|\d{1,3}(,\d{1,3})*", options["devices"]):
        raise ConfigError(f"--devices {options['devices']!r}: valid are all, GPU numbers like 0,1, or cpu:N")
    # A plan has no output.
    if is_stream(options["input_"]) or options.get("output", "") in (None, "-"):
        raise ConfigError("--devices needs files as --input and --output")
    if options["shard"] is not None or options["device"] != "auto":
        raise ConfigError("--devices cannot be combined with --shard or --device")


def device_names(devices: str) -> list[str]:
    """The device of each worker. Raises `ConfigError` if this machine does not have them."""
    if devices.startswith("cpu:"):
        return ["cpu"] * int(devices.removeprefix("cpu:"))
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = list(range(count)) if devices == "all" else [int(n) for n in devices.split(",")]
    if not wanted or max(wanted) >= count:
        raise ConfigError(
            f"--devices {devices}: this machine has {counted(count, 'CUDA device')}; valid: all, numbers from 0 to "
            f"{count - 1}, or cpu:N"
            if count
            else f"--devices {devices}: this machine has no usable CUDA device; valid: cpu:N"
        )
    return [f"cuda:{n}" for n in wanted]


def score_with_workers(options: dict[str, Any], adapters: dict[str, Path], progress: Progress) -> int:
    """Starts the workers, waits for them, and puts their parts together."""
    from moelora.jobs.parts import clear_parts, stats_of
    from moelora.jobs.report import build_report
    from moelora.jobs.timeline import joined

    names = device_names(options["devices"])
    output = Path(options["output"])
    folder = parts_folder(output)
    began = time.monotonic()
    parts = open_parts(options, adapters)
    store = parts.store
    with unwinding(), store, tempfile.TemporaryDirectory(prefix="moelora-") as private:
        facts: dict[str, Any] = {"fingerprint": parts.fingerprint, "stamps": parts.stamps}
        facts |= {"workers": len(names), "parent": os.getpid()}
        (Path(private) / "facts.json").write_text(json.dumps(facts))
        if options["overwrite"]:
            clear_parts(folder)
        earlier = store.finished_stats()
        if store.finished():
            progress.note(going_on(store))
        progress.event(f"loading on {repeated(names)}")
        shown = _Shown(Path(private), folder, earlier, progress)
        with telling_what_is_kept(options, store, progress):
            _wait(_start(options, adapters, names, Path(private)), progress, shown)
        told = read_workers(Path(private))
        try:
            output_of_parts(store, output)
        except ConfigError as error:
            reason = f"no worker is left ({error}); the same command goes on from there"
            raise JobFailedError from ConfigError(reason)
        stats = stats_of(folder)
        reports = [json.loads(path.read_bytes()) for path in sorted(Path(private).glob("report-*.json"))]
        store.discard()
    scoring = time.monotonic() if told.began is None else told.began
    engine = _joined([r.get("engine", {}) for r in reports])
    timeline = joined([r["timeline"] for r in reports if r.get("timeline", {}).get("points")])
    report = build_report(
        stats,
        seconds=max(told.part_at - scoring, 0.0),
        load_seconds=scoring - began,  # until the first worker scored
        engine=engine,
        run=asked_for(options, adapters),
        timeline=timeline,
        earlier_tokens=earlier.tokens,
    )
    write_reports(options, report)
    tell(stats, report, progress, quiet=options["quiet"])
    return EXIT_ROW_ERRORS if stats.error_rows else EXIT_DONE


@dataclass(slots=True)
class _Worker:
    """A process, and the file that it writes its words to: a pipe that nobody reads would stop it when it is full."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        """What it said on stderr."""
        return self.log.read_text(encoding="utf-8", errors="replace").strip()


class _Shown:
    """The progress of all workers as one.

    folder: where they tell of it; parts: where theirs lie. earlier: what was counted for those that were there before.
    """

    def __init__(self, folder: Path, parts: Path, earlier: JobStats, progress: Progress) -> None:
        self._folder, self._parts, self._earlier, self._progress = folder, parts, earlier, progress
        self._last: JobStats | None = None
        self._is_done = False

    def update(self, dead: Collection[int]) -> None:
        """Shows what has been scored by now, if that is more than before. dead: numbers of workers that died.

        It is less when one has died, or has ended at Ctrl-C, with a window unfinished.
        """
        from moelora.jobs.parts import stats_of

        told = read_workers(self._folder, dead)
        if told.began is None or self._is_done:
            return
        if self._last is None:
            self._progress.begin(told.began)
        if told.is_done:  # all parts are there, though some worker may not have told of its last
            self._is_done = True
            self._progress.scored(stats_of(self._parts), self._earlier)
            return
        told.stats.add(self._earlier)
        # Between batches the rate would seem to fall.
        if self._last is None or told.stats.output_rows > self._last.output_rows:
            self._last = told.stats
            self._progress.counts(told.stats, self._earlier)


def _start(options: dict[str, Any], adapters: dict[str, Path], names: list[str], private: Path) -> list[_Worker]:
    arguments = ["prefill", options["model"], "--input", options["input_"], "--output", options["output"], "--quiet"]
    arguments += ["--worker", str(private / "facts.json")]
    if adapters:  # as a list: a name may hold "=", and thousands of them do not fit on a command line
        listed = private / "adapters.jsonl"
        entries = ({"name": name, "path": str(path.absolute())} for name, path in adapters.items())
        listed.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        arguments += ["--adapters", str(listed)]
    arguments += [f"--{flag.replace('_', '-')}" for flag in _FLAGS if options[flag]]
    for name in _VALUES:
        if options[name] is not None:
            arguments += [f"--{name.replace('_', '-')}", str(options[name])]
    if options["buckets"] is not None:
        arguments += ["--buckets", ",".join(map(str, options["buckets"]))]
    workers = []
    for number, device in enumerate(names):
        own = ["--device", device, "--report", str(private / f"report-{number}.json")]
        log = private / f"log-{number}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *_program(), *map(str, arguments), *own],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
        workers.append(_Worker(f"worker {number} on {device}", process, log))
    return workers


def _program() -> list[str]:
    """This program, as the interpreter starts it. Run as a file, `__main__.py` would find its neighbours as top-level
    modules, `inspect` before Python's own.
    """
    return ["-m", "moelora_cli"] if Path(sys.argv[0]).name == "__main__.py" else [sys.argv[0]]


def _wait(workers: list[_Worker], progress: Progress, shown: _Shown) -> None:
    """Waits until all have ended; says which died. Raises `ConfigError` with the reason if they were refused.

    The first Ctrl-C is handed on, so that they finish their batches; then, or at the second, raises
    `KeyboardInterrupt`.
    """
    running = list(workers)
    refused: list[str] = []
    dead: set[int] = set()
    asked = False

    def stop() -> bool:
        nonlocal asked
        asked = True
        for worker in running:
            worker.process.send_signal(STOP_WORKER)
        return True

    try:
        with interrupts(stop, progress.say):
            while running:
                time.sleep(_POLL_SECONDS)
                shown.update(dead)
                for worker in list(running):
                    code = worker.process.poll()
                    if code is None:
                        continue
                    running.remove(worker)
                    said = worker.said()
                    if code == EXIT_REFUSED:
                        refused.append(f"\n{said}".rpartition("\nerror: ")[2].strip() or worker.name)
                    elif code not in _WORKED:
                        dead.add(worker.process.pid)
                    if code not in (*_WORKED, EXIT_REFUSED) and not asked:
                        others = f"{len(running)} others go on" if len(running) > 1 else "1 other goes on"
                        left = f"{others} with its work" if running else "none is left"
                        progress.say(f"{worker.name} died (exit {code}); {left}. {said[-500:]}".strip())
    finally:
        for worker in running:
            worker.process.terminate()
        for worker in running:
            worker.process.wait()
    if asked:
        raise KeyboardInterrupt
    if refused:
        raise ConfigError(refused[0])


def _joined(engines: list[dict[str, Any]]) -> dict[str, Any]:
    """One engine's report out of those of all workers: counts added up, the rest kept by worker."""
    passes: dict[tuple[Any, ...], int] = {}
    reasons: dict[str, int] = {}
    for engine in engines:
        for entry in engine.get("passes", []):
            key = (entry["phase"], entry["mode"], entry["bucket"])
            passes[key] = passes.get(key, 0) + entry["count"]
        for reason, count in engine.get("eager_reasons", {}).items():
            reasons[reason] = reasons.get(reason, 0) + count
    return {
        "passes": [{"phase": p, "mode": m, "bucket": b, "count": n} for (p, m, b), n in passes.items()],
        "eager_reasons": reasons,
        "workers": engines,
    }
