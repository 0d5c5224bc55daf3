"""Fuzz every parser: `python -m tests.fuzz.run [TARGET…] [--inputs N] [--seconds S] [--seed S]`.

Each input has a second of CPU time and 10 times its size plus 64 MB of memory. While a parser runs, an audit hook
refuses to open files, to import, to start processes and to open sockets. Whatever ends in something else than
`EmaCkptError`, or breaks a limit, is a find: it is written to `build/fuzz/`, and the command ends with 1.

Coverage-guided by atheris where that is installed (`pip install atheris`), in a process for each target; else inputs
are made from the fixtures by changes at random, from the seed that is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

from ema_ckpt.core.errors import EmaCkptError
from tests.fuzz.targets import MAX_NBYTES, TARGETS, Target

REPO = Path(__file__).parents[2]
FINDS = REPO / "build" / "fuzz"
CPU_SECONDS = 1.0
_PAGE = resource.getpagesize()
_FORBIDDEN = (
    "open", "import", "exec", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system",
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "shutil", "subprocess", "socket", "ctypes", "pickle.find_class",
)  # fmt: skip
_INTERESTING = [
    0, 1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1
]  # fmt: skip
# json tells the first apart by the first bytes of an input; the last two are those of pickles.
_CODECS = (
    "utf-8", "utf-8-sig", "utf-16-le", "utf-16-be", "utf-16", "utf-32-le", "utf-32-be", "utf-32",
    "latin-1", "raw-unicode-escape",
)  # fmt: skip


class Find(Exception):
    """What no parser may do."""


class Guard:
    """Holds a parser to its limits."""

    def __init__(self) -> None:
        self.is_armed = False
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[object, ...]) -> None:
        if not self.is_armed:
            return
        for name in _FORBIDDEN:
            if event == name or event.startswith(name + "."):
                self.is_armed = False
                raise Find(f"{event} {args[:2]!r}")

    def run(self, target: Target, data: bytes) -> None:
        """Run a parser. Raises Find, or whatever it raises beside `EmaCkptError`."""
        before = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
        limit = before + 10 * len(data) + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        started = time.process_time()
        self.is_armed = True
        try:
            target.run(data)
        except EmaCkptError as error:
            if error.code == "internal":
                raise
        finally:
            self.is_armed = False
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        seconds = time.process_time() - started
        if seconds > CPU_SECONDS:
            raise Find(f"{seconds:.1f} s of CPU time for {len(data)} bytes")


def save_find(name: str, data: bytes, error: BaseException) -> None:
    """Keep the input, and say what it did."""
    FINDS.mkdir(parents=True, exist_ok=True)
    path = FINDS / f"{name.replace(' ', '-')}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    print(f"FOUND {name}: {type(error).__name__}: {str(error)[:200]} ({path})", flush=True)


def mutate(seeds: list[bytes], draw: random.Random) -> bytes:
    """Make an input of one or two others by a few changes."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        at = draw.randrange(len(data) + 1)
        how = draw.randrange(7)
        if how == 0 and data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif how == 1:
            del data[at : at + draw.choice((1, 2, 4, 16, len(data)))]
        elif how == 2:
            data[at:at] = draw.randbytes(draw.choice((1, 2, 4, 8)))
        elif how == 3:
            other = draw.choice(seeds)
            start = draw.randrange(len(other))
            data[at : at + draw.choice((0, 8, 64))] = other[
                start : start + draw.choice((8, 64, 512))
            ]
        elif how == 4:
            width = draw.choice((1, 2, 4, 8))
            number = draw.choice(_INTERESTING) % 2 ** (8 * width)
            data[at : at + width] = number.to_bytes(width, "little")
        elif how == 5:
            piece = data[at : at + draw.choice((1, 4, 32))]
            data[at:at] = piece * draw.choice((2, 10, 300))
        else:
            data[at : at + draw.choice((1, 2, 5))] = str(draw.choice(_INTERESTING)).encode()
    return bytes(data[:MAX_NBYTES])


def warmed(target: Target) -> list[bytes]:
    """Run the inputs to begin from once, so that what is imported late is there; return them."""
    for codec in _CODECS:
        "x".encode(codec).decode(codec)
    seeds = target.seeds()
    for data in seeds:
        try:
            target.run(data)
        except EmaCkptError:
            pass
    return seeds


def fuzz_at_random(name: str, inputs: int, seconds: float, seed: str) -> int:
    """Fuzz a target in this process; return the number of finds."""
    target, guard = TARGETS[name], Guard()
    seeds = warmed(target)
    draw, started, finds, done = random.Random(f"{name}{seed}"), time.monotonic(), 0, 0
    while done < inputs and time.monotonic() - started < seconds:
        data = seeds[done] if done < len(seeds) else mutate(seeds, draw)
        done += 1
        try:
            guard.run(target, data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            finds += 1
            save_find(name, data, error)
            if finds >= 10:
                break
    took = time.monotonic() - started
    print(
        f"{name}: {done} inputs in {took:.0f} s at random (seed {seed}), {finds} finds", flush=True
    )
    return finds


def fuzz_guided(name: str, inputs: int, seconds: float) -> int:
    """Fuzz a target by atheris in a process of its own; return the number of finds."""
    command = [sys.executable, "-m", "tests.fuzz.guided", name, str(inputs), str(int(seconds))]
    ended = subprocess.run(command, cwd=REPO, check=False)
    return int(ended.returncode != 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=3600, help="for each target")
    parser.add_argument("--seed", default=os.urandom(4).hex())
    parser.add_argument("--random", action="store_true", help="without atheris")
    options = parser.parse_args()
    for name in options.targets:
        if name not in TARGETS:
            parser.error(f"no target {name!r}; targets are {', '.join(TARGETS)}")
    guided = not options.random and _has_atheris()
    finds = 0
    for name in options.targets or TARGETS:
        if guided:
            finds += fuzz_guided(name, options.inputs, options.seconds)
        else:
            finds += fuzz_at_random(name, options.inputs, options.seconds, options.seed)
    return int(finds > 0)


def _has_atheris() -> bool:
    from importlib.util import find_spec

    return find_spec("atheris") is not None


if __name__ == "__main__":
    sys.exit(main())
