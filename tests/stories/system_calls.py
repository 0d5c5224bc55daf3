"""Make single system calls of a command fail, by strace, and judge what the command makes of it.

    python -m tests.stories.system_calls                        # every call on the checkpoint, in every case
    python -m tests.stories.system_calls reshard --share 10     # every tenth, in one case
    python -m tests.stories.system_calls --lasting              # a call, and all of its name after it

An undisturbed run under strace says which calls concern the checkpoint, the target and the stage. Then the command is
run once for each of them, and that one fails. What is right:

- exit code 0: output or target are those of the undisturbed run, byte for byte, or a warning says what is missing;
- exit code 2: the target is as it was, stderr ends with one line `Error: …` that names what failed, and has no traceback;
- no stage is left of which stderr says nothing; the command with `--resume` then gives what one run does.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.stories.commands import FIXTURES, REPO

STRACE = shutil.which("strace")
ERRORS = {
    "openat": "EIO EMFILE ENOMEM ESTALE EPERM EINTR",
    "read": "EIO ESTALE EINTR",
    "pread64": "EIO ESTALE EINTR ENOMEM EAGAIN",
    "preadv": "EIO ESTALE EINTR",
    "preadv2": "EIO ESTALE EINTR",
    "write": "EIO ENOSPC EDQUOT EINTR",
    "pwrite64": "EIO ENOSPC EDQUOT EINTR EFBIG",
    "copy_file_range": "EIO ENOSPC EXDEV EINVAL",
    "sendfile": "EIO EINVAL ENOSPC",
    "rename": "EIO ENOSPC EPERM ESTALE",
    "renameat2": "EIO EINVAL ENOSPC EPERM ESTALE",
    "fsync": "EIO ENOSPC EDQUOT",
    "fallocate": "EIO ENOSPC EOPNOTSUPP EINTR EDQUOT",
    "ftruncate": "EIO ENOSPC EFBIG",
    "fadvise64": "EIO",
    "unlink": "EIO EPERM",
    "unlinkat": "EIO EPERM ESTALE",
    "rmdir": "EIO EPERM",
    "mkdir": "EIO ENOSPC EDQUOT EPERM",
    "link": "EIO EPERM",
    "newfstatat": "EIO ESTALE ENOMEM EACCES",
    "statfs": "EIO ENOSYS",
    "access": "EIO",
    "faccessat2": "EIO",
    "readlink": "EIO ESTALE",
    "getdents64": "EIO ESTALE",
    "flock": "ENOLCK EIO EINTR ENOSYS",
    "fcntl": "EIO",
    "lseek": "EIO",
    "close": "EIO EINTR ENOSPC",
}
_CALL = re.compile(r"(\d+) +(\w+)\((.*)")


class Case(NamedTuple):
    """A command; `{}` stands for the directory that holds its source `src` and its target."""

    words: str
    target: str = ""
    old: str = ""  # the fixture that the target is before
    source: str = "dcp/fsdp2-w2"


CASES = {
    "inspect": Case("inspect {}/src"),
    "verify": Case("verify {}/src"),
    "quick": Case("verify --quick {}/src"),
    "values": Case("verify --values {}/src"),
    "diff": Case("diff {}/src"),
    "manifest": Case("verify {}/src --manifest {}/out", "out"),
    "file": Case("consolidate {}/src {}/out.safetensors", "out.safetensors"),
    "shards": Case("consolidate {}/src {}/out --max-shard-size 1KB --dtype bf16", "out"),
    "reshard": Case("reshard {}/src {}/out --world-size 3", "out"),
    "resumable": Case("reshard {}/src {}/out --world-size 3 --resume", "out"),
    "torch": Case("convert {}/src {}/out.pt", "out.pt"),
    "over": Case("reshard {}/src {}/out --world-size 3 --overwrite", "out", "dcp/fsdp2-w1"),
    "foreign": Case("consolidate {}/src {}/out --overwrite", "out", "hf/sharded"),
}


class Ended(NamedTuple):
    """What a run ended with: its exit code, what it printed, and its target before and after."""

    code: int
    out: str
    err: str
    before: dict[str, str] | None
    target: dict[str, str] | None
    stages: list[str]


class Fault(NamedTuple):
    """The call of a name that fails, by its number in a process, and how."""

    call: str
    number: int
    error: str


class Place:
    """The directory in which the runs of one case take place, each from the same start."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.folder = folder

    def run(self, *more: str, strace: Sequence[str] = (), is_fresh: bool = True) -> Ended:
        """Run the command, with calls failing as `strace` says."""
        if is_fresh:
            self._prepare()
        before = self.digests()
        words = [word.format(self.folder) for word in self.case.words.split()]
        command = [sys.executable, "-m", "ema_ckpt", *words, *more]
        if strace:
            command = [str(STRACE), "-f", "-qq", "--seccomp-bpf", *strace, *command]
        ended = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": str(REPO), "PYTHONHASHSEED": "0", "NO_COLOR": "1"},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        err = "".join(line for line in ended.stderr.splitlines(True) if line[:7] != "strace:")
        stages = [path.name for path in self.folder.iterdir() if ".ema-ckpt-" in path.name]
        return Ended(ended.returncode, ended.stdout, err, before, self.digests(), stages)

    def _prepare(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        shutil.copytree(FIXTURES / self.case.source, self.folder / "src")
        if self.case.old:
            shutil.copytree(FIXTURES / self.case.old, self.folder / self.case.target)
            if "consolidate" in self.case.words:  # a directory that may hold other files
                (self.folder / self.case.target / "notes.txt").write_text("keep")

    def digests(self) -> dict[str, str] | None:
        """Digests of the files of the target, by name; None if there is none."""
        path = self.folder / self.case.target
        if not self.case.target or not os.path.lexists(path):
            return None
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def faults_of(log: Path, folder: Path, share: int) -> Iterator[Fault]:
    """Every so many of the calls that concern `folder`, with an error each, in turn.

    strace counts the calls of each process from its start.
    """
    counts: dict[str, Counter[str]] = {}
    found: dict[tuple[str, int], None] = {}
    for line in log.read_text(errors="replace").splitlines():
        call = _CALL.match(line)
        if call is None or call[2] not in ERRORS:
            continue
        count = counts.setdefault(call[1], Counter())
        count[call[2]] += 1
        if str(folder) in call[3]:
            found[call[2], count[call[2]]] = None
    turns: Counter[str] = Counter()
    for name, number in sorted(found):
        errors = ERRORS[name].split()
        turns[name] += 1
        if turns[name] % share == 0 or share > 1 == turns[name]:
            yield Fault(name, number, errors[turns[name] // share % len(errors)])


def problems_of(place: Place, usual: Ended, ended: Ended, is_lasting: bool) -> Iterator[str]:
    """What a disturbed run did wrong, beside the undisturbed one.

    Where a call does not work again, Python may be unable to load what prints that the target is there.
    """
    if "Traceback" in ended.err:
        yield "traceback"
    if any(stage not in ended.err for stage in ended.stages) and "--resume" not in place.case.words:
        yield "a stage is left of which nothing is said"
    if ended.code == 0:
        if ended.target != usual.target:
            yield "another target"
        is_said = "Warning" in ended.err or "(not read: unreadable)" in ended.out
        if not usual.target and ended.out != usual.out and not is_said:
            yield "another output"
        return
    if ended.code != 2:
        yield f"exit code {ended.code}"
    lines = ended.err.splitlines()
    if [line for line in lines if line.startswith("Error: ")] != lines[-1:]:
        yield "stderr has not one error at its end"
    if "a system call failed" in ended.err:
        yield "the error does not say what failed"
    yield from _problems_after(place, usual, ended, is_lasting)


def _problems_after(place: Place, usual: Ended, ended: Ended, is_lasting: bool) -> Iterator[str]:
    """What is wrong with the target after an error, and what the next run makes of it."""
    if "standard output" in ended.err and ended.target == usual.target:
        return  # it was done, and could not be said
    if ended.target != usual.before and not (is_lasting and ended.target == usual.target):
        yield "the target is not as it was"
    elif place.case.target and not place.case.old and "verify" not in place.case.words:
        more = () if "--resume" in place.case.words else ("--resume",)
        again = place.run(*more, is_fresh=False)
        if again.code or again.target != usual.target:
            yield f"--resume: exit code {again.code}: {again.err.strip()[-200:]}"


def sweep(name: str, share: int = 1, lasting: bool = False) -> tuple[Counter[int], list[str]]:
    """Run a case once for each fault; return how often each exit code came, and what was wrong."""
    with tempfile.TemporaryDirectory(prefix="ema-ckpt-calls-") as parent:
        place = Place(CASES[name], Path(parent) / "here")
        place.run()  # compiles what is not compiled yet
        log = Path(parent) / "log"
        usual = place.run(strace=["-y", "-o", str(log), "-e", "trace=" + ",".join(ERRORS)])
        assert usual.code == 0, usual
        codes: Counter[int] = Counter()
        wrong = []
        for call, number, error in faults_of(log, place.folder, share):
            if lasting and error == "EINTR":  # a call is repeated until no signal interrupts it
                continue
            when = f"{number}{'+' * lasting}"
            inject = f"inject={call}:error={error}:when={when}"
            ended = place.run(strace=["-o", "/dev/null", "-e", f"trace={call}", "-e", inject])
            codes[ended.code] += 1
            for problem in problems_of(place, usual, ended, lasting):
                wrong.append(f"{name}: {call} {when} {error}: {problem}: {ended.err[-300:]!r}")
        return codes, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    parser.add_argument("--share", type=int, default=1)
    parser.add_argument("--lasting", action="store_true")
    options = parser.parse_args()
    total: Counter[int] = Counter()
    failures: list[str] = []
    for name in options.cases or CASES:
        codes, wrong = sweep(name, options.share, options.lasting)
        print(f"{name}: {sum(codes.values())} faults, exit codes {dict(codes)}", *wrong, sep="\n  ", flush=True)  # fmt: skip
        total += codes
        failures += wrong
    print(f"{sum(total.values())} faults, exit codes {dict(total)}, {len(failures)} wrong")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
