"""What a run says on stderr while it works: a live line on a terminal, else a plain line now and then."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from moelora.wording import counted, duration

if TYPE_CHECKING:
    from moelora.jobs.stats import JobStats

SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_FRAMES = 0.1
_SECONDS_BETWEEN_FILES = 0.5
"""How often a worker tells its parent how far it is."""


class Progress:
    """Shows events and counts. With `quiet` it shows neither; errors and warnings are not its business.

    results: where they are written meanwhile, if they are; on a terminal, a live line would end up among them.
    """

    def __init__(self, *, quiet: bool, results: BinaryIO | None = None) -> None:
        from rich.console import Console

        self._quiet = quiet
        # Notebooks and build services set FORCE_COLOR for what is a pipe; a live line would fill it with frames.
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, force_terminal=terminal)
        self._live = not quiet and terminal and not (results is not None and results.isatty())
        self._status: Any = None
        self._total: int | None = None
        self._scoring = False
        self._start = self._last = time.monotonic()
        self._done_at_first = 0
        self._has_shown = False

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
        self._done_at_first = self._done_at_first or stats.input_done - earlier.input_done
        if not self._quiet and now - self._last >= (_SECONDS_BETWEEN_FRAMES if self._live else SECONDS_BETWEEN_LINES):
            self._last = now
            self._show(self._counts(stats, earlier))

    def scored(self, stats: JobStats, earlier: JobStats) -> None:
        """The last counts: what remains is to write the output. Shown on a terminal, and behind other counts."""
        if self._live or self._has_shown:
            self._show(self._counts(stats, earlier) + "; finishing")

    def _counts(self, stats: JobStats, earlier: JobStats) -> str:
        now = time.monotonic()
        rate = (stats.tokens - earlier.tokens) / max(now - self._start, 1e-9)
        text = self._share_done(stats.input_done, earlier.input_done, now - self._start)
        text += f"{counted(stats.output_rows, 'line')}, {counted(stats.tokens, 'token')}"
        if self._scoring:
            text += f", {rate:,.0f} tokens/s"
        if stats.error_rows:
            text += f", {counted(stats.error_rows, 'error')}"
        return text

    def _show(self, text: str) -> None:
        self._has_shown = True
        if self._live:
            self._status.update(self._text(text))
        else:
            self.say(text)

    def _share_done(self, done: int, earlier: int, seconds: float) -> str:
        """How far the input is done, and when it will be if the rest goes as fast as what was not done earlier.

        The time left is said from the second batch on, as the first takes longer than others, and once it rests on a
        hundredth of the work; less than half a second is not said.
        """
        if not self._total:
            return ""
        text = f"{100 * min(done, self._total) // self._total}%"
        own, left = done - earlier, self._total - done
        if own > self._done_at_first and 100 * own >= self._total - earlier and (still := left * seconds / own) >= 0.5:
            text += f", about {duration(still)} left"
        return text + ": "

    def part_written(self, stats: JobStats, earlier: JobStats) -> None:
        """What was counted until now will stand, whatever becomes of this process."""

    def say(self, text: str) -> None:
        """One line on stderr, whatever its content. A log on a full disk does not end the work that it tells of."""
        with suppress(OSError):
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
        self._part_at = self._start
        self._is_done = False

    def begin(self, since: float | None = None) -> None:
        """Scoring starts, with nothing scored."""
        super().begin(since)
        self._part_at = self._start
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
        self._part_at = time.monotonic()
        self._tell(self._written)

    def scored(self, stats: JobStats, earlier: JobStats) -> None:
        """Every window has its part, this worker's or another's."""
        self._is_done = True
        self._tell(self._written)

    def _tell(self, counts: dict[str, int]) -> None:
        draft = self._path.with_suffix(".tmp")
        told = {"began": self._start, "part_at": self._part_at, "is_done": self._is_done}
        draft.write_text(json.dumps({**told, "counts": counts, "written": self._written}))
        os.replace(draft, self._path)  # its parent reads at any time


def _own_counts(stats: JobStats, earlier: JobStats) -> dict[str, int]:
    """What this process has scored itself."""
    names = ("output_rows", "error_rows", "tokens", "input_done")
    return {name: getattr(stats, name) - getattr(earlier, name) for name in names}


@dataclass(frozen=True, slots=True)
class WorkersTold:
    """What the workers of a run have told of their work. Times are of `time.monotonic`.

    began: when the first began to score, None if none has. part_at: when the last part was written. stats: what all
    have scored. is_done: whether every window has its part.
    """

    began: float | None
    part_at: float
    stats: JobStats
    is_done: bool


def read_workers(folder: Path, dead: Collection[int] = ()) -> WorkersTold:
    """What has been told in `folder`. dead: numbers of processes that died; another scores again what has no part."""
    from moelora.jobs.stats import JobStats

    files = [(int(p.stem.removeprefix("counts-")), json.loads(p.read_bytes())) for p in folder.glob("counts-*.json")]
    total = JobStats()
    for process, told in files:
        total.add(JobStats(**told["written" if process in dead else "counts"]))
    return WorkersTold(
        began=min((told["began"] for _, told in files), default=None),
        part_at=max((told["part_at"] for _, told in files), default=0.0),
        stats=total,
        is_done=any(told["is_done"] for _, told in files),
    )
