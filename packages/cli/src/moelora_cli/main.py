"""The command group. Imports click alone: what a command needs, it imports when it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

import click

import moelora
from moelora_cli.bench import bench
from moelora_cli.command import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED, say_error
from moelora_cli.env import env
from moelora_cli.inspect import inspect
from moelora_cli.interrupts import ctrl_c
from moelora_cli.merge import merge
from moelora_cli.plan import plan
from moelora_cli.prefill import prefill
from moelora_cli.tune import tune
from moelora_cli.verify import verify


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, invoke_without_command=True
)
@click.version_option(moelora.__version__, prog_name="moelora")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Offline batch prefill for Mixture-of-Experts models with many LoRA adapters.

    Exit codes: 0 done, 1 failed, 2 refused before any work, 3 done but some rows have errors, 130 interrupted.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


cli.add_command(prefill)
cli.add_command(plan)
cli.add_command(verify)
cli.add_command(inspect)
cli.add_command(merge)
cli.add_command(bench)
cli.add_command(tune)
cli.add_command(env)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command and exits with its code. `arguments`: without the program's name; None for `sys.argv`."""
    # Spinning threads of torch's OpenMP starve each other as soon as another process wants a core: 5 to 30 × slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _occupy_closed_streams()
    with contextlib.suppress(AttributeError):  # a name of a file may hold what the encoding does not
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code, told = EXIT_FAILED, False
    with contextlib.suppress(ValueError):  # not in the main thread, as when a test calls this
        signal.signal(signal.SIGTERM, _terminate)
    try:
        with ctrl_c():
            result = cli.main(arguments, prog_name="moelora", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        told = code == EXIT_FAILED
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.UsageError as error:
        hint = f" (see '{error.ctx.command_path} --help')" if error.ctx is not None else ""
        say_error(error.format_message() + hint)
        code = EXIT_REFUSED
    except click.ClickException as error:
        say_error(error.format_message())
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        say_error("interrupted")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        code = EXIT_FAILED
    except OSError as error:
        if not told:  # what is left of the output of a run that failed on a full disk fails once more
            say_error(f"standard output: {error.strerror or error}")
        code = EXIT_FAILED
    _abandon_broken_streams()
    sys.exit(code)


def _occupy_closed_streams() -> None:
    """Gives the numbers of standard streams that are closed to the null device.

    Else the next file that is opened, perhaps the output, would get one, and with it what C libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one


def _terminate(number: int, frame: Any) -> None:
    """Leaves by an exception, so that temporary files are removed on the way."""
    raise SystemExit(128 + number)


def _abandon_broken_streams() -> None:
    """Points a stream elsewhere that takes nothing more, or the interpreter ends with a code of its own for it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
