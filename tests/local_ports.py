"""Ports of this machine for servers that tests start in processes of their own."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import time
from typing import Any

_FIRST, _END = 10_000, 32_768  # below the ports that Linux gives to connections


def free_port() -> int:
    """Return a port that nobody listens on, and that no connection is given until it is used."""
    while True:
        port = random.SystemRandom().randrange(_FIRST, _END)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for_server(process: subprocess.Popen[Any], port: int, seconds: float = 60) -> None:
    """Return once a process listens. Raises OSError if it has ended, or does not in that time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise
            time.sleep(0.05)
