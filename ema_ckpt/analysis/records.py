"""List every stored record of a checkpoint that has, or could have, a checksum.

A torch file is one archive. Elsewhere payloads lie bare, but for those that are items of DCP:
`items.py` finds the tensors' ones, and here are the objects'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ema_ckpt.core.catalog import Catalog, Chunk, Files, ItemReader, Object, Payload, Tensor
from ema_ckpt.core.errors import EmaCkptError, SourceError, about
from ema_ckpt.formats.torch_zip.reader import read_archive

OnError = Callable[[EmaCkptError, int], None]
"""Gets what could not be located, and its bytes."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """Bytes that lie together under one checksum, if there is one.

    Attributes:
        owner: the tensor or object, or `""` for what belongs to a whole file.
        record: name of the archive's record, `""` for a bare payload.
        is_payload: whether these are data of tensors or objects and not an archive's own small
            records.
        is_recorded: as of a `Payload`.
    """

    owner: str
    record: str
    file: str
    offset: int
    nbytes: int
    crc: int | None
    is_payload: bool
    is_recorded: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """File and offset."""
        return self.file, self.offset


def archive_records(
    source: Files,
    file: str,
    offset: int,
    nbytes: int,
    owner_of: Callable[[int], str],
    has_objects: bool,
    on_error: OnError,
) -> Iterator[StoredRecord]:
    """Yield the records of an archive.

    Args:
        owner_of: tells whom the record at an offset of the file belongs to.
        has_objects: whether `data.pkl` counts as payload: it holds values, not just places.
    """
    owner = owner_of(offset) or None
    try:
        archive = read_archive(source, file, offset, nbytes)
    except SourceError as error:
        kind = "object" if has_objects else "tensor"
        on_error(about(error, tensor=owner, file=file, kind=kind), nbytes)
        return
    if not archive.is_torchs():
        place = f"in the archive at byte {archive.window.offset}"
        message = f"{file}: no record 'version' {place}, which torch refuses to load"
        on_error(SourceError("bad-header", message, tensor=owner, file=file), 0)
    payloads = ("data.pkl",) if has_objects else ()
    for record in archive.records.values():
        if record.nbytes:
            is_payload = record.name.startswith("data/") or record.name in payloads
            place_and_crc = file, record.offset, record.nbytes, record.crc
            yield StoredRecord(owner_of(record.offset), record.name, *place_and_crc, is_payload)


class RecordList:
    """Lists stored records; what cannot be located goes to `on_error`.

    Attributes:
        payloads: those of each tensor's chunks, once listed; None for one that was not located.
    """

    def __init__(self, catalog: Catalog, sizes: Mapping[str, int], on_error: OnError) -> None:
        """`sizes` has the bytes of every file that is there; what reaches beyond is left out."""
        self.catalog = catalog
        self.payloads: dict[str, tuple[Payload | None, ...]] = {}
        self._sizes = sizes
        self._on_error = on_error
        self._listed: set[tuple[str, int]] = set()
        self._owners: dict[tuple[str, int], str] = {}

    def locate_payloads(self) -> None:
        """Locate the payload of every chunk, by headers alone."""
        for tensor in self.catalog.tensors:
            if tensor.refusal is None:
                self.payloads[tensor.name] = self._locate(tensor)

    def listing(self) -> Iterator[StoredRecord]:
        """Yield all records, tensors first, in stored order; what several names share once."""
        catalog = self.catalog
        for tensor in catalog.tensors:
            if tensor.refusal is None and not consists_of_items(catalog, tensor):
                yield from self._tensor_records(tensor)
        yield from self.object_records()
        yield from self.file_records()

    def object_records(self) -> Iterator[StoredRecord]:
        """Yield the records of objects that lie in items of their own."""
        for item in self.catalog.objects:
            key, end = (item.file, item.offset), item.offset + item.nbytes
            if item.is_inline or not item.nbytes or not self._is_there(item.file, end):
                continue
            if key not in self._listed:
                self._listed.add(key)
                if not self._is_encoded(item):
                    yield from self._archive_records(*key, item.nbytes, item.name, True)

    def _is_encoded(self, item: Object) -> bool:
        """Whether an object's bytes are no archive as they are; note so."""
        reader = self.catalog.reader
        if not isinstance(reader, ItemReader):
            return False
        try:
            reader.refuse_encoded(item.file, item.offset)
        except SourceError as error:
            failed = about(error, tensor=item.name, file=item.file, kind="object")
            self._on_error(failed, item.nbytes)
            return True
        return False

    def file_records(self) -> Iterator[StoredRecord]:
        """Yield the records of files that are archives as a whole."""
        for file in self.catalog.files:
            if file in self.catalog.archives and file in self._sizes:
                has_objects = any(item.file == file for item in self.catalog.objects)
                yield from self._archive_records(file, 0, self._sizes[file], None, has_objects)

    def _is_there(self, file: str, end: int) -> bool:
        return bool(file) and end <= self._sizes.get(file, -1)

    def _tensor_records(self, tensor: Tensor) -> Iterator[StoredRecord]:
        payloads = self.payloads[tensor.name] = self._locate(tensor)
        for payload in payloads:
            if payload is None or not payload.nbytes:
                continue
            key = (payload.file, payload.offset)
            if payload.file in self.catalog.archives:
                self._owners.setdefault(key, tensor.name)
            elif key not in self._listed:
                self._listed.add(key)
                yield StoredRecord(tensor.name, "", *key, payload.nbytes, payload.crc, True)

    def _locate(self, tensor: Tensor) -> tuple[Payload | None, ...]:
        """Locate the payload of each chunk, one by one if not all are there."""
        present = [self._is_there(c.file, c.offset + c.nbytes) for c in tensor.chunks]
        if all(present):
            try:
                return self.catalog.reader.payloads(tensor)
            except SourceError as error:
                if len(tensor.chunks) == 1:
                    self._report(error, tensor.name, tensor.chunks[0])
                    return (None,)
        payloads: list[Payload | None] = []
        for chunk, is_present in zip(tensor.chunks, present, strict=True):
            located: tuple[Payload, ...] = ()
            if is_present:
                try:
                    located = self.catalog.reader.payloads(replace(tensor, chunks=(chunk,)))
                except SourceError as error:
                    self._report(error, tensor.name, chunk)
            payloads.append(located[0] if len(located) == 1 else None)
        return tuple(payloads)

    def _report(self, error: SourceError, tensor: str, chunk: Chunk) -> None:
        self._on_error(about(error, tensor=tensor, file=chunk.file), chunk.nbytes)

    def _archive_records(
        self, file: str, offset: int, nbytes: int, owner: str | None, has_objects: bool
    ) -> Iterator[StoredRecord]:
        """Yield an archive's records; without `owner` each belongs to the tensor stored there."""

        def owner_of(place: int) -> str:
            return self._owners.get((file, place), "") if owner is None else owner

        source = self.catalog.source
        yield from archive_records(
            source, file, offset, nbytes, owner_of, has_objects, self._on_error
        )


def consists_of_items(catalog: Catalog, tensor: Tensor) -> bool:
    """Whether the tensor's chunks are archives of their own."""
    if not catalog.item_files:
        return False
    return any(chunk.file in catalog.item_files for chunk in tensor.chunks)
