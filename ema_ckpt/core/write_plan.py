"""Plan of a writer: which box of which tensor goes to which place of which file.

A format module lays tensors out and returns a `WritePlan`: all file sizes and payload places are
known before a byte is written; only checksums are not. What lies around payloads (headers, zip
directories, indices) is asked for by what it depends on: nothing, one item's checksum, or all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from ema_ckpt.core.box import Box
from ema_ckpt.core.catalog import Diagnostic, Object, Tensor
from ema_ckpt.core.dtypes import DType

_COALESCED_NBYTES = 64 << 10


class OutputTensor(NamedTuple):
    """A tensor to write: its new name and path, where it comes from, the dtype it is cast to."""

    name: str
    path: tuple[str | int, ...]
    source: Tensor
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in the dtype that is written."""
        return self.source.numel * self.dtype.itemsize

    @property
    def casts(self) -> bool:
        """Whether values change on the way."""
        return self.dtype != self.source.dtype

    @property
    def is_moved(self) -> bool:
        """Whether its bytes are copied as they are: stored as rows, and not cast."""
        if self.casts:
            return False
        return all(chunk.sizes[1:] == self.source.shape[1:] for chunk in self.source.chunks)


class OutputObject(NamedTuple):
    """An object to write: its new name and path, and where it comes from."""

    name: str
    path: tuple[str | int, ...]
    source: Object


class WriteItem(NamedTuple):
    """A box of one tensor, written row-major and little-endian at byte `offset` of `file`."""

    output: OutputTensor
    box: Box
    file: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the item in the dtype that is written."""
        return self.box.numel * self.output.dtype.itemsize


class HeaderBytes(NamedTuple):
    """Bytes that belong around payloads: a header, a directory, an index, a small item."""

    file: str
    offset: int
    data: bytes | bytearray


class WritePlan(Protocol):
    """A laid-out output; items are in the order in which they lie in the files."""

    @property
    def files(self) -> Mapping[str, int]:
        """Bytes of every file, by name relative to the target (`""` if the target is one file)."""
        ...

    @property
    def marker(self) -> str:
        """The file whose presence makes the others a checkpoint."""
        ...

    @property
    def items(self) -> Sequence[WriteItem]:
        """Every payload to write."""
        ...

    @property
    def warnings(self) -> Sequence[Diagnostic]:
        """What the output will lack."""
        ...

    def fixed_bytes(self) -> Iterator[HeaderBytes]:
        """Yield the bytes around payloads that are known before any payload is."""
        ...

    def item_bytes(self, index: int, crc: int) -> Iterator[HeaderBytes]:
        """Yield the bytes around `items[index]` that the CRC-32 of its bytes as written decides."""
        ...

    def header_bytes(
        self, crcs: Sequence[int], digests: Mapping[str, int]
    ) -> Iterator[HeaderBytes]:
        """Yield all remaining bytes, once payloads are written.

        `crcs[i]` is the CRC-32 of the bytes of `items[i]` as written; `digests[name]` that of the
        logical row-major bytes of the whole tensor `name`.
        """
        ...


def all_header_bytes(
    plan: WritePlan, crcs: Sequence[int], digests: Mapping[str, int]
) -> Iterator[HeaderBytes]:
    """Yield everything but the payloads; those that follow one another in a file are joined."""

    def each() -> Iterator[HeaderBytes]:
        yield from plan.fixed_bytes()
        for index, crc in enumerate(crcs):
            yield from plan.item_bytes(index, crc)
        yield from plan.header_bytes(crcs, digests)

    return coalesce_headers(each())


def keep_first(tensors: Iterable[OutputTensor]) -> tuple[list[OutputTensor], dict[str, str]]:
    """Drop tensors whose storage, place, shape and strides an earlier one has.

    Returns what is left, and the kept name of each dropped one. Only torch files record storages.
    """
    kept: list[OutputTensor] = []
    ties: dict[str, str] = {}
    owners: dict[object, str] = {}
    for tensor in tensors:
        source = tensor.source
        identity = (source.storage, source.shape, source.dtype.name, tensor.dtype.name)
        if source.storage is not None and source.numel and identity in owners:
            ties[tensor.name] = owners[identity]
            continue
        owners.setdefault(identity, tensor.name)
        kept.append(tensor)
    return kept, ties


def coalesce_headers(headers: Iterable[HeaderBytes]) -> Iterator[HeaderBytes]:
    """Join header bytes that follow one another: the end of one archive, the start of the next."""
    last: HeaderBytes | None = None
    for header in headers:
        if last is not None:
            end = (last.file, last.offset + len(last.data))
            nbytes = len(last.data) + len(header.data)
            if (header.file, header.offset) == end and nbytes <= _COALESCED_NBYTES:
                last = HeaderBytes(last.file, last.offset, last.data + header.data)
                continue
            yield last
        last = header
    if last is not None:
        yield last
