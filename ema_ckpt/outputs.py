"""The files of a target while they are being written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ema_ckpt.staging import preallocate

__all__ = ["Outputs"]


class Outputs:
    """The files being written, open and at their final size."""

    def __init__(self, root: Path, files: Mapping[str, int]) -> None:
        self._fds: dict[str, int] = {}
        try:
            for name, nbytes in files.items():
                path = root / name if name else root
                path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                self._fds[name] = fd
                preallocate(fd, nbytes)
        except BaseException:
            self.close()
            raise

    def write(self, file: str, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data` at `offset`."""
        fd, view = self._fds[file], memoryview(data)
        while view:
            done = os.pwrite(fd, view, offset)
            view, offset = view[done:], offset + done

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Read back what an earlier run wrote."""
        done = 0
        while done < len(buffer):
            done += os.preadv(self._fds[file], [buffer[done:]], offset + done) or len(buffer)

    def close(self) -> None:
        """Close every file."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
