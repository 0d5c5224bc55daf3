"""The process around a command: signals, exit codes, one line for an error, `--distributed`."""

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

EXIT_DIFFERENT = 1
EXIT_ERROR = 2
EXIT_UNPROVEN = 3
EXIT_INTERNAL = 70
EXIT_HUNG_UP = 129
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_TERMINATED = 143
_STOPPED = {
    signal.SIGTERM: (EXIT_TERMINATED, "terminated"),
    signal.SIGINT: (EXIT_INTERRUPTED, "interrupted"),
    signal.SIGHUP: (EXIT_HUNG_UP, "hung-up"),
}
_DISTRIBUTED_VERBS = {"consolidate", "reshard", "convert"}


class _StoppedError(BaseException):
    """A signal arrived: unwinds the stack, so that staging directories are removed."""


class _SignalHandler:
    """Raise the first SIGTERM, SIGINT or SIGHUP as an exception, and none once the work is done.

    A second signal would interrupt the removal of a staging directory; one that arrives while the
    interpreter ends would print a traceback below a valid result.
    """

    def __init__(self) -> None:
        self.is_active = True
        signal.signal(signal.SIGTERM, self.handle)
        # What is ignored, as SIGHUP is under nohup, stays so.
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, self.handle)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.handle)

    def handle(self, signum: int, _frame: object) -> None:
        if self.is_active:
            self.is_active = False
            raise _StoppedError(signum)


def script() -> NoReturn:
    """Run the process' own command line; exit without freeing a large catalog object by object."""
    try:
        main()
    except SystemExit as result:
        has_torch = "torch" in sys.modules
        # After an error, and with torch's process groups, exit as usual: there may be exit hooks.
        if result.code in (0, EXIT_DIFFERENT, EXIT_UNPROVEN) and not has_torch:
            sys.stderr.flush()
            os._exit(result.code)
        if result.code in (EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED) and has_torch:
            # A thread may wait inside gloo, which aborts if the interpreter ends meanwhile.
            atexit._run_exitfuncs()
            sys.stderr.flush()
            os._exit(result.code)
        raise


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit with its code."""
    # A catalog is hundreds of thousands of small objects that live as long as the process: tracing
    # them again and again would take half of the time.
    gc.disable()
    # No command multiplies large matrices; starting the threads of numpy's BLAS only takes time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = _run(arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _end_output(arguments, error)
    sys.exit(code)


def _run(argv: list[str]) -> int:
    try:
        signals = _SignalHandler()
        _prepare_streams()
        from ema_ckpt.cli.commands import run
        from ema_ckpt.cli.numpy_guard import guard_numpy

        guard_numpy()

        code = _run_distributed(argv) if _is_distributed(argv) else run(argv)
        signals.is_active = False
        return code
    except _StoppedError as error:
        code, word = _STOPPED[error.args[0]]
        return _report(argv, word, word, code) if _is_first(argv) else code
    except BrokenPipeError as error:
        return _end_output(argv, error)
    except Exception as error:  # noqa: BLE001 - whatever it is, a user gets one line
        return _report_error(argv, error)


def _prepare_streams() -> None:
    """Print names that are not UTF-8 as escapes; replace streams that the caller has closed.

    Python leaves out, without an error, what a pipe that does not block has no room for.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is None:  # `print(file=None)` would go to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # one that a test has put in place
            if not stream.isatty():  # which the caller may share
                os.set_blocking(stream.fileno(), True)


def _is_distributed(argv: Sequence[str]) -> bool:
    return "--distributed" in argv and argv[0] in _DISTRIBUTED_VERBS


def _run_distributed(argv: list[str]) -> int:
    from ema_ckpt.cli.commands import run
    from ema_ckpt.comm.launched import command_group

    if not _is_first(argv):  # the first process reports for all
        argv[:] = [argv[0], "--quiet", *[word for word in argv[1:] if word != "--json"]]
    with command_group(lambda text: print(text, file=sys.stderr, flush=True)):
        return run(argv)


def _is_first(argv: Sequence[str]) -> bool:
    from ema_ckpt.comm.launched import launched_ranks

    return not _is_distributed(argv) or launched_ranks()[0] == 0


def _end_output(argv: list[str], error: OSError) -> int:
    """Redirect stdout to nowhere, else Python flushes, and fails, again; report a full disk."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_BROKEN_PIPE if isinstance(error, BrokenPipeError) else _report_error(argv, error)


def _report_error(argv: list[str], error: Exception) -> int:
    from ema_ckpt.comm.launched import launched_ranks
    from ema_ckpt.core.errors import EmaCkptError

    if "--debug" in argv:
        import traceback

        from ema_ckpt.core.display import masked

        # What a client of a server raised may have the whole URL in it.
        print(masked(traceback.format_exc()), end="", file=sys.stderr)
    if isinstance(error, EmaCkptError):
        message = str(error)
        alone = _DISTRIBUTED_VERBS & set(argv[:1]) and not _is_distributed(argv)
        if alone and error.code in ("busy", "target-exists") and launched_ranks()[1] > 1:
            message += "; where a launcher started several processes, pass --distributed"
        exit_code = EXIT_INTERNAL if error.code == "internal" else EXIT_ERROR
        return _report(argv, error.code, message, exit_code)
    if trouble := _of_the_machine(error):
        return _report(argv, *trouble, EXIT_ERROR)
    message = f"{type(error).__name__}: {error} (a bug of ema-ckpt; --debug shows where)"
    return _report(argv, "internal", message, EXIT_INTERNAL)


def _of_the_machine(error: Exception) -> tuple[str, str] | None:
    """Return code and message of trouble of the machine, which is no bug."""
    if isinstance(error, MemoryError | SystemError):  # SystemError: CPython itself ran out of it
        hint = "use fewer --threads, or raise the limit of the process"
        return "unreadable", f"not enough memory; {hint}"
    if isinstance(error, ImportError):
        return "unreadable", f"a part of the installation cannot be loaded: {error}"
    if not isinstance(error, OSError) or not error.strerror:
        return None
    code = "no-space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "unreadable"
    return code, f"{error.filename or _origin_of(error)}: {error.strerror}"


def _origin_of(error: OSError) -> str:
    """Say where an error without a file name was raised: printing, loading, or anywhere."""
    import traceback

    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
    if module.startswith(("ema_ckpt.cli", "rich.", "click.")):
        return "standard output"
    if module.startswith(("_frozen_importlib", "importlib.")):
        return "a part of the installation cannot be loaded"
    if not _has_directory():
        return "the current directory, which was deleted"
    return "a system call failed"


def _has_directory() -> bool:
    """Whether the current directory is there, without which relative paths lead nowhere."""
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _report(argv: list[str], code: str, message: str, exit_code: int) -> int:
    """Print an error as one line on stderr, and with `--json` as a document on stdout."""
    text = line = "".join(letter if letter.isprintable() else " " for letter in message)
    with contextlib.suppress(OSError, ImportError, MemoryError):  # it may be what fails: loading
        from ema_ckpt.cli.output import clean, fitted

        line = clean(message)
        text = fitted(f"Error: {line}", sys.stderr).removeprefix("Error: ")
    with contextlib.suppress(OSError):  # stderr is closed; the exit code still reports
        print(f"Error: {text}", file=sys.stderr)
    if "--json" in argv:
        import json

        with contextlib.suppress(OSError):
            print(json.dumps({"error": {"code": code, "message": line}}), flush=True)
    return exit_code
