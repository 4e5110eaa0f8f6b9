"""How a Ctrl-C ends the program where no exception may be raised. Imports what Python has loaded at its start."""

import os

EXIT_INTERRUPTED = 130

_CLEAR_LINE = b"\r\x1b[K\x1b[?25h"
"""For a terminal: clears a live line, and shows the cursor, which was hidden for it."""


def end_interrupted() -> None:
    """Ends the process in one line and with its exit code; nothing is flushed, and nothing put in order."""
    try:  # noqa: SIM105 (contextlib would be an import)
        os.write(2, (_CLEAR_LINE if os.isatty(2) else b"") + b"error: interrupted\n")
    except OSError:  # closed, full, or its reader has gone: nobody is left to tell
        pass
    os._exit(EXIT_INTERRUPTED)
