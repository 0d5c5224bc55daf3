"""A checkpoint whose quantised weights are computed as they are read.

It is a catalog like any other: in place of the parts of each weight there is one tensor of a
floating-point type, in a file of its own that is nowhere on disk. Reading bytes of that file reads
the same rows of the parts, whatever chunks of whatever files hold them, and computes the values.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from ema_ckpt.core.box import Box
from ema_ckpt.core.catalog import Catalog, Chunk, Object, Payload, Reader, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.box_reader import BoxReader, locate_box
from ema_ckpt.reading.checksum_verifier import ChecksumVerifier
from ema_ckpt.reading.quantized.codes import Memory
from ema_ckpt.reading.quantized.comfy import HEADER_KEY
from ema_ckpt.reading.quantized.computation import Computation
from ema_ckpt.reading.quantized.schemes import QuantizedTensor
from ema_ckpt.reading.quantized.tied import shared_storage, ties_of_values
from ema_ckpt.reading.quantized.torchao import header_keys

if TYPE_CHECKING:
    from ema_ckpt.reading.decode import Array

_READ_NBYTES = 512 << 10
_KEPT_NBYTES = 4 << 20


class ComputedWeights:
    """The files of a checkpoint, with one more for each quantised weight.

    Attributes:
        replaced: files whose content is another than the stored one, by name.
    """

    def __init__(
        self,
        catalog: Catalog,
        weights: Mapping[str, QuantizedTensor],
        dtype: DType,
        *,
        verify: bool,
        replaced: Mapping[str, bytes] | None = None,
        kept_nbytes: int,
    ) -> None:
        self.root = catalog.source.root
        self._stored = catalog
        self._weights = weights
        self._dtype = dtype
        self._replaced = replaced or {}
        self._kept_nbytes = kept_nbytes
        self._verifier = ChecksumVerifier(catalog.source, verify)
        self._payloads: dict[str, tuple[Payload, ...]] = {}
        self._worker = threading.local()

    # What is found out while computing.

    def require_full_read(self, name: str) -> None:
        """Have the parts of a weight compared as a whole."""
        weight = self._weights.get(name)
        for part in () if weight is None else weight.parts.values():
            for payload in self._located(part):
                self._verifier.require_full_read(part.name, payload)

    def finish_state(self) -> None:
        """Compare what was read only in part with its checksums."""
        self._verifier.finish()

    def dump_state(self) -> object:
        return self._verifier.dump()

    def merge_state(self, dumped: Any) -> None:
        self._verifier.merge(dumped)

    def reset_state(self) -> None:
        self._verifier.reset()

    # Files.

    def size(self, name: str) -> int:
        if name in self._replaced:
            return len(self._replaced[name])
        weight = self._weights.get(name)
        if weight is None:
            return self._stored.source.size(name)
        for part in weight.parts.values():
            self._check_files(part)
        return prod(weight.layout.shape) * self._dtype.itemsize

    def _check_files(self, part: Tensor) -> None:
        """Check that the files that hold a part are there and long enough."""
        for index in prove(part):
            file = part.chunks[index].file
            expected, found = self._stored.files.get(file, 0), self._stored.source.size(file)
            if found < expected:
                sized = f"expected at least {expected} bytes, found {found}"
                message = f"{file}: {sized}: the file is truncated; it holds {part.name!r}"
                raise SourceError("truncated-file", message, tensor=part.name, file=file)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.read_into(name, offset, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        if name in self._replaced:
            buffer[:] = self._replaced[name][offset : offset + len(buffer)]
            return
        weight = self._weights.get(name)
        if weight is None:
            self._stored.source.read_into(name, offset, buffer)
            return
        itemsize = self._dtype.itemsize
        if offset % itemsize or len(buffer) % itemsize:
            raise SourceError("internal", f"{weight.name!r}: read at {offset}, inside an element")
        first, count = offset // itemsize, len(buffer) // itemsize
        place = 0
        for data in self._computation().values(weight, first, first + count):
            buffer[place : place + len(data)] = data
            place += len(data)

    def listing(self) -> list[str]:
        return self._stored.source.listing()

    def close(self) -> None:
        self._stored.source.close()

    # Values.

    def _computation(self) -> Computation:
        """What the calling thread computes with."""
        found: Computation | None = getattr(self._worker, "computation", None)
        if found is None:
            memory = self._worker.memory = Memory()
            found = self._worker.computation = Computation(
                self._read, self._dtype, memory, self._kept_nbytes
            )
        return found

    def _located(self, tensor: Tensor) -> tuple[Payload, ...]:
        payloads = self._payloads.get(tensor.name)
        if payloads is None:
            payloads = self._payloads[tensor.name] = self._stored.reader.payloads(tensor)
        return payloads

    def _read(self, tensor: Tensor, box: Box, name: str) -> Array:
        """Read a box of a part into the thread's memory of a name."""
        import numpy as np

        worker = self._worker
        if not hasattr(worker, "reader"):
            worker.reader = BoxReader(_READ_NBYTES, self._verifier)
        memory: Memory = worker.memory
        data = memory.array(name, box.numel * tensor.dtype.itemsize, np.uint8)
        payloads = self._located(tensor)
        located = locate_box(self._stored.source, tensor, payloads, prove(tensor), box)
        worker.reader.read(located, data.data)
        return data


class _DequantizedReader:
    """The reader of a checkpoint, and of the weights that are computed."""

    def __init__(self, inner: Reader, weights: Mapping[str, QuantizedTensor]) -> None:
        self._inner = inner
        self._weights = weights

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        if tensor.first_file not in self._weights:
            return self._inner.payloads(tensor)
        whole = tensor.nbytes
        itemsize = tensor.dtype.itemsize
        return tuple([Payload(c.file, 0, whole, start=c.offset // itemsize) for c in tensor.chunks])

    def load(self, item: Object) -> object:
        return self._inner.load(item)


def with_values(
    catalog: Catalog,
    weights: Sequence[QuantizedTensor],
    dtype: DType,
    *,
    verify: bool = True,
    replaced: Mapping[str, bytes] | None = None,
    kept_nbytes: int = _KEPT_NBYTES,
) -> Catalog:
    """Return a checkpoint that has the values of quantised weights in place of their parts.

    Args:
        dtype: type of the values. verify: compare stored checksums with what is read.
        replaced: content of files that is another than the stored one.
        kept_nbytes: what one thread may keep of codes that are read again.
    """
    by_file, by_place, gone = {}, {}, set[str]()
    for weight in weights:
        file = f"{weight.parts['codes'].first_file}#{weight.name}"
        by_file[file] = weight
        by_place[weight.place] = _computed_tensor(weight, file, dtype)
        gone.update(part.name for part in weight.parts.values())
    files = ComputedWeights(
        catalog, by_file, dtype, verify=verify, replaced=replaced, kept_nbytes=kept_nbytes
    )
    told = {HEADER_KEY, *header_keys(catalog.header_text)} if weights else set()
    tensors = []
    for tensor in catalog.tensors:
        if tensor.name in by_place:
            tensors.append(by_place[tensor.name])
        elif tensor.name not in gone:
            tensors.append(tensor)
    return replace(
        catalog,
        tensors=tuple(tensors),
        source=files,
        reader=_DequantizedReader(catalog.reader, by_file),
        digests={name: crc for name, crc in catalog.digests.items() if name not in gone},
        header_text={key: text for key, text in catalog.header_text.items() if key not in told},
        order=tuple(_order(catalog.order, by_place, gone)),
        ties=ties_of_values(catalog.ties, weights),
    )


def _computed_tensor(weight: QuantizedTensor, file: str, dtype: DType) -> Tensor:
    """The tensor of a weight's values, in the rows that the codes are stored in."""
    shape = weight.layout.logical_shape
    row_numel = prod(shape[1:])
    chunks = []
    for offsets, sizes in _row_boxes(weight, shape):
        start = offsets[0] * row_numel * dtype.itemsize if offsets else 0
        chunks.append(Chunk(offsets, sizes, file, start, prod(sizes) * dtype.itemsize))
    storage = shared_storage(weight)
    return Tensor(weight.name, weight.path, shape, dtype, tuple(chunks), storage)


def _row_boxes(weight: QuantizedTensor, shape: Sequence[int]) -> Iterator[Box]:
    """Yield the rows of each chunk of the codes, or the whole where they are cut otherwise."""
    codes = weight.parts["codes"]
    boxes = dict.fromkeys(chunk.box for chunk in codes.chunks)
    is_rows = all(box.sizes[1:] == codes.shape[1:] for box in boxes)
    if not is_rows or codes.shape[:1] != tuple(shape[:1]):
        yield Box((0,) * len(shape), tuple(shape))
        return
    for box in boxes:
        rest = tuple(shape[1:])
        yield Box((*box.offsets[:1], *(0,) * len(rest)), (*box.sizes[:1], *rest))


def _order(order: Iterable[str], by_place: Mapping[str, Tensor], gone: set[str]) -> Iterator[str]:
    for name in order:
        if name in by_place:
            yield by_place[name].name
        elif name not in gone:
            yield name
