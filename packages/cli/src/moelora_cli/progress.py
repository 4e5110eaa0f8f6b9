"""What a run says on stderr while it works: a live line on a terminal, else a plain line now and then."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from moelora.wording import counted, duration

if TYPE_CHECKING:
    from moelora.jobs.stats import JobStats

SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_FILES = 0.5
"""How often a worker tells its parent how far it is."""


class Progress:
    """Shows events and counts. With `quiet` it shows neither; errors and warnings are not its business."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console

        self._quiet = quiet
        # Notebooks and build services set FORCE_COLOR for what is a pipe; a live line would fill it with frames.
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, force_terminal=terminal)
        self._live = not quiet and terminal
        self._status: Any = None
        self._total: int | None = None
        self._scoring = False
        self._start = self._last = time.monotonic()

    def __enter__(self) -> Progress:
        if self._live:
            self._status = self.console.status("starting")
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def event(self, text: str) -> None:
        """Something that happens once: a model loaded, a graph captured."""
        if self._live:
            self._status.update(self._text(text))
        elif not self._quiet:
            self.say(text)

    def note(self, text: str) -> None:
        """Something worth a line that stays."""
        if not self._quiet:
            self.say(text)

    def begin(self, since: float | None = None) -> None:
        """Scoring starts now, or has at `since`, of `time.monotonic`: rates count from there, and are shown."""
        self._scoring = True
        self._start = self._last = time.monotonic() if since is None else since

    def expect(self, total: int | None) -> None:
        """What `JobStats.input_done` comes to in the end; None if nobody can know."""
        self._total = total

    def counts(self, stats: JobStats, earlier: JobStats) -> None:
        """The numbers so far; shown at most every five seconds unless on a terminal.

        earlier: what of `stats` was scored before or elsewhere, which is no part of the rate.
        """
        now = time.monotonic()
        if self._quiet or (not self._live and now - self._last < SECONDS_BETWEEN_LINES):
            return
        if self._live and now - self._last < 0.1:
            return
        self._last = now
        rate = (stats.tokens - earlier.tokens) / max(now - self._start, 1e-9)
        text = self._share_done(stats.input_done, earlier.input_done, now - self._start)
        text += f"{counted(stats.output_rows, 'line')}, {counted(stats.tokens, 'token')}"
        if self._scoring:
            text += f", {rate:,.0f} tokens/s"
        if stats.error_rows:
            text += f", {counted(stats.error_rows, 'error')}"
        if self._live:
            self._status.update(self._text(text))
        else:
            self.say(text)

    def _share_done(self, done: int, earlier: int, seconds: float) -> str:
        """How far the input is done, and when it will be if the rest goes as fast as what was not done earlier."""
        if not self._total:
            return ""
        text = f"{100 * min(done, self._total) // self._total} %"
        if done > earlier:
            text += f", about {duration(max(self._total - done, 0) * seconds / (done - earlier))} left"
        return text + ": "

    def part_written(self, stats: JobStats, earlier: JobStats) -> None:
        """What was counted until now will stand, whatever becomes of this process."""

    def say(self, text: str) -> None:
        """One line on stderr, whatever its content."""
        self.console.print(self._safe(text), markup=False)

    def _text(self, text: str) -> Any:
        from rich.text import Text

        return Text(self._safe(text))  # not a string, whose brackets would be read as markup

    def _safe(self, text: str) -> str:
        """`text` in the encoding of stderr, which need not be UTF-8."""
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)


class WorkerProgress(Progress):
    """Shows nothing, and leaves what this worker has scored in a file of `folder`, for its parent to show."""

    def __init__(self, folder: Path) -> None:
        super().__init__(quiet=True)
        self._path = folder / f"counts-{os.getpid()}.json"
        self._written: dict[str, int] = {}

    def begin(self, since: float | None = None) -> None:
        """Scoring starts, with nothing scored."""
        super().begin(since)
        self._tell({})

    def counts(self, stats: JobStats, earlier: JobStats) -> None:
        """The numbers so far, without those of parts that were there or that others have made."""
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_FILES:
            return
        self._last = now
        self._tell(_own_counts(stats, earlier))

    def part_written(self, stats: JobStats, earlier: JobStats) -> None:
        """What was counted until now is told at once."""
        self._written = _own_counts(stats, earlier)
        self._tell(self._written)

    def _tell(self, counts: dict[str, int]) -> None:
        draft = self._path.with_suffix(".tmp")
        draft.write_text(json.dumps({"began": self._start, "counts": counts, "written": self._written}))
        os.replace(draft, self._path)  # its parent reads at any time


def _own_counts(stats: JobStats, earlier: JobStats) -> dict[str, int]:
    """What this process has scored itself."""
    names = ("output_rows", "error_rows", "tokens", "input_done")
    return {name: getattr(stats, name) - getattr(earlier, name) for name in names}


def read_workers(folder: Path, dead: Collection[int] = ()) -> tuple[float | None, JobStats]:
    """When the first worker began to score, of `time.monotonic`, None if none has; and what all have scored.

    dead: numbers of processes that died. Of theirs only the parts count: another scores the rest again.
    """
    from moelora.jobs.stats import JobStats

    began, total = None, JobStats()
    for path in folder.glob("counts-*.json"):
        told = json.loads(path.read_bytes())
        began = told["began"] if began is None else min(began, told["began"])
        died = int(path.stem.removeprefix("counts-")) in dead
        total.add(JobStats(**told["written" if died else "counts"]))
    return began, total
