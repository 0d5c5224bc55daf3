"""The first lines of a command: Ctrl-C ends them in one line, before there are handlers for it.

Nothing is imported before them.
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
