"""Every stored record of a checkpoint that has, or could have, a checksum; what cannot be found is
reported.

A DCP item is a whole archive: its small records count like its payload. A torch file is one
archive. Elsewhere payloads lie bare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ema_ckpt.core.catalog import Catalog, Chunk, Payload, Tensor
from ema_ckpt.core.errors import EmaCkptError, SourceError
from ema_ckpt.formats.torch_zip.reader import Archive, Record, read_archive

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """Bytes that lie together under one checksum, if there is one.

    Attributes:
        owner: the tensor or object, or `""` for what belongs to a whole file.
        record: name of the archive's record, `""` for a bare payload.
        is_payload: whether these are data of tensors or objects and not an archive's own small
            records.
    """

    owner: str
    record: str
    file: str
    offset: int
    nbytes: int
    crc: int | None
    is_payload: bool

    @property
    def key(self) -> tuple[str, int]:
        """The place: file and offset."""
        return self.file, self.offset


class RecordList:
    """Lists what is stored. `report` is told of each error and the owner it concerns; the listing
    goes on.
    """

    def __init__(
        self, catalog: Catalog, sizes: dict[str, int], report: Callable[[EmaCkptError, int], None]
    ) -> None:
        """`sizes` has the size in bytes of every file that is there; what reaches beyond is left to
        the caller.
        """
        self.catalog = catalog
        self.payloads: dict[str, tuple[Payload | None, ...]] = {}
        self._sizes = sizes
        self._report = report
        self._seen: set[tuple[str, int]] = set()
        self._owners: dict[tuple[str, int], str] = {}

    def listing(self) -> Iterator[StoredRecord]:
        """Everything, tensors first, in stored order; what several names share once."""
        for tensor in self.catalog.tensors:
            yield from self._tensor(tensor)
        for item in self.catalog.objects:
            if (
                not item.is_inline
                and item.nbytes
                and self._is_there(item.file, item.offset + item.nbytes)
            ):
                yield from self._framed(
                    item.name, item.file, item.offset, item.nbytes, is_object=True
                )
        for file in self.catalog.files:
            if file.endswith(_TORCH_SUFFIXES) and file in self._sizes:
                yield from self._whole(file)

    def _is_there(self, file: str, end: int) -> bool:
        return end <= self._sizes.get(file, -1)

    def _tensor(self, tensor: Tensor) -> Iterator[StoredRecord]:
        payloads = self._locate(tensor)
        self.payloads[tensor.name] = payloads
        for chunk, payload in zip(tensor.chunks, payloads, strict=True):
            if payload is None or (not payload.nbytes and not chunk.nbytes):
                continue
            if payload.file.endswith(_TORCH_SUFFIXES):
                self._owners.setdefault((payload.file, payload.offset), tensor.name)
            elif (payload.offset, payload.nbytes) != (chunk.offset, chunk.nbytes):
                yield from self._framed(
                    tensor.name, chunk.file, chunk.offset, chunk.nbytes, is_object=False
                )
            elif (payload.file, payload.offset) not in self._seen and payload.nbytes:
                self._seen.add((payload.file, payload.offset))
                yield _bare(tensor.name, payload)

    def _locate(self, tensor: Tensor) -> tuple[Payload | None, ...]:
        """The payload of each chunk; None for one that cannot be read, whose error is reported."""
        there = [not c.file or self._is_there(c.file, c.offset + c.nbytes) for c in tensor.chunks]
        if all(there) and all(chunk.file for chunk in tensor.chunks):
            try:
                return self.catalog.reader.payloads(tensor)
            except SourceError as error:
                if len(tensor.chunks) == 1:
                    self._report(
                        error.about(tensor=tensor.name, file=tensor.chunks[0].file),
                        tensor.chunks[0].nbytes,
                    )
                    return (None,)
        return tuple(
            self._one(tensor, chunk) if found and chunk.file else None
            for chunk, found in zip(tensor.chunks, there, strict=True)
        )

    def _one(self, tensor: Tensor, chunk: Chunk) -> Payload | None:
        try:
            found = self.catalog.reader.payloads(replace(tensor, chunks=(chunk,)))
        except SourceError as error:
            self._report(error.about(tensor=tensor.name, file=chunk.file), chunk.nbytes)
            return None
        return found[0] if len(found) == 1 else None

    def _framed(
        self, owner: str, file: str, offset: int, nbytes: int, *, is_object: bool
    ) -> Iterator[StoredRecord]:
        if (file, offset) in self._seen:
            return
        self._seen.add((file, offset))
        try:
            archive = read_archive(self.catalog.source, file, offset, nbytes)
        except SourceError as error:
            self._report(error.about(tensor=owner, file=file), nbytes)
            return
        self._judge(archive, owner)
        yield from archive_records(archive, lambda _record: owner, with_pickle=is_object)

    def _whole(self, file: str) -> Iterator[StoredRecord]:
        try:
            archive = read_archive(self.catalog.source, file, 0, self._sizes[file])
        except SourceError as error:
            self._report(error, self._sizes[file])
            return
        self._judge(archive, "")
        owners = self._owners
        has_objects = any(item.file == file for item in self.catalog.objects)
        yield from archive_records(
            archive, lambda r: owners.get((file, r.offset), ""), with_pickle=has_objects
        )

    def _judge(self, archive: Archive, owner: str) -> None:
        if not archive.is_torchs():
            message = f"{archive.file}: no record 'version' in the archive at byte {archive.window.offset}"
            message += ", which torch refuses to load"
            self._report(
                SourceError("bad-header", message, tensor=owner or None, file=archive.file), 0
            )


def _bare(owner: str, payload: Payload) -> StoredRecord:
    return StoredRecord(owner, "", payload.file, payload.offset, payload.nbytes, payload.crc, True)


def archive_records(
    archive: Archive, owner: Callable[[Record], str], *, with_pickle: bool
) -> Iterator[StoredRecord]:
    """The records of an archive. `with_pickle` counts `data.pkl` as payload: it holds values, not
    just places.
    """
    for record in archive.records.values():
        is_payload = record.name.startswith("data/") or (with_pickle and record.name == "data.pkl")
        if record.nbytes:
            yield StoredRecord(
                owner(record),
                record.name,
                archive.file,
                record.offset,
                record.nbytes,
                record.crc,
                is_payload,
            )
