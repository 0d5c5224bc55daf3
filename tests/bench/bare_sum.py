"""The limit of merging: `bare_sum.py WORKERS OUT STEP…` adds up the files of all steps with numpy, and nothing else.

Every file is taken for float32 from its first byte to its last. The steps have files of the same names and sizes. Blocks
of each are read, their CRC-32 is computed, they are widened, weighted and added in float64, and the sum is rounded and
written: what a merge has to do if it knows where everything is.
"""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np
from zlib_ng import zlib_ng

NUMEL, PASS, SEGMENT = 96 << 10, 32 << 10, 32 << 20


def main() -> None:
    workers, out, steps = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    segments = []
    end = 0
    for name in sorted(os.listdir(steps[0])):
        nbytes = os.path.getsize(os.path.join(steps[0], name)) // 4 * 4
        for start in range(0, nbytes, SEGMENT):
            segments.append((name, start, min(start + SEGMENT, nbytes), end + start))
        end += nbytes
    children = []
    for worker in range(1, workers):
        pid = os.fork()
        if not pid:
            merge(segments[worker::workers], steps, out)
            os._exit(0)
        children.append(pid)
    merge(segments[::workers], steps, out)
    for pid in children:
        os.waitpid(pid, 0)


def merge(segments: list[tuple[str, int, int, int]], steps: list[str], out: str) -> None:
    np.seterr(all="ignore")
    target = os.open(out, os.O_RDWR | os.O_CREAT, 0o644)
    block, total, scaled = (np.frombuffer(mmap.mmap(-1, NUMEL * 8), "u1") for _ in range(3))
    sums = [
        (2 * (step + 1) / (len(steps) * (len(steps) + 1)), path) for step, path in enumerate(steps)
    ]
    for name, start, stop, place in segments:
        files = [(weight, os.open(os.path.join(path, name), os.O_RDONLY)) for weight, path in sums]
        for position in range(start, stop, NUMEL * 4):
            raw = block[: min(NUMEL * 4, stop - position)]
            result = total.view("f8")[: raw.size // 4]
            for index, (weight, fd) in enumerate(files):
                os.preadv(fd, [raw], position)
                zlib_ng.crc32(raw)
                add(result, raw.view("f4"), weight, scaled.view("f8"), index == 0)
            rounded = raw.view("f4")
            np.copyto(rounded, result, casting="unsafe")
            zlib_ng.crc32(raw)
            os.pwrite(target, raw, place + position - start)
        for _, fd in files:
            os.close(fd)
    os.close(target)


def add(
    total: np.ndarray, values: np.ndarray, weight: float, scaled: np.ndarray, is_first: bool
) -> None:
    for start in range(0, values.size, PASS):
        found, sums = values[start : start + PASS], total[start : start + PASS]
        weighted = sums if is_first else scaled[: found.size]
        np.copyto(weighted, found)
        np.multiply(weighted, weight, out=weighted)
        if not is_first:
            np.add(sums, weighted, out=sums)


if __name__ == "__main__":
    main()
