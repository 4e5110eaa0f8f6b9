"""Where the `moelora` program begins; `python -m moelora_cli` is the same. Light, so that Ctrl-C is heeded early."""

import os

from moelora_cli.at_once import end_interrupted

try:
    import atexit
    import signal
except KeyboardInterrupt:
    end_interrupted()


def main() -> None:
    """Runs the command, with a Ctrl-C before and behind it taken care of: no traceback, and the exit code is right."""
    code = None

    def end_at_once(number: int, frame: object) -> None:
        if code is not None:  # all is done
            os._exit(code)
        end_interrupted()  # nothing has begun yet

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is for jobs in the background
        signal.signal(signal.SIGINT, end_at_once)
        # Called last, as it is registered first: the interpreter's own end would bring the default action back.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from moelora_cli.main import main as command

    try:
        command()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
        raise


if __name__ == "__main__":
    main()
