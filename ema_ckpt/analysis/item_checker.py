"""Check items: neighbours are read together and recognised by what is the same in all of a kind.

What is not recognised, or does not match its checksum, is read record by record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ema_ckpt.analysis.item_findings import CheckedRecord, Failure, ItemFindings
from ema_ckpt.analysis.items import FileItems, ItemList, ItemLocation, ItemPart, ItemRun
from ema_ckpt.analysis.records import StoredRecord, archive_records
from ema_ckpt.core.catalog import Catalog, Chunk, ItemReader, Payload
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import EmaCkptError, SourceError, about
from ema_ckpt.reading.checksum_verifier import join_crcs, range_crc


class ItemChecker:
    """One worker."""

    def __init__(
        self, catalog: Catalog, items: ItemList, found: ItemFindings, block: memoryview
    ) -> None:
        self._source = catalog.source
        self._reader = catalog.reader
        self._items_reader = catalog.reader if isinstance(catalog.reader, ItemReader) else None
        self._items = items
        self._found = found
        self._block = block
        self._shared: tuple[str, int, range, list[int]] = ("", 0, range(0), [])

    def check_run(self, job: ItemRun) -> int:
        """Check neighbouring items; return the bytes of their payloads."""
        items = self._items.files[job.file]
        done, first = 0, job.first
        while first < job.stop:
            stop, nbytes = self._extent(items, first, job.stop)
            view = self._read(items, first, nbytes)
            start = items.offsets[first]
            for item in range(first, stop):
                offset = items.offsets[item] - start
                size = self._items.kinds[items.kinds[item]].nbytes
                data = None if view is None else view[offset : offset + size]
                done += self._check(items, item, data)
            first = stop
        return done

    def _extent(self, items: FileItems, first: int, stop: int) -> tuple[int, int]:
        """Find how many items fit into the buffer together; at least one, which may not fit."""
        start, nbytes, kinds = items.offsets[first], 0, self._items.kinds
        for item in range(first, stop):
            end = items.offsets[item] + kinds[items.kinds[item]].nbytes - start
            if end > len(self._block) and item > first:
                return item, nbytes
            nbytes = max(nbytes, end)
        return stop, nbytes

    def _read(self, items: FileItems, first: int, nbytes: int) -> memoryview | None:
        if nbytes > len(self._block):
            return None
        view = self._block[:nbytes]
        try:
            self._source.read_into(items.name, items.offsets[first], view)
        except SourceError:  # each item is tried alone
            return None
        return view

    def _check(self, items: FileItems, item: int, data: memoryview | None) -> int:
        number, offset = items.numbers[item], items.offsets[item]
        if self._is_follower(items, item):
            self._locate(number)
            return 0
        payload = self._recognise(items, item, data)
        if payload is None:
            return self._check_records(number)
        if data is None:
            crc = self._crc(payload, 0, payload.nbytes)
        else:
            crc = crc32(data[payload.offset - offset :][: payload.nbytes])
        self._items.locate(number, ItemLocation.of(payload, offset), payload.crc or 0)
        return payload.nbytes if self._accept(number, payload, crc) else self._check_records(number)

    def _crc(self, payload: Payload, start: int, nbytes: int) -> int:
        return range_crc(self._source, payload.file, payload.offset + start, nbytes, self._block)

    def _accept(self, number: int, payload: Payload, crc: int | None) -> bool:
        """Note a payload that is whole as far as its checksum tells."""
        if crc is None or payload.crc not in (None, crc):
            return False
        if payload.crc is None:
            self._found.bare[number] = crc
        else:
            self._found.checked_nbytes += payload.nbytes
        return True

    def check_part(self, job: ItemPart) -> int:
        """Check a part of a large item; return its bytes of payload."""
        items = self._items.files[job.file]
        number, offset = items.numbers[job.item], items.offsets[job.item]
        if self._is_follower(items, job.item):
            return 0 if job.start else self._check(items, job.item, None)
        payload = self._recognise(items, job.item)
        if payload is None and self._parsed(number):  # the first of its kind
            payload = self._recognise(items, job.item)
        if payload is None:
            return 0 if job.start else self._check_records(number)
        if not job.start:
            self._items.locate(number, ItemLocation.of(payload, offset), payload.crc or 0)
        nbytes = max(min(job.stop, payload.nbytes) - job.start, 0)
        part = job.start, nbytes, self._crc(payload, job.start, nbytes)
        self._found.parts.setdefault(number, []).append(part)
        return nbytes

    def finish(self) -> None:
        """Join the parts of large items, once all are there."""
        parts, self._found.parts = self._found.parts, {}
        for number, intervals in parts.items():
            payload = self._items.payload(number)
            crc = payload and join_crcs([part for part in intervals if part[1]], payload.nbytes)
            if payload is None or not self._accept(number, payload, crc):
                self._check_records(number)
        self._found.tell_followers(lambda number: self._items.chunk(number)[0].name)

    def _is_follower(self, items: FileItems, item: int) -> bool:
        """Whether an item before has the same payload, under another name; note which."""
        if not items.is_repeated(item):
            return False
        key = items.name, items.offsets[item]
        if self._shared[:2] != key:
            group = items.at_one_place(item)
            self._shared = *key, group, self._leaders([items.numbers[one] for one in group])
        _, _, group, leaders = self._shared
        number, leader = items.numbers[item], leaders[item - group.start]
        if leader == number:
            return False
        self._found.followers[number] = leader
        return True

    def _leaders(self, numbers: list[int]) -> list[int]:
        """Of each chunk the first whose payload is the same; itself, if it cannot be located."""
        firsts: dict[tuple[str, int, int], int] = {}
        leaders = []
        for number in numbers:
            payload = self._parsed(number)
            if payload is None:
                leaders.append(number)
            else:
                place = payload.file, payload.offset, payload.nbytes
                leaders.append(firsts.setdefault(place, number))
        return leaders

    def _recognise(
        self, items: FileItems, item: int, data: memoryview | None = None
    ) -> Payload | None:
        if self._items_reader is None:
            return None
        kind = self._items.kinds[items.kinds[item]]
        return self._items_reader.recognise(kind, items.name, items.offsets[item], data)

    # Record by record.

    def _parsed(self, number: int) -> Payload | None:
        """Have the reader parse an item's archive, and learn its kind; None if it is damaged."""
        tensor, chunk = self._items.chunk(number)
        try:
            (payload,) = self._reader.payloads(replace(tensor, chunks=(chunk,)))
        except SourceError:
            return None
        return payload

    def _locate(self, number: int) -> Payload | None:
        """Locate the payload of a chunk and note it, or the error."""
        tensor, chunk = self._items.chunk(number)
        try:
            (payload,) = self._reader.payloads(replace(tensor, chunks=(chunk,)))
        except SourceError as error:
            failed = about(error, tensor=tensor.name, file=chunk.file)
            self._found.failures.append(Failure(number, failed, chunk.nbytes))
            return None
        self._items.locate(number, ItemLocation.of(payload, chunk.offset), payload.crc or 0)
        return payload

    def _check_records(self, number: int) -> int:
        """Read an item record by record; return the bytes of its payload."""
        payload = self._locate(number)
        if payload is None:
            return 0
        tensor, chunk = self._items.chunk(number)
        done = 0
        for place, stored in enumerate(self._records(number, tensor.name, chunk)):
            record = stored
            if payload.is_recorded and stored.key == (payload.file, payload.offset):
                # What was recorded beside the archive outranks its own checksum.
                record = replace(stored, crc=payload.crc, is_recorded=True)
            try:
                crc = range_crc(
                    self._source, record.file, record.offset, record.nbytes, self._block
                )
                checked = CheckedRecord(number, place, record, crc)
            except SourceError as error:
                checked = CheckedRecord(number, place, record, None, error)
            if record.is_payload or checked.crc != record.crc:
                self._found.records.append(checked)
            done += record.nbytes if record.is_payload else 0
        return done

    def _records(self, number: int, owner: str, chunk: Chunk) -> Iterator[StoredRecord]:
        def on_error(error: EmaCkptError, nbytes: int) -> None:
            self._found.failures.append(Failure(number, error, nbytes))

        try:
            if self._items_reader is not None:
                self._items_reader.refuse_encoded(chunk.file, chunk.offset)
        except SourceError as error:  # an empty chunk, whose payload needs no reading
            on_error(about(error, tensor=owner, file=chunk.file), chunk.nbytes)
            return
        yield from archive_records(
            self._source, chunk.file, chunk.offset, chunk.nbytes, lambda _: owner, False, on_error
        )
