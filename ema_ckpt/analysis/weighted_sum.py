"""A checkpoint computed as it is read: each tensor is the weighted sum of one in several others.

It is a catalog like any other, so everything that writes checkpoints can write it. Its files are
the tensors: reading bytes of one adds up the same elements of all sources in float64, whatever
their layouts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ema_ckpt.analysis.accumulator import BLOCK_NUMEL, Accumulator
from ema_ckpt.core.catalog import Catalog, Chunk, Object, Payload, Tensor
from ema_ckpt.core.dtypes import DType, by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.box_reader import BoxReader, LocatedBox, locate
from ema_ckpt.reading.checksum_verifier import ChecksumVerifier
from ema_ckpt.runtime.page_buffer import buffer as page_buffer
from ema_ckpt.storage.files import LocalFiles, is_url

if TYPE_CHECKING:
    from ema_ckpt.reading.decode import Array

_BLOCK_NBYTES = 512 << 10
_AHEAD_NBYTES = 4 << 20
_KEPT_LOCATIONS = 8  # tensors being written at a time


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of one source, and its weight in the sum."""

    catalog: Catalog
    tensor: Tensor
    weight: float


def blended_dtype(dtypes: Sequence[DType]) -> DType:
    """Type of a sum: that of all its parts, or, if they differ, the widest, at least float32."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return max((*dtypes, by_name("float32")), key=lambda dtype: dtype.itemsize)


class WeightedSum:
    """The sums as files, one for each tensor, and as the reader of the catalog that holds them.

    With `verify` every source's storages are compared with their checksums.

    Attributes:
        overflow: number of finite sums that became infinite in their stored type so far, by name.
    """

    root = "sums"

    def __init__(self, verify: bool) -> None:
        self.overflow: dict[str, int] = {}
        self._verify = verify
        self._verifiers: dict[int, ChecksumVerifier] = {}
        self._sums: dict[str, tuple[Tensor, tuple[Part, ...]]] = {}
        self._located: dict[str, list[LocatedBox]] = {}
        self._lock = threading.Lock()
        self._worker = threading.local()

    def add(self, name: str, parts: Sequence[Part], stored: DType | None = None) -> Tensor:
        """Add the sum of `parts`, whose shapes are equal, as a tensor called `name`.

        Args:
            stored: the type that the sum is rounded to; by default that of its parts.
        """
        dtype = stored or blended_dtype([part.tensor.dtype for part in parts])
        shape = parts[0].tensor.shape
        file = f"sum-{len(self._sums)}"
        bare = Tensor(name, (name,), shape, dtype, ())
        chunk = Chunk((0,) * len(shape), shape, file, 0, bare.nbytes)
        tensor = Tensor(name, (name,), shape, dtype, (chunk,))
        self._sums[file] = (tensor, tuple(parts))
        for part in parts:
            source = part.catalog.source
            if isinstance(source, LocalFiles):
                source.read_ahead(_AHEAD_NBYTES)
            self._verifiers.setdefault(id(source), ChecksumVerifier(source, self._verify))
        return tensor

    def require_full_read(self, name: str) -> None:
        """Have the terms of a sum compared as a whole; a constant's file is none."""
        if name not in self._sums:
            return
        for part in self._sums[name][1]:
            verifier = self._verifiers[id(part.catalog.source)]
            for payload in part.catalog.reader.payloads(part.tensor):
                verifier.require_full_read(part.tensor.name, payload)

    def finish_state(self) -> None:
        """Check storages of which only a part was read. Raises SourceError `checksum`."""
        for verifier in self._verifiers.values():
            verifier.finish()

    def dump_state(self) -> object:
        return [self.overflow, [verifier.dump() for verifier in self._verifiers.values()]]

    def merge_state(self, dumped: Any) -> None:
        overflow, verifiers = dumped
        for name, count in overflow.items():
            self.overflow[name] = self.overflow.get(name, 0) + count
        for verifier, state in zip(self._verifiers.values(), verifiers, strict=True):
            verifier.merge(state)

    def reset_state(self) -> None:
        self.overflow.clear()
        for verifier in self._verifiers.values():
            verifier.reset()

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        return tuple([Payload(chunk.file, chunk.offset, chunk.nbytes) for chunk in tensor.chunks])

    def load(self, item: Object) -> object:
        return item.inline

    def size(self, name: str) -> int:
        return self._sums[name][0].nbytes

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.read_into(name, offset, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        import numpy as np

        tensor, parts = self._sums[name]
        itemsize = tensor.dtype.itemsize
        if offset % itemsize or len(buffer) % itemsize:
            raise SourceError("internal", f"{tensor.name!r}: read at {offset}, inside an element")
        first, count = offset // itemsize, len(buffer) // itemsize
        located = self._locate(name)
        if len(parts) == 1 and parts[0].weight == 1 and located[0].tensor.dtype == tensor.dtype:
            # Integers, say, must not pass through float64.
            self._reader(located[0]).read(located[0], buffer, offset)
            return
        weights = [part.weight for part in parts]
        terms = list(zip(located, weights, map(self._reader, located), strict=True))
        step, width = _numel_at_once(tensor, located, count), _numbers_in(tensor.dtype)
        buffers, overflow = self._buffers, 0
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, count, step):
                numel = min(step, count - start)
                total = buffers.add_up(terms, first + start, numel, numel * width)
                out = buffer[start * itemsize : (start + numel) * itemsize]
                overflow += buffers.accumulator.round_into(total, tensor.dtype, out)
        if overflow:
            with self._lock:
                self.overflow[tensor.name] = self.overflow.get(tensor.name, 0) + overflow

    def listing(self) -> list[str]:
        return list(self._sums)

    def close(self) -> None:
        pass  # the sources are closed by who opened them

    def _locate(self, name: str) -> list[LocatedBox]:
        """Locate the parts of a sum; the last few are kept."""
        with self._lock:
            located = self._located.get(name)
            if located is None:
                located = [locate(part.catalog, part.tensor) for part in self._sums[name][1]]
                while len(self._located) >= _KEPT_LOCATIONS:
                    self._located.pop(next(iter(self._located)))
                self._located[name] = located
            return located

    @property
    def _buffers(self) -> _Buffers:
        """What the calling thread reads and adds up with."""
        found: _Buffers | None = getattr(self._worker, "buffers", None)
        if found is None:
            found = self._worker.buffers = _Buffers()
        return found

    def _reader(self, located: LocatedBox) -> BoxReader:
        """What the calling thread reads a source with."""
        readers, source = self._buffers.readers, id(located.source)
        reader = readers.get(source)
        if reader is None:
            reader = readers[source] = BoxReader(_BLOCK_NBYTES, self._verifiers[source])
        return reader


_Term = tuple[LocatedBox, float, BoxReader]


class _Buffers:
    """Buffers of one thread: a reader for each source, what was read last, and sums."""

    def __init__(self) -> None:
        self.readers: dict[int, BoxReader] = {}
        self.accumulator = Accumulator()
        self._block = memoryview(b"")

    def add_up(self, terms: Sequence[_Term], first: int, count: int, numbers: int) -> Array:
        """Add up `count` elements of all terms, from `first` on: so many numbers.

        Valid until the next sum.
        """
        dtypes = [located.tensor.dtype for located, _, _ in terms]
        nbytes = count * max(dtype.itemsize for dtype in dtypes)
        if len(self._block) < nbytes:
            self._block = page_buffer(nbytes)
        total = self.accumulator.begin(numbers)
        for index, (located, weight, reader) in enumerate(terms):
            dtype = dtypes[index]
            block = self._block[: count * dtype.itemsize]
            reader.read(located, block, first * dtype.itemsize)
            self.accumulator.add(total, block, dtype, weight, is_first=index == 0)
        return total


def _numel_at_once(tensor: Tensor, located: Sequence[LocatedBox], count: int) -> int:
    """Choose how many of `count` elements are added up at once.

    Few, so that they stay in the cache, where all parts are ranges of local files; what is put
    together from columns, or comes from far away, is read as it is asked for.
    """
    for box in located:
        if box.ranges is None or is_url(box.source.root):
            return max(count, 1)
    return BLOCK_NUMEL // _numbers_in(tensor.dtype)


def _numbers_in(dtype: DType) -> int:
    """Count the numbers of an element: a complex one has two."""
    return dtype.itemsize // dtype.part.itemsize
