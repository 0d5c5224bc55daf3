"""`python -m ema_ckpt` and the command `ema-ckpt`.

Nothing is imported before the first line that may be interrupted: until the command has handlers
of its own, Ctrl-C ends it in one line too.
"""

import sys


def script() -> None:
    """Run the process' own command line."""
    try:
        from ema_ckpt.cli.main import script as run

        run()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("Error: interrupted\n")
        if "--json" in sys.argv and sys.stdout is not None:
            sys.stdout.write('{"error": {"code": "interrupted", "message": "interrupted"}}\n')
        sys.exit(130)


if __name__ == "__main__":
    script()
