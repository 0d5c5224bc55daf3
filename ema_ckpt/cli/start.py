"""The first lines of a command: whatever ends them does so in one line, and never with exit code 1.

To `verify` that would mean damage. Ctrl-C may come before there are handlers for it, and a disk may
fail while the package is loaded from it.

Nothing is imported before them.
"""

import sys


def script() -> None:
    """Run the process' own command line."""
    try:
        from ema_ckpt.cli.main import script as run

        run()
    except KeyboardInterrupt:
        _end("interrupted", "interrupted", 130)
    except (ImportError, OSError, MemoryError) as error:
        _end("unreadable", f"ema-ckpt cannot be loaded: {error or type(error).__name__}", 2)


def _end(code: str, message: str, exit_code: int) -> None:
    """Report an error as `cli.main` does."""
    line = "".join(letter if letter.isprintable() else " " for letter in message)
    try:
        if sys.stderr is not None:
            sys.stderr.write(f"Error: {line}\n")
        if "--json" in sys.argv and sys.stdout is not None:
            quoted = line.replace("\\", "\\\\").replace('"', '\\"')
            sys.stdout.write(f'{{"error": {{"code": "{code}", "message": "{quoted}"}}}}\n')
    except OSError:
        pass  # the exit code still reports
    sys.exit(exit_code)
