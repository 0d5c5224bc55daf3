"""Refuse to load numpy where it would end the process.

Its OpenBLAS calls `exit(1)` when it gets no memory as it is loaded; to `verify` that would mean
damage, and nothing would be cleaned up.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Sequence
from types import ModuleType

_NBYTES = 90 << 20  # of addresses, that numpy 1.26 to 2.5 take with their OpenBLAS


class _NumpyGuard:
    """A finder that finds nothing: numpy is looked for by the others if it may be loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Raise MemoryError in place of numpy's import if it could not get its addresses."""
        _ = path, target
        if name == "numpy":
            try:
                mmap.mmap(-1, _NBYTES).close()
            except OSError:
                raise MemoryError from None


def guard_numpy() -> None:
    """Guard this process' import of numpy, where its addresses are limited (`ulimit -v`)."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on this system
        import resource

        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            sys.meta_path.insert(0, _NumpyGuard())
