"""What all commands share: how errors leave the program, and with which exit code; how sizes are written."""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback
from typing import Any

import click

from moelora.errors import MoeloraError
from moelora_cli.at_once import EXIT_INTERRUPTED

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_ROW_ERRORS = 3


class JobFailedError(Exception):
    """A run that had begun could not be finished; the cause is its `__cause__`, made for people by `say_error`."""


class MoeloraCommand(click.Command):
    """A command whose callback returns an exit code and may raise what `MoeloraError` stands for.

    Each gets `--debug`, which adds the traceback to an error.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks."))
        self._debug = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Notes `--debug` before anything can fail."""
        ctx.meta["moelora.debug"] = "--debug" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the callback and turns whatever it raises into a message and an exit code."""
        try:
            code = super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except BrokenPipeError:
            code = EXIT_FAILED  # the reader of our output has left; nobody is there to be told
        except KeyboardInterrupt:
            say_error("interrupted", ctx)
            code = EXIT_INTERRUPTED
        except JobFailedError as failure:
            say_error(explain(failure.__cause__ or failure), ctx)
            code = EXIT_FAILED
        except MoeloraError as error:
            say_error(str(error), ctx)
            code = EXIT_REFUSED
        except Exception as error:
            say_error(explain(error), ctx)
            # A path that was given cannot be used; a run that had begun wraps its errors.
            too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
            code = EXIT_REFUSED if too_long or isinstance(error, PermissionError) else EXIT_FAILED
        ctx.exit(code or EXIT_DONE)


def explain(error: BaseException) -> str:
    """An exception in one line; its kind is named unless it was made for people."""
    text = " ".join(str(error).split())
    if isinstance(error, MoeloraError) and text:
        return text
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return f"{type(error).__name__}: {text or 'no message'} (--debug shows where)"


def say_error(message: str, ctx: click.Context | None = None) -> None:
    """Prints `error: …` to stderr, with the traceback before it under `--debug`; nothing if stderr takes nothing."""
    if ctx is not None and ctx.meta.get("moelora.debug") and sys.exc_info()[0] is not None:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        click.echo(f"error: {message}", err=True)


def size(count: int) -> str:
    """A number of bytes for people."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count} bytes"
