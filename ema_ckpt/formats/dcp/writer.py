"""Lay out a DCP checkpoint as N ranks of FSDP2 write it, from one process and without torch.

Each item is a whole `torch.save` archive of four records. Rank r's rows of every split tensor lie
in `__r_0.distcp`; whole tensors lie in `__0_0.distcp`, objects first as in torch (`filesystem.py`,
`_write_items`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain, repeat
from math import prod
from typing import NamedTuple

from ema_ckpt.core.box import Box, row_box, row_major_strides, whole
from ema_ckpt.core.catalog import Diagnostic, Files, Ints, Nesting, Object, Path
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import TargetError
from ema_ckpt.core.write_plan import HeaderBytes, OutputObject, OutputTensor, WriteItem
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.dcp.metadata_writer import MetadataPickle, StoredItem, StoredTensor
from ema_ckpt.formats.dcp.reader import METADATA_NAME
from ema_ckpt.formats.pickle.tensors import StorageRef, TensorRef
from ema_ckpt.formats.pickle.writer import dumps
from ema_ckpt.formats.record_chunks import FileChunks
from ema_ckpt.formats.torch_zip.reader import read_archive
from ema_ckpt.formats.torch_zip.writer import Member, ZipLayout

_COPY_NBYTES = 1 << 20
_FOLDER = "archive"
_BYTEORDER = Member("byteorder", 6, b"little")
_VERSION = Member("version", 2, b"3\n")


class _ObjectArchive(NamedTuple):
    """The archive of an object in the output: a new one, or one that is copied.

    Attributes:
        crc: of the pickle.
    """

    file: str
    offset: int
    nbytes: int
    zip: ZipLayout | None
    copied: Object | None
    crc: int


class _Planned(NamedTuple):
    """A tensor (`entry`) or object of the state dict: bytes of the whole, rows if it is split."""

    name: str
    path: Path
    entry: StoredTensor | None = None
    nbytes: int = 0
    rows: int | None = None


@dataclass(frozen=True)
class DcpWritePlan:
    """A checkpoint laid out; see `ema_ckpt.core.write_plan.WritePlan`.

    Attributes:
        starts: where the archive around each item begins, file by file.
    """

    files: Mapping[str, int]
    items: Sequence[WriteItem]
    starts: Mapping[str, Sequence[int]]
    objects: Sequence[_ObjectArchive]
    metadata: MetadataPickle
    source: Files
    tensors: Sequence[OutputTensor]
    nesting: Nesting
    warnings: Sequence[Diagnostic] = ()
    marker = METADATA_NAME

    def fixed_bytes(self) -> Iterator[HeaderBytes]:
        """Yield the archives of objects."""
        for archive in self.objects:
            if archive.copied is not None:
                yield from self._copy(archive, archive.copied)
            elif archive.zip is not None:
                yield from _around(archive.file, archive.offset, archive.zip, [])

    def item_bytes(self, index: int, crc: int) -> Iterator[HeaderBytes]:
        """Yield the archive around one payload."""
        item = self.items[index]
        layout = _archives_of(item.output.dtype)[item.box.sizes]
        return _around(item.file, item.offset - layout.offsets[2], layout, [crc])

    def header_bytes(
        self, crcs: Sequence[int], digests: Mapping[str, int]
    ) -> Iterator[HeaderBytes]:
        chunks = _chunks(self.objects, self.starts, crcs)
        content = _sidecar(self.tensors, digests, self.nesting, self.metadata, chunks)
        yield HeaderBytes(sidecar.SIDECAR, 0, b"".join(content))
        # Last, since it makes the directory a checkpoint.
        offset = 0
        for piece in self.metadata.pieces():
            yield HeaderBytes(METADATA_NAME, offset, piece)
            offset += len(piece)

    def _copy(self, archive: _ObjectArchive, source: Object) -> Iterator[HeaderBytes]:
        for start in range(0, archive.nbytes, _COPY_NBYTES):
            nbytes = min(_COPY_NBYTES, archive.nbytes - start)
            data = self.source.read(source.file, source.offset + start, nbytes)
            yield HeaderBytes(archive.file, archive.offset + start, data)


def lay_out(
    tensors: Sequence[OutputTensor],
    objects: Sequence[OutputObject],
    split: Sequence[bool],
    world_size: int,
    source: Files,
    order: Sequence[str] = (),
    nesting: Nesting | None = None,
    generation: int = 0,
) -> DcpWritePlan:
    """Lay out a checkpoint for `world_size` ranks.

    Args:
        tensors: in the order of the state dict; `split[i]`: cut `tensors[i]` on dim 0.
        objects: go whole to rank 0's file; `source` is where their archives are copied from.
        order: names in the source of tensors and objects together, in the order of the state dict,
            if that is known.
        nesting: what paths cannot tell, to be recorded beside them.
        generation: number in the names of data files, by which they differ from those of another
            checkpoint in the same directory.

    Raises:
        TargetError: `unsupported` for an object that cannot be written so that it loads safely.
        SourceError: if an archive to copy cannot be read.
    """
    planned = _in_order(tensors, objects, split, order)
    ranks_of_empty = _place_empty_chunks(planned, world_size)
    ranks = [_RankFile(f"__{rank}_{generation}.distcp", source) for rank in range(world_size)]
    stored, boxes = _Stored(), dict[str, tuple[Box, ...]]()
    for item in objects:
        stored.objects[item.name] = ranks[0].put_object(item)
    for tensor, is_split in zip(tensors, split, strict=True):
        used, boxes[tensor.name] = _split(
            tensor.source.shape, world_size if is_split else 0, ranks_of_empty.get(tensor.name)
        )
        archives = _archives_of(tensor.dtype)
        stored.items_of[tensor.name] = [
            ranks[rank].put(tensor, box, archives[box.sizes])
            for rank, box in zip(used, boxes[tensor.name], strict=True)
        ]
    entries = {item.name: item.entry for item in planned}
    paths = {item.name: item.path for item in planned}
    metadata = MetadataPickle(entries, stored, paths, boxes=boxes)
    files = {rank_file.name: rank_file.nbytes for rank_file in ranks}
    starts = {rank_file.name: rank_file.starts for rank_file in ranks}
    items: list[WriteItem] = []
    for rank_file in ranks:
        items += rank_file.items
    copied = ranks[0].objects
    chunks = _chunks(copied, starts, repeat(0))
    nesting = nesting or Nesting()
    files[sidecar.SIDECAR] = sum(map(len, _sidecar(tensors, {}, nesting, metadata, chunks)))
    files[METADATA_NAME] = metadata.nbytes
    return DcpWritePlan(files, items, starts, copied, metadata, source, tuple(tensors), nesting)


@lru_cache(maxsize=64)
def _split(shape: Ints, parts: int, empty_rank: int | None) -> tuple[Ints, tuple[Box, ...]]:
    """Return the ranks that write rows of a tensor, and the box of each; rank 0 if `parts` is 0.

    Tensors of one shape share the boxes.
    """
    if not parts or not shape:
        return (0,), (whole(shape),)
    ranks = [*range(_used_ranks(shape[0], parts))]  # of thousands, few may have any rows
    if empty_rank is not None:
        ranks.append(empty_rank)
    return tuple(ranks), tuple([row_box(shape, parts, rank) for rank in ranks])


def _sidecar(
    tensors: Sequence[OutputTensor],
    digests: Mapping[str, int],
    nesting: Nesting,
    metadata: MetadataPickle,
    chunks: Iterable[FileChunks],
) -> list[bytes]:
    document = sidecar.make_document(
        tensors,
        digests,
        files=[METADATA_NAME],
        nesting=nesting,
        has_paths=True,
        describes={METADATA_NAME: metadata.crc},
    )
    return sidecar.dump_file(document, chunks)


def _in_order(
    tensors: Sequence[OutputTensor],
    objects: Sequence[OutputObject],
    split: Sequence[bool],
    order: Sequence[str],
) -> list[_Planned]:
    """Sort tensors and objects into the order of the state dict."""
    items: dict[str, _Planned] = {}
    for tensor, is_split in zip(tensors, split, strict=True):
        shape = tensor.source.shape
        rows = shape[0] if is_split and shape else None
        entry = StoredTensor(tensor.dtype, shape)
        items[tensor.source.name] = _Planned(tensor.name, tensor.path, entry, tensor.nbytes, rows)
    items |= {item.source.name: _Planned(item.name, item.path) for item in objects}
    position = {name: index for index, name in enumerate(order)}
    names = sorted(items, key=lambda name: position.get(name, len(position)))
    return [items[name] for name in names]


def _place_empty_chunks(items: Sequence[_Planned], world_size: int) -> dict[str, int]:
    """Choose the rank that writes the empty chunk of each split tensor that leaves ranks idle.

    Ranks without rows of a tensor all have the same empty chunk, and torch's save planner keeps one
    of these on the rank with the least to write so far (`_dedup_save_plans.py`): it goes through
    the items of rank 0, then of rank 1 and so on, counts a whole tensor's bytes for each chunk of
    it and 1 for an object.
    """
    ranks: dict[str, int] = {}
    first_idle = [_used_ranks(item.rows, world_size) for item in items]
    loads = [0] * world_size
    # Chunks of other ranks come to count only after the ranks that are chosen from here.
    for rank in sorted({0, *(idle for idle in first_idle if idle < world_size)}):
        for item, idle in zip(items, first_idle, strict=True):
            if item.rows is None:
                if rank:
                    continue
                writer = min(range(world_size), key=loads.__getitem__)
            elif idle == rank:
                writer = ranks[item.name] = min(range(rank, world_size), key=loads.__getitem__)
            elif rank < idle:
                writer = rank
            else:
                continue
            loads[writer] += item.nbytes or 1
    return ranks


def _used_ranks(rows: int | None, world_size: int) -> int:
    """Count the ranks that get rows when each takes `ceil(rows / world_size)`."""
    if rows is None:
        return world_size
    return -(-rows // -(-rows // world_size)) if rows else 0


class _Archives(dict[Ints, ZipLayout]):
    """Archives of contiguous tensors of one type by their shape, laid out when asked for."""

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype

    def __missing__(self, sizes: Ints) -> ZipLayout:
        dtype, numel = self._dtype, prod(sizes)
        nbytes = numel * dtype.itemsize
        storage = (
            StorageRef("0", dtype, numel) if dtype.storage_class else StorageRef("0", None, nbytes)
        )
        pickle = dumps(TensorRef(storage, dtype, 0, sizes, row_major_strides(sizes)))
        data = Member("data.pkl", len(pickle), pickle)
        layout = ZipLayout(_FOLDER, [data, _BYTEORDER, Member("data/0", nbytes), _VERSION])
        self[sizes] = layout
        return layout


_archives_of = cache(_Archives)


def _around(file: str, start: int, layout: ZipLayout, crcs: Sequence[int]) -> Iterator[HeaderBytes]:
    for offset, data in layout.header_bytes(crcs):
        yield HeaderBytes(file, start + offset, data)


def _chunks(
    objects: Iterable[_ObjectArchive], starts: Mapping[str, Sequence[int]], crcs: Iterable[int]
) -> Iterator[FileChunks]:
    """Yield offset and CRC-32 of each archive, file by file; objects lie first in theirs."""
    crcs = iter(crcs)
    for file, starts_of_file in starts.items():
        first = [(archive.offset, archive.crc) for archive in objects if archive.file == file]
        if first or starts_of_file:
            yield file, chain(first, zip(starts_of_file, crcs, strict=False))


class _Stored(Mapping[str, Sequence[StoredItem]]):
    """Where the items of each name lie, made when asked for: there may be millions."""

    def __init__(self) -> None:
        self.objects: dict[str, StoredItem] = {}
        self.items_of: dict[str, list[WriteItem]] = {}

    def __getitem__(self, name: str) -> Sequence[StoredItem]:
        if name in self.objects:
            return [self.objects[name]]
        found = []
        archives: _Archives | None = None
        for item in self.items_of[name]:
            archives, box = archives or _archives_of(item.output.dtype), item.box
            layout = archives[box.sizes]
            start = item.offset - layout.offsets[2]
            found.append(StoredItem(box.offsets, box.sizes, item.file, start, layout.nbytes))
        return found

    def __iter__(self) -> Iterator[str]:
        return chain(self.objects, self.items_of)

    def __len__(self) -> int:
        return len(self.objects) + len(self.items_of)


class _RankFile:
    """A data file being filled."""

    def __init__(self, name: str, source: Files) -> None:
        self.name = name
        self._source = source  # of archives that are copied
        self.nbytes = 0
        self.items: list[WriteItem] = []
        self.starts = array("q")  # of the archives of the items
        self.objects: list[_ObjectArchive] = []

    def put(self, tensor: OutputTensor, box: Box, layout: ZipLayout) -> WriteItem:
        """Append the archive of a box of a tensor."""
        item = WriteItem(tensor, box, self.name, self.nbytes + layout.offsets[2])
        self.items.append(item)
        self.starts.append(self.nbytes)
        self.nbytes += layout.nbytes
        return item

    def put_object(self, item: OutputObject) -> StoredItem:
        """Append an object's archive: its own if it has one, or a new one of its value."""
        source = item.source
        if not source.is_inline:
            copied = read_archive(self._source, source.file, source.offset, source.nbytes)
            crc = copied.record("data.pkl").crc
            if crc is None:
                crc = crc32(copied.read("data.pkl"))
            return self._append(source.nbytes, None, source, crc)
        try:
            pickle = dumps(source.inline)
        except TypeError as error:
            message = f"object {item.name!r}: {error}; leave it out with --exclude"
            raise TargetError("unsupported", message) from None
        data = Member("data.pkl", len(pickle), pickle)
        layout = ZipLayout(_FOLDER, [data, _BYTEORDER, _VERSION])
        return self._append(layout.nbytes, layout, None, crc32(pickle))

    def _append(
        self, nbytes: int, layout: ZipLayout | None, copied: Object | None, crc: int
    ) -> StoredItem:
        archive = _ObjectArchive(self.name, self.nbytes, nbytes, layout, copied, crc)
        self.objects.append(archive)
        self.nbytes += nbytes
        return StoredItem(None, (), self.name, archive.offset, nbytes)
