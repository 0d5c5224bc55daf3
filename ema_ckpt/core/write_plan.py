"""What a writer is asked for: which piece of which tensor goes to which place of which file.

A format module lays tensors out (`safetensors.lay_out(...)` and so on) and returns a `WritePlan`:
all file sizes and payload places are known before a byte is written; only checksums are not. The
engine copies the pieces, then asks for the frames (headers, directories, indices), which carry the
checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from ema_ckpt.core.box import Box
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.dtypes import DType

_JOINED_NBYTES = 64 << 10


class OutputTensor(NamedTuple):
    """A tensor to be written: the name and path it gets, where it comes from, the dtype it is cast
    to.
    """

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


class WriteItem(NamedTuple):
    """A box of one tensor, written row-major and little-endian at `offset` (bytes) of the target
    file `file`.
    """

    output: OutputTensor
    box: Box
    file: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the piece in the dtype that is written."""
        return self.box.numel * self.output.dtype.itemsize

    @property
    def is_moved(self) -> bool:
        """Whether its bytes are moved as they are, as far as shapes tell: they are rows, and
        nothing is cast.
        """
        source = self.output.source
        return not self.output.casts and all(
            chunk.sizes[1:] == source.shape[1:] for chunk in source.chunks
        )


class HeaderBytes(NamedTuple):
    """Bytes that belong around payloads: a header, a directory, an index, a small item."""

    file: str
    offset: int
    data: bytes


class WritePlan(Protocol):
    """A laid-out output. Pieces are in the order in which they lie in the files."""

    @property
    def files(self) -> Mapping[str, int]:
        """Every file to be written, relative to the target (`""` when the target is one file), and
        its bytes.
        """
        ...

    @property
    def items(self) -> Sequence[WriteItem]:
        """Every payload to be written."""
        ...

    def header_bytes(
        self, crcs: Sequence[int], digests: Mapping[str, int]
    ) -> Iterator[HeaderBytes]:
        """All remaining bytes, once payloads are there.

        `crcs[i]` is the CRC-32 of the bytes of `pieces[i]` as written; `digests[name]` that of the
        logical row-major bytes of the whole entry `name`.
        """
        ...


def keep_first(entries: Iterable[OutputTensor]) -> tuple[list[OutputTensor], dict[str, str]]:
    """Drop every entry whose storage, place, shape and strides an earlier one has.

    Returns what is left, and the kept name of each dropped one. Only torch files record storages.
    """
    kept: list[OutputTensor] = []
    ties: dict[str, str] = {}
    owners: dict[object, str] = {}
    for entry in entries:
        source = entry.source
        identity = (source.storage, source.shape, source.dtype.name, entry.dtype.name)
        if source.storage is not None and source.numel and identity in owners:
            ties[entry.name] = owners[identity]
            continue
        owners.setdefault(identity, entry.name)
        kept.append(entry)
    return kept, ties


def coalesce_headers(frames: Iterable[HeaderBytes]) -> Iterator[HeaderBytes]:
    """Put frames together that follow one another: the end of one archive and the beginning of the
    next.
    """
    last: HeaderBytes | None = None
    for frame in frames:
        if last is None:
            last = frame
        elif _follows(frame, last) and len(last.data) + len(frame.data) <= _JOINED_NBYTES:
            last = HeaderBytes(last.file, last.offset, last.data + frame.data)
        else:
            yield last
            last = frame
    if last is not None:
        yield last


def _follows(frame: HeaderBytes, last: HeaderBytes) -> bool:
    return frame.file == last.file and frame.offset == last.offset + len(last.data)
