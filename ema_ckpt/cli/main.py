"""The process around a command: signals, exit codes, one line for an error."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

EXIT_UNLIKE = 1
EXIT_TROUBLE = 2
EXIT_UNPROVEN = 3
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_TERMINATED = 143


class _StoppedError(BaseException):
    """A signal arrived: unwinds the stack, so that stages are removed."""


class _Signals:
    """SIGTERM and SIGINT as one exception: raised once, and never when there is nothing left to
    undo.

    A second signal would cut the removal of a stage short, and one that meets the interpreter as it
    ends would print a traceback under a result that stands.
    """

    def __init__(self) -> None:
        self.stops = True
        signal.signal(signal.SIGTERM, self._arrived)
        if (
            signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):  # else it is ignored, as under nohup
            signal.signal(signal.SIGINT, self._arrived)

    def _arrived(self, signum: int, _frame: object) -> None:
        if self.stops:
            self.stops = False
            raise _StoppedError(signum)


def script() -> NoReturn:
    """Run the process' own command line, and end without taking a large catalog apart object by
    object.
    """
    try:
        main()
    except SystemExit as result:
        has_torch = "torch" in sys.modules
        # After an error, and where torch's process groups are, the usual ending: there may be hooks
        # to run.
        if result.code in (0, EXIT_UNLIKE, EXIT_UNPROVEN) and not has_torch:
            sys.stderr.flush()
            os._exit(result.code)
        if result.code in (EXIT_INTERRUPTED, EXIT_TERMINATED) and has_torch:
            # A thread may wait for other processes inside gloo, which aborts if the interpreter
            # ends meanwhile.
            atexit._run_exitfuncs()
            sys.stderr.flush()
            os._exit(result.code)
        raise


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit with its code."""
    # A checkpoint's catalog is hundreds of thousands of small objects that live to the end of the
    # process: tracing them again and again would take half of the time.
    gc.disable()
    # No command multiplies matrices of any size; the threads that numpy's BLAS starts would only
    # take time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = _run(arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _cut_off(arguments, error)
    sys.exit(code)


def _prepare_streams() -> None:
    """Let no name stop the output, and let what is printed go nowhere where a caller closed the
    stream.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # no terminal or file name has to be UTF-8
    if sys.stderr is None:  # `print(file=None)` would go to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _cut_off(argv: list[str], error: OSError) -> int:
    """Output that nobody takes: silence for a pipe whose reader left, one line for a full disk."""
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
    )  # else Python flushes, and fails, once more
    return EXIT_BROKEN_PIPE if isinstance(error, BrokenPipeError) else _failed(argv, error)


def _run(argv: list[str]) -> int:
    try:
        signals = _Signals()
        _prepare_streams()
        from ema_ckpt.cli.commands import run
        from ema_ckpt.cli.launched import run_distributed

        code = run_distributed(argv, run)
        signals.stops = False
        return code
    except _StoppedError as error:
        interrupted = error.args == (signal.SIGINT,)
        code, word = (
            (EXIT_INTERRUPTED, "interrupted") if interrupted else (EXIT_TERMINATED, "terminated")
        )
        from ema_ckpt.cli.launched import is_first

        # The first of several processes says for all of them that a signal came.
        return _report(argv, word, word, code) if is_first(argv) else code
    except BrokenPipeError as error:
        return _cut_off(argv, error)
    except Exception as error:  # noqa: BLE001 - whatever it is, a user gets one line
        return _failed(argv, error)


def _failed(argv: list[str], error: Exception) -> int:
    from ema_ckpt.core.errors import EmaCkptError

    if "--debug" in argv:
        import traceback

        traceback.print_exc()
    if isinstance(error, EmaCkptError):
        from ema_ckpt.cli.launched import distributed_hint

        internal = error.code == "internal"
        message = f"{error}{distributed_hint(argv, error.code)}"
        return _report(argv, error.code, message, EXIT_INTERNAL if internal else EXIT_TROUBLE)
    if isinstance(error, OSError) and error.strerror:  # the machine's trouble, not a bug
        code = "no-space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "unreadable"
        return _report(
            argv, code, f"{error.filename or 'standard output'}: {error.strerror}", EXIT_TROUBLE
        )
    message = f"{type(error).__name__}: {error} (a bug of ema-ckpt; --debug shows where)"
    return _report(argv, "internal", message, EXIT_INTERNAL)


def _report(argv: list[str], code: str, message: str, exit_code: int) -> int:
    """One line on stderr; with `--json` also the document that says the same."""
    from ema_ckpt.cli.output import clean

    line = clean(" ".join(message.splitlines()))
    with contextlib.suppress(OSError):  # nobody listens; the exit code still tells
        print(f"Error: {line}", file=sys.stderr)
    if "--json" in argv:
        import json

        with contextlib.suppress(OSError):
            print(json.dumps({"error": {"code": code, "message": line}}), flush=True)
    return exit_code
