"""Programs that write with child processes, however few bytes there are; see `tests.runtime`."""

from __future__ import annotations

import errno
import filecmp
import mmap
import os
import time
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import ema_ckpt
from ema_ckpt.cli.main import main
from ema_ckpt.runtime import executor
from ema_ckpt.writing import output_files, schedule
from ema_ckpt.writing.journal import Journal
from tests.runtime.fork_programs import HERE, count_processes, harm_children


def command(*arguments: object) -> int:
    """Run a command line quietly; return its exit code."""
    try:
        main([*map(str, arguments), "-q"])
    except SystemExit as ended:
        return int(ended.code or 0)


def write(*arguments: str) -> None:
    """Run a command line; print the processes of each forked run."""
    runs = count_processes()
    try:
        main(list(arguments))
    finally:
        print(runs)


def write_harmed(how: str, *arguments: str) -> None:
    harm_children(how)
    write(*arguments)


def write_slowly(seconds: str, *arguments: str) -> None:
    """Print the pid of each process that begins a job, and have each job wait."""

    def on_job(_job: object) -> None:
        os.write(1, b"%d\n" % os.getpid())
        time.sleep(float(seconds))

    executor.on_job = on_job
    main(list(arguments))


def write_slowly_here(*arguments: str) -> None:
    """Have each job of this process wait, so that children find something to do."""

    def on_job(_job: object) -> None:
        if os.getpid() == HERE:
            time.sleep(0.3)

    executor.on_job = on_job
    write(*arguments)


def write_told_late(*arguments: str) -> None:
    """Have what children write be lost, which only closing the file tells, and tells once."""
    pwrite, close = os.pwrite, os.close

    def lost(fd: int, data: memoryview, offset: int) -> int:
        return pwrite(fd, data, offset) if os.getpid() == HERE else len(data)

    def told(fd: int) -> None:
        is_here = os.getpid() == HERE
        is_output = not is_here and os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors")
        close(fd)
        if is_output:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwrite, os.close = lost, told
    write_slowly_here(*arguments)


def write_recording(*arguments: str) -> None:
    """After each range that is recorded print who wrote it, and wait."""
    done = Journal.done

    def slowly(journal: Journal, *rest: object) -> None:
        done(journal, *rest)
        os.write(1, f"{os.getpid()} {os.getpid() == HERE}\n".encode())
        time.sleep(0.2)

    Journal.done = slowly
    main(list(arguments))


def write_with_buffers(*arguments: str) -> None:
    """Print who takes a buffer, and its bytes; have jobs wait, so that all find something to do."""
    usual = mmap.mmap

    def made(fileno: int, length: int, *rest: Any, **more: Any) -> mmap.mmap:
        if "flags" in more:  # not what processes share
            os.write(1, b"%d %d\n" % (os.getpid(), length))
        return usual(fileno, length, *rest, **more)

    mmap.mmap = made  # type: ignore[misc, assignment]
    executor.on_job = lambda _job: time.sleep(0.02)
    write(*arguments)


def write_counting(log: str, *arguments: str) -> None:
    """Log the bytes of each write."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    usual = output_files.OutputFiles.write

    def counting(files: output_files.OutputFiles, name: str, offset: int, data: bytes) -> None:
        os.write(file, b"%d\n" % len(data))
        usual(files, name, offset, data)

    output_files.OutputFiles.write = counting
    write(*arguments)


def progress_when_children_fail(source: str, out: str) -> None:
    runs = count_processes()
    harm_children("raises")
    reported: list[int] = []
    result = ema_ckpt.consolidate(source, out, threads=3, progress=reported.append)
    assert runs == [(3, 0)]
    assert min(reported) > 0 and sum(reported) == result.nbytes


def same_bytes_as_by_one(source: str, out: str, copied: str = "") -> None:
    """Write in several ways by one worker and by three processes, and compare the files."""
    if copied:
        schedule._COPY_NBYTES = int(copied)
    runs = count_processes()
    for verb, name, *options in (
        ("consolidate", "a.safetensors"),
        ("consolidate", "a.pt"),
        ("consolidate", "folder", "--max-shard-size", "8MB"),
        ("consolidate", "half.safetensors", "--dtype", "bf16"),
        ("reshard", "ranks", "--world-size", 3),
        ("convert", "converted.safetensors"),
        ("convert", "converted.pt", "--dtype", "fp16"),
        ("synthesize", "sum.safetensors", "--weights", "0.75", "--tree", "model"),
    ):
        left, right = Path(out, "one", name), Path(out, "several", name)
        for parent in (left.parent, right.parent):
            parent.mkdir(exist_ok=True)
        first = command(verb, source, left, "--threads", 1, *options)
        assert not runs, "one worker forks no children"
        several = command(verb, source, right, "--threads", 3, "--max-memory", "12MiB", *options)
        assert several == first, (verb, name)
        print(name, first, *runs)
        if first == 0:
            assert all(found == asked for asked, found in runs), (name, runs)
            compare(left, right)
        runs.clear()


def compare(left: Path, right: Path) -> None:
    if left.is_file():
        assert filecmp.cmp(left, right, shallow=False), left
        return
    files = [path.relative_to(left) for path in left.rglob("*") if path.is_file()]
    assert files
    _, differing, lost = filecmp.cmpfiles(left, right, files, shallow=False)
    assert not differing and not lost, (differing, lost)
