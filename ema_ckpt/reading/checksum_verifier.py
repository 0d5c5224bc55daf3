"""Compare stored checksums with what is read: in any order of ranges, by several workers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from ema_ckpt.core.catalog import Files, Payload
from ema_ckpt.core.crc import combine_crcs, crc32
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.sidecar import CHANGED_BYTES, OTHER_BYTES
from ema_ckpt.runtime.page_buffer import buffer

_BLOCK_NBYTES = 1 << 19
Interval = tuple[int, int, int]  # start and length in bytes, CRC-32


def mismatch(tensor: str, payload: Payload, crc: int) -> SourceError:
    """The error for a storage that has another CRC-32 than the checkpoint records."""
    expected = f"expected CRC-32 {payload.crc or 0:08x}, found {crc:08x}"
    cause = OTHER_BYTES if payload.is_recorded else CHANGED_BYTES
    message = f"{payload.file}: tensor {tensor!r}: {expected}: {cause}; use another copy"
    return SourceError("checksum", message, tensor=tensor, file=payload.file)


def join_crcs(intervals: Iterable[Interval], nbytes: int) -> int | None:
    """CRC-32 of `nbytes` bytes from those of intervals that tile them, or None if they do not."""
    crc, end = 0, 0
    for start, length, part in sorted(set(intervals)):
        if start != end:
            return None
        crc = combine_crcs(crc, part, length) if end else part
        end += length
    return crc if end == nbytes else None


def range_crc(source: Files, file: str, offset: int, nbytes: int, block: memoryview) -> int:
    """CRC-32 of a range of a file, read through `block`."""
    crc = 0
    for position in range(0, nbytes, len(block)):
        view = block[: nbytes - position]
        source.read_into(file, offset + position, view)
        crc = crc32(view, crc)
    return crc


@runtime_checkable
class ComputedFiles(Protocol):
    """Files that are computed as they are read, and find out things on the way."""

    def require_full_read(self, name: str) -> None:
        """Have all that a file is computed from compared, whether it is read or not."""
        ...

    def finish_state(self) -> None:
        """Compare what was read only in part. Raises SourceError `checksum`."""
        ...

    def dump_state(self) -> object:
        """Return what was found out, as plain data for `merge_state`."""
        ...

    def merge_state(self, dumped: Any) -> None:
        """Add what another process dumped."""
        ...

    def reset_state(self) -> None:
        """Forget it."""
        ...


def computed_files(source: Files) -> ComputedFiles | None:
    """Return the files if they are computed, also from behind others that pass calls on."""
    inner: object = source
    while inner is not None and not isinstance(inner, ComputedFiles):
        inner = getattr(inner, "inner", None)
    return inner


class ChecksumVerifier:
    """Collects CRC-32s of ranges that are read, and compares each storage once it is complete.

    What files that are computed find out on the way goes with it, from process to process.
    """

    def __init__(self, source: Files, enabled: bool) -> None:
        self._source = source
        self._computed = computed_files(source)
        self._enabled = enabled
        self._lock = threading.Lock()
        # Storages read in part: tensor, payload, intervals and how many bytes these have.
        self._open: dict[tuple[str, int], tuple[str, Payload, list[Interval], int]] = {}
        # Bytes from which on it is worth looking whether the intervals tile the storage.
        self._due: dict[tuple[str, int], int] = {}

    def record(self, tensor: str, payload: Payload, start: int, nbytes: int, crc: int) -> None:
        """Record the CRC-32 of `nbytes` bytes from `start`, relative to the storage.

        Raises:
            SourceError: `checksum` if that completes the storage and it does not match.
        """
        if payload.crc is None or not self._enabled:
            return
        if nbytes == payload.nbytes:
            if crc != payload.crc:
                raise mismatch(tensor, payload, crc)
            return
        key = (payload.file, payload.offset)
        with self._lock:
            _, _, intervals, total = self._open.get(key, (tensor, payload, [], 0))
            intervals.append((start, nbytes, crc))
            self._open[key] = (tensor, payload, intervals, total + nbytes)
            complete = total + nbytes >= self._due.get(key, payload.nbytes)
            if complete:  # where views overlap, they never do
                self._due[key] = 2 * (total + nbytes)
        if complete and self._compare(tensor, payload, intervals):
            with self._lock:
                self._open.pop(key, None)
                self._due.pop(key, None)

    def require_full_read(self, tensor: str, payload: Payload) -> None:
        """Mark a storage whose ranges cannot be joined into one CRC; `finish` reads it in full."""
        if self._computed is not None:
            self._computed.require_full_read(payload.file)
        if payload.crc is not None and self._enabled:
            with self._lock:
                self._open.setdefault((payload.file, payload.offset), (tensor, payload, [], 0))

    def finish(self) -> None:
        """Read and compare every storage of which only a part was read.

        Raises:
            SourceError: `checksum`.
        """
        block: memoryview | None = None
        for tensor, payload, intervals, _ in list(self._open.values()):
            if not self._compare(tensor, payload, intervals):
                block = block or buffer(_BLOCK_NBYTES)
                crc = range_crc(self._source, payload.file, payload.offset, payload.nbytes, block)
                if crc != payload.crc:
                    raise mismatch(tensor, payload, crc)
        self._open.clear()
        self._due.clear()
        if self._computed is not None:
            self._computed.finish_state()

    def reset(self) -> None:
        """Forget what was read."""
        self._open.clear()
        self._due.clear()
        if self._computed is not None:
            self._computed.reset_state()

    def dump(self) -> list[object]:
        """Return what was read of incomplete storages, as plain data for `merge`."""
        computed = None if self._computed is None else self._computed.dump_state()
        return [computed, [[tensor, *rest] for tensor, *rest in self._open.values()]]

    def merge(self, dumped: Sequence[Any]) -> None:
        """Add what another process read, after JSON."""
        computed, opened = dumped
        if self._computed is not None:
            self._computed.merge_state(computed)
        for tensor, fields, intervals, nbytes in opened:
            payload = Payload(*fields)
            if payload.strides is not None:
                payload = payload._replace(strides=tuple(payload.strides))
            key = (payload.file, payload.offset)
            _, _, own, total = self._open.get(key, (tensor, payload, [], 0))
            merged = own + [(start, length, crc) for start, length, crc in intervals]
            self._open[key] = (tensor, payload, merged, total + nbytes)

    def _compare(self, tensor: str, payload: Payload, intervals: list[Interval]) -> bool:
        """Compare a storage if its intervals tile it; return whether they do."""
        crc = join_crcs(intervals, payload.nbytes)
        if crc is not None and crc != payload.crc:
            raise mismatch(tensor, payload, crc)
        return crc is not None
