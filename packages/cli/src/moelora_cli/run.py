"""A run of `moelora prefill` in this process, once its options are accepted and its input is open."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from moelora_cli.command import EXIT_DONE, EXIT_ROW_ERRORS, JobFailedError
from moelora_cli.interrupts import end_with, interrupts, unwinding
from moelora_cli.options import engine_options_of, is_stream
from moelora_cli.parts import (
    RunParts,
    finish_parts,
    in_use,
    open_parts,
    refuse_changed,
    score_in_parts,
    telling_what_is_kept,
    worker_facts,
)
from moelora_cli.progress import Progress
from moelora_cli.reports import asked_for, is_page, tell, write_reports

if TYPE_CHECKING:
    from moelora.jobs.parquet import ParquetReader
    from moelora.jobs.reader import LineReader
    from moelora.jobs.rows import Row
    from moelora.jobs.run import JobOptions, PrefillJob, Scorer
    from moelora.jobs.stats import JobStats
    from moelora.jobs.text import TextEncoder
    from moelora.jobs.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run is given. Each of its methods that returns an exit code is one way to carry it out.

    options: of the command, with --shard parsed. adapters: folders by name. lines: of the input, which can be read
    once. stdout: for results.
    """

    options: dict[str, Any]
    adapters: dict[str, Path]
    job_options: JobOptions
    encoder: TextEncoder
    lines: LineReader | ParquetReader
    progress: Progress
    stdout: BinaryIO

    def has_good_row(self) -> bool:
        """Whether a row can be scored: as a rule the first, and minutes of loading are not for nothing.

        True where it is not looked at: an input that can be read only once, and a shard, which leaves parts for the
        others.
        """
        options = self.options
        if is_stream(options["input_"]) or options["shard"] is not None or options["worker"] is not None:
            return True
        return any(True for _ in self._job(self._dry_scorer()).requests(self._rows_anew()))

    def print_token_ids(self) -> int:
        """Writes the token ids that would be scored to standard output."""
        from moelora.jobs.rows import parse_rows
        from moelora.jobs.writer import StreamSink

        with StreamSink(self.stdout) as sink:
            stats = self._job(self._dry_scorer()).dry_run(parse_rows(self.lines), sink)
        return EXIT_ROW_ERRORS if stats.error_rows else EXIT_DONE

    def write_errors(self) -> int:
        """For an input without a good row: every line is an error, and no engine is needed for it."""
        from moelora.jobs.timeline import Timeline

        start = time.monotonic()
        self.progress.note("no row of the input can be scored; the model is not loaded")
        with ExitStack() as held:
            parts = self._open_parts(held)  # those of another run are refused, as ever; nothing is written into them
            scorer = self._dry_scorer()
            code = self._carry_out(self._job(scorer), scorer, Timeline(), None, start)
            if parts is not None:
                parts.store.discard()
        return code

    def remove_parts(self, stats: JobStats) -> int:
        """For an output that was whole when its run was killed: does what is left to do, and loads nothing for it.

        stats: what was counted for the output.
        """
        from moelora.jobs.report import build_report

        with ExitStack() as held:
            parts = self._open_parts(held)  # those of another run are refused, as ever
            assert parts is not None
            run = asked_for(self.options, self.adapters)
            report = build_report(stats, seconds=0.0, load_seconds=0.0, engine={}, run=run, earlier_tokens=stats.tokens)
            write_reports(self.options, report)
            parts.store.discard()
        self.progress.note(f"the output was whole already; what its run had left in {parts.store.folder} is removed")
        tell(stats, report, self.progress, quiet=self.options["quiet"])
        return EXIT_ROW_ERRORS if stats.error_rows else EXIT_DONE

    def score(self) -> int:
        """Loads the engine and scores the input, into parts where the run can be resumed."""
        from moelora.jobs.timeline import TimedScorer, Timeline

        start = time.monotonic()
        from moelora.engine import PrefillEngine  # before parts are held, for Ctrl-C: see `unwinding`

        worker = worker_facts(self.options)
        if worker is not None:
            end_with(worker["parent"], Path(self.options["worker"]).parent)
        with ExitStack() as held:
            parts = self._open_parts(held)
            with telling_what_is_kept(self.options, parts.store, self.progress) if parts is not None else nullcontext():
                engine = self._load_engine(PrefillEngine)
            timeline = Timeline()
            job = self._job(TimedScorer(engine, timeline))
            if parts is not None:
                refuse_changed(parts.stamps, self.options, self.adapters)
                parts.store.begin({**parts.fingerprint, **in_use(engine)})
            return self._carry_out(job, engine, timeline, parts, start)

    def _carry_out(self, job: PrefillJob, engine: Any, timeline: Timeline, parts: RunParts | None, start: float) -> int:
        """What follows once everything is loaded and nothing was refused. start: when loading began."""
        from moelora.jobs.report import build_report
        from moelora.jobs.rows import read_rows
        from moelora.jobs.score_tally import ScoreTally, TallySink
        from moelora.jobs.writer import open_output

        options, progress = self.options, self.progress
        loaded = time.monotonic()
        progress.begin()
        timeline.begin()
        tally = None
        try:
            if parts is not None:
                total = self.lines.total
                assert total is not None, "an input that can be read again has a size"
                with interrupts(engine.stop, progress.say, worker=options["worker"] is not None):
                    score_in_parts(options, parts.store, job, engine, self._rows_anew, total, progress)
                    scored = time.monotonic()
                    finish_parts(options, parts.store)
            else:
                tally = ScoreTally()
                sink = open_output(options["output"], self.stdout)
                taking = TallySink(sink, tally) if is_page(options["report"]) else sink
                with taking, interrupts(engine.stop, progress.say):
                    job.run(read_rows(self.lines), taking)
                    scored = time.monotonic()
            stats = job.stats
            report = build_report(
                stats,
                seconds=scored - loaded,
                load_seconds=loaded - start,
                engine=engine.report(),
                run=asked_for(options, self.adapters),
                timeline=timeline.as_json(scored - loaded),
                earlier_tokens=job.earlier.tokens,
            )
            write_reports(options, report, tally)
        except BrokenPipeError:
            raise
        except Exception as error:
            raise JobFailedError from error
        tell(stats, report, progress, quiet=options["quiet"])
        return EXIT_ROW_ERRORS if stats.error_rows else EXIT_DONE

    def _open_parts(self, held: ExitStack) -> RunParts | None:
        """Those of a run that can be resumed, held as long as `held` is; None if this one cannot be.

        It can if its input can be read again, and its output is a file or a folder.
        """
        output = self.options["output"]
        if is_stream(self.options["input_"]) or output == "-":
            return None
        if self.options["shard"] is None and os.path.exists(output) and not os.path.isfile(output):
            return None
        held.enter_context(unwinding())
        parts = open_parts(self.options, self.adapters)
        held.enter_context(parts.store)
        return parts

    def _job(self, scorer: Scorer) -> PrefillJob:
        from moelora.jobs.run import PrefillJob

        return PrefillJob(scorer, self.encoder, self.job_options, on_progress=self.progress.counts)

    def _dry_scorer(self) -> Any:
        from moelora.jobs.dry import dry_scorer

        return dry_scorer(self.options["model"], list(self.adapters))

    def _rows_anew(self) -> Iterator[Row]:
        """The rows of the input, from the first on."""
        from moelora.jobs.reader import open_rows
        from moelora.jobs.rows import read_rows

        with open_rows(self.options["input_"]) as lines:
            yield from read_rows(lines)

    def _load_engine(self, make: Any) -> Any:
        """make: `PrefillEngine`."""
        from moelora.environment import device_of_place, free_host_memory, freeze_objects
        from moelora.jobs.shards import local_place

        options = self.options
        chosen = engine_options_of(options)
        worker, place = worker_facts(options), local_place() if options["shard"] is not None else None
        sharing = worker["workers"] if worker is not None else place[1] if place is not None else 1
        if sharing > 1 and (free := free_host_memory()) is not None:
            chosen = replace(chosen, host_bytes=free // (2 * sharing))
        if place is not None and chosen.device == "auto":  # else all shards of a machine would crowd its first GPU
            chosen = replace(chosen, device=device_of_place(place[0]))
        engine = make(options["model"], adapters=self.adapters, options=chosen, on_event=self.progress.event)
        freeze_objects()
        return engine
