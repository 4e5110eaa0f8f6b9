"""What a run says on stderr while it works: a live line on a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moelora.jobs.stats import JobStats

SECONDS_BETWEEN_LINES = 5.0


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

    def begin(self) -> None:
        """Scoring starts now: rates count from here."""
        self._start = self._last = time.monotonic()

    def counts(self, stats: JobStats) -> None:
        """The numbers so far; shown at most every five seconds unless on a terminal."""
        now = time.monotonic()
        if self._quiet or (not self._live and now - self._last < SECONDS_BETWEEN_LINES):
            return
        if self._live and now - self._last < 0.1:
            return
        self._last = now
        rate = stats.tokens / max(now - self._start, 1e-9)
        text = f"{stats.output_rows:,} lines, {stats.tokens:,} tokens, {rate:,.0f} tokens/s"
        if stats.error_rows:
            text += f", {stats.error_rows:,} errors"
        if self._live:
            self._status.update(self._text(text))
        else:
            self.say(text)

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
