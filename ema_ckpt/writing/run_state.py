"""What a run found out: CRC-32s of items and storages, and values that a cast made infinite."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ema_ckpt.core.box import is_contiguous_in, linear, whole
from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.write_plan import WriteItem
from ema_ckpt.reading.checksum_verifier import ChecksumVerifier, Interval, join_crcs
from ema_ckpt.reading.digests import explain_mismatch
from ema_ckpt.runtime.executor import dump_json


class Outcome(NamedTuple):
    """The result of a run.

    Attributes:
        crcs: CRC-32 of each item, in the order of the plan.
        digests: CRC-32 of each whole tensor, by the name it is written under.
        overflow: finite values that became infinite, by the same name.
    """

    crcs: Sequence[int]
    digests: Mapping[str, int]
    overflow: Mapping[str, int]


class _Partial(NamedTuple):
    """CRC-32s of parts of an item, by place in it: as written, and as read before a cast."""

    intervals: list[Interval]
    source_intervals: list[Interval]


class RunState:
    """Collects results of workers in this process; what other processes dump is merged in.

    Attributes:
        verifier: compares storages of the source with their stored checksums.
    """

    def __init__(
        self,
        catalog: Catalog,
        items: Sequence[WriteItem],
        verify: bool,
        on_item: Callable[[int, int], None] | None = None,
    ) -> None:
        """Start with nothing; `on_item` is called with index and CRC-32 of each finished item."""
        self.verifier = ChecksumVerifier(catalog.source, verify)
        self._catalog = catalog
        self._items = items
        self._verify = verify
        self._on_item = on_item
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.verifier.reset()
        self._crcs: list[int | None] = [None] * len(self._items)
        self._partial: dict[int, _Partial] = {}
        self._overflow: dict[str, int] = {}

    def record(
        self,
        index: int,
        intervals: Sequence[Interval],
        source_intervals: Sequence[Interval] = (),
    ) -> None:
        """Record CRC-32s of a part of an item; with the last part, compute that of the whole."""
        nbytes = self._items[index].nbytes
        if sum(length for _, length, _ in intervals) == nbytes:
            self._complete(index, intervals, source_intervals)
            return
        with self._lock:
            partial = self._partial.setdefault(index, _Partial([], []))
            partial.intervals.extend(intervals)
            partial.source_intervals.extend(source_intervals)
            if sum(length for _, length, _ in partial.intervals) < nbytes:
                return
            del self._partial[index]
        self._complete(index, partial.intervals, partial.source_intervals)

    def _complete(
        self, index: int, intervals: Sequence[Interval], source_intervals: Sequence[Interval]
    ) -> None:
        item = self._items[index]
        tensor = item.output.source
        crc = join_crcs(intervals, item.nbytes)
        if crc is None:
            raise SourceError("internal", f"the parts of {tensor.name!r} do not make a whole")
        self._crcs[index] = crc
        if self._on_item is not None:
            self._on_item(index, crc)
        expected = self._catalog.digests.get(tensor.name)
        if expected is None or not self._verify or item.box.sizes != tensor.shape:
            return
        digest = join_crcs(source_intervals if item.output.casts else intervals, tensor.nbytes)
        if digest is None or digest == expected:  # None: it was not read in order
            return
        file = tensor.chunks[0].file if tensor.chunks else ""
        values = f"expected the digest crc32:{expected:08x}, found crc32:{digest:08x}"
        message = f"{file}: tensor {tensor.name!r}: {values}: {explain_mismatch(self._catalog)}"
        raise SourceError("checksum", message, tensor=tensor.name, file=file)

    def add_overflow(self, counts: Mapping[str, int]) -> None:
        """Add values that became infinite, by name."""
        with self._lock:
            for name, count in counts.items():
                self._overflow[name] = self._overflow.get(name, 0) + count

    def finish(self) -> Outcome:
        """Compare storages that were read in part, and compute digests of whole tensors.

        Raises:
            SourceError: `checksum`; `internal` if a part of an item was not written.
        """
        self.verifier.finish()
        crcs: list[int] = []
        parts: dict[str, list[Interval]] = {}
        for item, crc in zip(self._items, self._crcs, strict=True):
            if crc is None:
                raise SourceError("internal", f"{item.output.name!r} was not written as a whole")
            crcs.append(crc)
            shape = item.output.source.shape
            if is_contiguous_in(item.box, whole(shape)):
                intervals = parts.setdefault(item.output.name, [])
                if item.nbytes:
                    start = linear(item.box.offsets, shape) * item.output.dtype.itemsize
                    intervals.append((start, item.nbytes, crc))
        digests = {}
        for tensor in {item.output.name: item.output for item in self._items}.values():
            if tensor.name in parts:
                digest = join_crcs(parts[tensor.name], tensor.nbytes)
                if digest is not None:
                    digests[tensor.name] = digest
        return Outcome(crcs, digests, self._overflow)

    def dump(self) -> bytes:
        crcs = [(index, crc) for index, crc in enumerate(self._crcs) if crc is not None]
        partial = [(index, *intervals) for index, intervals in self._partial.items()]
        return dump_json([crcs, partial, self._overflow, self.verifier.dump()])

    def merge(self, dumped: bytes) -> None:
        crcs, partial, overflow, verifier = json.loads(dumped)
        for index, crc in crcs:
            self._crcs[index] = crc
        self.add_overflow(overflow)
        self.verifier.merge(verifier)
        for index, *both in partial:
            intervals, source_intervals = ([(a, n, crc) for a, n, crc in one] for one in both)
            self.record(index, intervals, source_intervals)
