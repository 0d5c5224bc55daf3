"""A checkpoint that is computed as it is read: each tensor the weighted sum of that tensor in
several others.

It is a catalog like any other, so everything that writes checkpoints can write it. Its files are
the tensors: reading bytes of one adds up the same elements of all sources in float64, whatever
their layouts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ema_ckpt.core.box import Box, flat_range_boxes
from ema_ckpt.core.catalog import Catalog, Chunk, Object, Payload, Tensor
from ema_ckpt.core.dtypes import DType, by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.cast import Caster
from ema_ckpt.reading.checksums import ChecksumVerifier
from ema_ckpt.reading.decode import decode
from ema_ckpt.reading.overlaps import BoxReader
from ema_ckpt.reading.streams import Stream, locate

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LIMIT_NBYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of one source, and what it is multiplied by."""

    catalog: Catalog
    tensor: Tensor
    weight: float


def blended_dtype(dtypes: Sequence[DType]) -> DType:
    """The type of a sum: that of all its parts, or the widest, float32 at least, where they
    differ.
    """
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return max((*dtypes, by_name("float32")), key=lambda dtype: dtype.itemsize)


class WeightedSum:
    """The sums as files, one a tensor, and as the reader of the catalog that holds them.

    With `verify` every source's storages are compared with their checksums; `finish` does what is
    left of that.

    Attributes:
        overflow: how many finite sums became infinite in the type they are stored in so far, by
            name.
    """

    root = "sums"

    def __init__(self, verify: bool) -> None:
        self.overflow: dict[str, int] = {}
        self._verify = verify
        self._checks: dict[int, ChecksumVerifier] = {}
        self._sums: dict[str, tuple[Tensor, tuple[Part, ...]]] = {}
        self._streams: dict[str, list[tuple[Stream, float]]] = {}
        self._lock = threading.Lock()
        self._own = threading.local()

    def add(self, name: str, parts: Sequence[Part]) -> Tensor:
        """The sum of `parts`, whose shapes are equal, as a tensor called `name`."""
        dtype, shape = blended_dtype([part.tensor.dtype for part in parts]), parts[0].tensor.shape
        file = f"sum-{len(self._sums)}"
        tensor = Tensor(name, (name,), shape, dtype, ())
        tensor = replace(tensor, chunks=(Chunk((0,) * len(shape), shape, file, 0, tensor.nbytes),))
        self._sums[file] = (tensor, tuple(parts))
        for part in parts:
            source = part.catalog.source
            self._checks.setdefault(id(source), ChecksumVerifier(source, self._verify))
        return tensor

    def finish(self) -> None:
        """Check storages of which only a part was read. Raises SourceError `checksum`."""
        for checks in self._checks.values():
            checks.finish()

    # As a reader.

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        """Each sum lies bare in its own file."""
        return tuple(Payload(chunk.file, chunk.offset, chunk.nbytes) for chunk in tensor.chunks)

    def load(self, item: Object) -> object:
        """There are no objects."""
        return item.inline

    # As files.

    def size(self, name: str) -> int:
        """Bytes of a sum."""
        return self._sums[name][0].nbytes

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Bytes of a sum; both numbers are multiples of its element's size."""
        buffer = bytearray(nbytes)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the sum of the elements from byte `offset` on."""
        tensor, _ = self._sums[name]
        itemsize = tensor.dtype.itemsize
        if offset % itemsize or len(buffer) % itemsize:
            raise SourceError("internal", f"{tensor.name!r}: read at {offset}, inside an element")
        at = 0
        start, stop = offset // itemsize, (offset + len(buffer)) // itemsize
        for box in flat_range_boxes(tensor.shape, start, stop):
            nbytes = box.numel * itemsize
            self._sum(name, tensor, box, buffer[at : at + nbytes])
            at += nbytes

    def listing(self) -> list[str]:
        """One name a sum."""
        return list(self._sums)

    def close(self) -> None:
        """The sources are closed by who opened them."""

    def _located(self, name: str) -> list[tuple[Stream, float]]:
        with self._lock:
            found = self._streams.get(name)
            if found is None:
                _, parts = self._sums[name]
                found = [(locate(part.catalog, part.tensor), part.weight) for part in parts]
                self._streams = {
                    name: found,
                    **dict(list(self._streams.items())[:7]),
                }  # those being written
            return found

    def _sum(self, name: str, tensor: Tensor, box: Box, out: memoryview) -> None:
        import numpy as np

        parts = self._located(name)
        if len(parts) == 1 and parts[0][1] == 1 and parts[0][0].tensor.dtype == tensor.dtype:
            out[:] = self._read(parts[0][0], box)  # integers, say, are not to pass through float64
            return
        total: NDArray[Any] | None = None
        with np.errstate(over="ignore", invalid="ignore"):
            for stream, weight in parts:
                values = decode(self._read(stream, box), stream.tensor.dtype, np.float64)
                values *= weight
                total = values if total is None else np.add(total, values, out=total)
        if total is not None:
            out[:] = self._encoded(total, tensor)

    def _read(self, stream: Stream, box: Box) -> memoryview:
        own = self._own
        if not hasattr(own, "readers"):
            own.readers, own.block = {}, bytearray()
        source = stream.catalog.source
        reader = own.readers.get(id(source))
        if reader is None:
            reader = own.readers[id(source)] = BoxReader(
                source, self._checks[id(source)], _LIMIT_NBYTES
            )
        nbytes = box.numel * stream.tensor.dtype.itemsize
        if len(own.block) < nbytes:
            own.block = bytearray(nbytes)
        view = memoryview(own.block)[:nbytes]
        reader.read(stream.tensor, stream.shares, box, view)
        return view

    def _encoded(self, total: NDArray[Any], tensor: Tensor) -> memoryview:
        caster = Caster(by_name("float64"), tensor.dtype.part)
        data = caster.cast(total.view("u1"))
        if caster.overflow:
            with self._lock:
                self.overflow[tensor.name] = self.overflow.get(tensor.name, 0) + caster.overflow
        return data
