"""The limit of reading: `bare_loop.py WORKERS FILE…` reads all bytes and computes their CRC-32, and nothing else."""

from __future__ import annotations

import os
import sys

from zlib_ng import zlib_ng

BLOCK, SEGMENT = 1 << 20, 32 << 20


def main() -> None:
    workers, files = int(sys.argv[1]), sys.argv[2:]
    segments = []
    for file in files:
        segments += [(file, start) for start in range(0, os.path.getsize(file), SEGMENT)]
    children = []
    for worker in range(1, workers):
        pid = os.fork()
        if not pid:
            read(segments[worker::workers])
            os._exit(0)
        children.append(pid)
    read(segments[::workers])
    for pid in children:
        os.waitpid(pid, 0)


def read(segments: list[tuple[str, int]]) -> None:
    block = memoryview(bytearray(BLOCK))
    for file, start in segments:
        fd = os.open(file, os.O_RDONLY)
        end = min(start + SEGMENT, os.path.getsize(file))
        crc, position = 0, start
        while position < end:
            nbytes = os.preadv(fd, [block[: end - position]], position)
            crc = zlib_ng.crc32(block[:nbytes], crc)
            position += nbytes
        os.close(fd)


if __name__ == "__main__":
    main()
