"""The command line, served by one process that forks for each call.

A call starts from a process that has loaded the package but no checkpoint, under a limit on memory and time,
so that a thousand of them take seconds. `PYTHONPATH` may name another checkout of the package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FIXTURES = REPO / "fixtures"
MEMORY_LIMIT = 1 << 30
SECONDS_LIMIT = 20

# Imports all of the package that a command can need: what does without torch, and the libraries it loads late.
# Then it reads one JSON list of arguments a line, runs the command in a fork, and answers with one JSON line.
_DRIVER = f"""
import contextlib, ctypes, gc, importlib, json, os, pkgutil, platform, resource, signal, sys, tempfile, uuid
import click, ml_dtypes, numpy
import ema_ckpt
sys.modules["torch"] = None
for module in pkgutil.walk_packages(ema_ckpt.__path__, "ema_ckpt.", onerror=lambda name: None):
    with contextlib.suppress(ImportError):
        importlib.import_module(module.name)
del sys.modules["torch"]
from ema_ckpt.__main__ import script
gc.freeze()
for line in sys.stdin:
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_LIMIT}, {MEMORY_LIMIT}))
        signal.alarm({SECONDS_LIMIT})
        os.dup2(out.fileno(), 1); os.dup2(err.fileno(), 2)
        sys.argv = ["ema-ckpt", *json.loads(line)]
        try:
            script()
        except SystemExit as ended:
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(ended.code)
        finally:
            os._exit(99)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for file in (out, err):
        file.seek(0)
    print(json.dumps([code, out.read().decode(), err.read().decode()]), flush=True)
"""


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: the package of this checkout, unless `PYTHONPATH` names another one."""
    places = [os.environ.get("PYTHONPATH"), str(REPO)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "OPENBLAS_NUM_THREADS": "1",
        **more,
    }


@dataclass(frozen=True)
class Ended:
    """A finished command."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict:
        return json.loads(self.stdout, parse_constant=_no_strict_json)


def _no_strict_json(name: str) -> None:
    raise AssertionError(f"{name} is no strict JSON")


class Commands:
    """The command line; a hostile pickle, if it were executed, would make the file `marker`."""

    def __init__(self, marker: Path) -> None:
        command, pipe = [sys.executable, "-P", "-c", _DRIVER], subprocess.PIPE
        env = environment(EMA_CKPT_MARKER=str(marker))
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)

    def run(self, *arguments: object) -> Ended:
        self.process.stdin.write(json.dumps([str(a) for a in arguments]) + "\n")
        self.process.stdin.flush()
        return Ended(*json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=SECONDS_LIMIT)
        self.process.stdout.close()
