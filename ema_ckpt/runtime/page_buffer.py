"""Memory for blocks of elements."""

from __future__ import annotations

import mmap


def buffer(nbytes: int) -> memoryview:
    """Zeros that begin a page, this process' own.

    Vector instructions on what begins inside a cache line, as a `bytearray` does, take up to twice
    as long.
    """
    return memoryview(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[
        :nbytes
    ]
