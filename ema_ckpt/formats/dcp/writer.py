"""Laying out a DCP checkpoint as N ranks of FSDP2 write it, from one process and without torch.

Each item is a whole `torch.save` archive of four records. Rank r's rows of every split tensor lie
in `__r_0.distcp`; what is whole lies in `__0_0.distcp`, objects first as in torch (`filesystem.py`,
`_write_items`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ema_ckpt.core.box import Box, row_major_strides, split_rows, whole
from ema_ckpt.core.catalog import Files, Object
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import TargetError
from ema_ckpt.core.write_plan import HeaderBytes, OutputObject, OutputTensor, WriteItem
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.dcp.metadata_writer import StoredItem, StoredTensor, dump_metadata
from ema_ckpt.formats.dcp.placement import PlannedItem, idle_homes
from ema_ckpt.formats.dcp.reader import METADATA_NAME
from ema_ckpt.formats.pickle.tensors import StorageRef, TensorRef
from ema_ckpt.formats.pickle.writer import dumps
from ema_ckpt.formats.torch_zip.writer import Member, ZipLayout

_COPY_NBYTES = 1 << 20
_FOLDER = "archive"


@dataclass(frozen=True, slots=True)
class _Item:
    """One archive in the output. `piece` is None for an object."""

    file: str
    offset: int
    nbytes: int
    zip: ZipLayout | None
    piece: int | None
    copied: Object | None = None


@dataclass(frozen=True, slots=True)
class DcpWritePlan:
    """A checkpoint laid out; see `ema_ckpt.core.write_plan.WritePlan`."""

    files: Mapping[str, int]
    items: Sequence[WriteItem]
    archives: Sequence[_Item]
    metadata: bytes
    source: Files
    entries: Sequence[OutputTensor]

    def header_bytes(
        self, crcs: Sequence[int], digests: Mapping[str, int]
    ) -> Iterator[HeaderBytes]:
        """Archives around payloads, objects, digests and, last, the metadata that makes it a
        checkpoint.
        """
        for item in self.archives:
            if item.copied is not None:
                yield from self._copied(item, item.copied)
            elif item.zip is not None:
                given = () if item.piece is None else (crcs[item.piece],)
                for offset, data in item.zip.header_bytes(given):
                    yield HeaderBytes(item.file, item.offset + offset, data)
        yield HeaderBytes(sidecar.SIDECAR, 0, _sidecar(self.entries, digests))
        yield HeaderBytes(METADATA_NAME, 0, self.metadata)

    def _copied(self, item: _Item, held: Object) -> Iterator[HeaderBytes]:
        for at in range(0, item.nbytes, _COPY_NBYTES):
            nbytes = min(_COPY_NBYTES, item.nbytes - at)
            yield HeaderBytes(
                item.file, item.offset + at, self.source.read(held.file, held.offset + at, nbytes)
            )


def lay_out(
    entries: Sequence[OutputTensor],
    objects: Sequence[OutputObject],
    split: Sequence[bool],
    world_size: int,
    source: Files,
    order: Sequence[str] = (),
) -> DcpWritePlan:
    """Lay out a checkpoint for `world_size` ranks.

    Args:
        entries: tensors in the order of the state dict; `split[i]` tells whether `entries[i]` is
            cut on dim 0.
        objects: copied whole to rank 0's file; `source` is where their archives are read from.
        order: names in the source of tensors and objects together, as the state dict has them, if
            that is known.

    Raises:
        TargetError: `unsupported` for an object that cannot be written so that it loads safely.
    """
    ranks = [_RankFile(f"__{rank}_0.distcp") for rank in range(world_size)]
    planned = _planned(entries, objects, split, order)
    idle = idle_homes(planned, world_size)
    places: dict[str, list[StoredItem]] = {}
    for held in objects:
        places[held.name] = [ranks[0].put_object(held)]
    for entry, cut in zip(entries, split, strict=True):
        chunks = places.setdefault(entry.name, [])
        if not cut or not entry.source.shape:
            chunks.append(ranks[0].put(entry, whole(entry.source.shape)))
            continue
        for rank, box in enumerate(split_rows(entry.source.shape, world_size)):
            if box.sizes[0] or rank == idle[entry.name]:
                chunks.append(ranks[rank].put(entry, box))
    return _assemble(entries, objects, ranks, places, source, [item.name for item in planned])


def _planned(
    entries: Sequence[OutputTensor],
    objects: Sequence[OutputObject],
    split: Sequence[bool],
    order: Sequence[str],
) -> list[PlannedItem]:
    """Tensors and objects in the order of the state dict."""
    items = {}
    for entry, cut in zip(entries, split, strict=True):
        rows = entry.source.shape[0] if cut and entry.source.shape else None
        items[entry.source.name] = PlannedItem(entry.name, entry.nbytes, rows)
    items |= {held.source.name: PlannedItem(held.name, 0, None) for held in objects}
    place = {name: at for at, name in enumerate(order)}
    return [items[name] for name in sorted(items, key=lambda name: place.get(name, len(place)))]


def _assemble(
    entries: Sequence[OutputTensor],
    objects: Sequence[OutputObject],
    ranks: Sequence[_RankFile],
    places: Mapping[str, list[StoredItem]],
    source: Files,
    order: Sequence[str],
) -> DcpWritePlan:
    named: dict[str, StoredTensor | None] = {
        e.name: StoredTensor(e.dtype, e.source.shape) for e in entries
    }
    named |= {held.name: None for held in objects}
    paths = {e.name: e.path for e in entries} | {held.name: held.path for held in objects}
    named, paths = {name: named[name] for name in order}, {name: paths[name] for name in order}
    metadata = dump_metadata(named, {name: tuple(chunks) for name, chunks in places.items()}, paths)
    pieces: list[WriteItem] = []
    items: list[_Item] = []
    for rank in ranks:
        for item, piece in rank.items:
            items.append(item if piece is None else _numbered(item, len(pieces)))
            pieces += () if piece is None else (piece,)
    files = {rank.name: rank.nbytes for rank in ranks}
    files[sidecar.SIDECAR] = len(_sidecar(entries, {}))
    files[METADATA_NAME] = len(metadata)
    return DcpWritePlan(files, pieces, items, metadata, source, tuple(entries))


def _numbered(item: _Item, piece: int) -> _Item:
    return _Item(item.file, item.offset, item.nbytes, item.zip, piece)


def _sidecar(entries: Sequence[OutputTensor], digests: Mapping[str, int]) -> bytes:
    return sidecar.dump(entries, digests, files=[METADATA_NAME]).encode("utf-8")


_moulds: dict[tuple[str, tuple[int, ...]], ZipLayout] = {}


def _archive(dtype: DType, sizes: tuple[int, ...]) -> ZipLayout:
    """The archive of a contiguous tensor: equal for all tensors of that type and shape."""
    known = _moulds.get((dtype.name, sizes))
    if known is None:
        numel = 1
        for size in sizes:
            numel *= size
        typed = dtype if dtype.storage_class else None
        storage = StorageRef("0", typed, numel if typed else numel * dtype.itemsize)
        pickle = dumps(TensorRef(storage, dtype, 0, sizes, row_major_strides(sizes)))
        known = _moulds[dtype.name, sizes] = ZipLayout(
            _FOLDER,
            [
                Member("data.pkl", len(pickle), pickle),
                Member("byteorder", 6, b"little"),
                Member("data/0", numel * dtype.itemsize),
                Member("version", 2, b"3\n"),
            ],
        )
    return known


class _RankFile:
    """A data file being filled."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nbytes = 0
        self.items: list[tuple[_Item, WriteItem | None]] = []

    def put(self, entry: OutputTensor, box: Box) -> StoredItem:
        """Append the archive of a box of a tensor."""
        layout = _archive(entry.dtype, box.sizes)
        item = _Item(self.name, self.nbytes, layout.nbytes, layout, None)
        self.items.append((item, WriteItem(entry, box, self.name, self.nbytes + layout.offsets[2])))
        self.nbytes += layout.nbytes
        return StoredItem(box.offsets, box.sizes, self.name, item.offset, item.nbytes)

    def put_object(self, held: OutputObject) -> StoredItem:
        """Append an object's archive: the one it has, or a new one of its value."""
        if held.source.is_inline:
            item = self._made(held)
        else:
            item = _Item(self.name, self.nbytes, held.source.nbytes, None, None, held.source)
        self.items.append((item, None))
        self.nbytes += item.nbytes
        return StoredItem(None, (), self.name, item.offset, item.nbytes)

    def _made(self, held: OutputObject) -> _Item:
        try:
            pickle = dumps(held.source.inline)
        except TypeError as error:
            raise TargetError(
                "unsupported", f"object {held.name!r}: {error}; leave it out with --exclude"
            ) from None
        members = [
            Member("data.pkl", len(pickle), pickle),
            Member("byteorder", 6, b"little"),
            Member("version", 2, b"3\n"),
        ]
        layout = ZipLayout(_FOLDER, members)
        return _Item(self.name, self.nbytes, layout.nbytes, layout, None)
