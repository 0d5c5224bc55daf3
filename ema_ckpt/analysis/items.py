"""List the items of DCP, chunks that are archives of their own, in the order in which they lie."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ema_ckpt.analysis.records import consists_of_items
from ema_ckpt.core.catalog import Catalog, Chunk, ItemKind, Payload, Tensor

_SEGMENT_NBYTES = 32 << 20
_RUN_NBYTES = 4 << 20
_MAX_RUN = 256


class ItemRun(NamedTuple):
    """Check the items [first, stop) of a file, which lie one behind the other."""

    file: int
    first: int
    stop: int
    nbytes: int


class ItemPart(NamedTuple):
    """Check the bytes [start, stop) of the payload of one large item of a file."""

    file: int
    item: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class FileItems(NamedTuple):
    """The items of one file by their offsets: plain arrays, whose memory child processes share."""

    name: str
    offsets: array[int]
    kinds: array[int]
    numbers: array[int]

    def is_repeated(self, item: int) -> bool:
        """Whether the item before lies at the same place, under another name."""
        return item > 0 and self.offsets[item - 1] == self.offsets[item]

    def at_one_place(self, item: int) -> range:
        """Return the items that lie where `item` does."""
        offset = self.offsets[item]
        return range(bisect_left(self.offsets, offset), bisect_right(self.offsets, offset))


class ItemLocation(NamedTuple):
    """Where the payload lies in an item, and how the chunk lies in the payload."""

    start: int
    nbytes: int
    strides: tuple[int, ...] | None
    first: int
    has_crc: bool
    is_recorded: bool

    @classmethod
    def of(cls, payload: Payload, offset: int) -> ItemLocation:
        """Describe the payload of an item at `offset`, without its checksum."""
        has_crc = payload.crc is not None
        rest = payload.nbytes, payload.strides, payload.start, has_crc, payload.is_recorded
        return cls(payload.offset - offset, *rest)


class ItemList:
    """Every chunk of tensors that consist of items, numbered in stored order.

    Attributes:
        kinds: of items. files: what lies in them, as far as it is there.
    """

    def __init__(self, catalog: Catalog, sizes: Mapping[str, int]) -> None:
        """`sizes` has the bytes of every file that is there; what reaches beyond is left out."""
        self.kinds: list[ItemKind] = []
        self.files: list[FileItems] = []
        self._tensors: list[Tensor] = []
        self._firsts = array("q")  # the number of each tensor's first chunk
        self._first_of: dict[str, int] = {}
        self.count = 0
        for tensor in catalog.tensors:
            if tensor.refusal is None and consists_of_items(catalog, tensor):
                self._tensors.append(tensor)
                self._firsts.append(self.count)
                self._first_of[tensor.name] = self.count
                self.count += len(tensor.chunks)
        self._sort(sizes)
        # Of each chunk the CRC-32 of its payload, and 1 + the place of its location in `locations`.
        self._crcs = array("I", bytes(4 * self.count))
        self._located = array("I", bytes(4 * self.count))
        self._locations: list[ItemLocation] = []
        self._places: dict[ItemLocation, int] = {}

    def _sort(self, sizes: Mapping[str, int]) -> None:
        kinds: dict[ItemKind, int] = {}
        by_file: dict[str, list[tuple[int, int, int]]] = {}
        number = 0
        for tensor in self._tensors:
            dtype = tensor.dtype.name
            for chunk in tensor.chunks:
                # An item of no bytes that should hold elements is read too: it is damaged.
                is_item = chunk.nbytes > 0 or 0 not in chunk.sizes
                if is_item and chunk.offset + chunk.nbytes <= sizes.get(chunk.file, -1):
                    kind = ItemKind(chunk.nbytes, dtype, chunk.sizes)
                    entry = chunk.offset, number, kinds.setdefault(kind, len(kinds))
                    by_file.setdefault(chunk.file, []).append(entry)
                number += 1
        self.kinds = list(kinds)
        for name, entries in by_file.items():
            entries.sort()
            offsets, numbers, of_kind = (
                array("q", column) for column in zip(*entries, strict=True)
            )
            self.files.append(FileItems(name, offsets, of_kind, numbers))

    def chunk(self, number: int) -> tuple[Tensor, Chunk]:
        """Return a chunk and its tensor."""
        index = bisect_right(self._firsts, number) - 1
        tensor = self._tensors[index]
        return tensor, tensor.chunks[number - self._firsts[index]]

    def totals(self) -> tuple[int, int]:
        """Return how many items are there, and their bytes."""
        count, nbytes = 0, 0
        for items in self.files:
            count += len(items.kinds)
            nbytes += sum([self.kinds[kind].nbytes for kind in items.kinds])
        return count, nbytes

    def jobs(self) -> Iterator[Iterator[ItemRun | ItemPart]]:
        """Cut the items of each file into jobs: many small ones, or a part of a large one."""
        for index in range(len(self.files)):
            yield self._jobs_of(index)

    def _jobs_of(self, index: int) -> Iterator[ItemRun | ItemPart]:
        kinds = self.files[index].kinds
        first, nbytes = 0, 0
        for item, kind in enumerate(kinds):
            size = self.kinds[kind].nbytes
            is_large = size > _SEGMENT_NBYTES
            if item > first and (is_large or nbytes >= _RUN_NBYTES or item - first >= _MAX_RUN):
                yield ItemRun(index, first, item, nbytes)
                first, nbytes = item, 0
            if is_large:
                for start in range(0, size, _SEGMENT_NBYTES):
                    yield ItemPart(index, item, start, min(start + _SEGMENT_NBYTES, size))
                first = item + 1
            else:
                nbytes += size
        if first < len(kinds):
            yield ItemRun(index, first, len(kinds), nbytes)

    def locate(self, number: int, location: ItemLocation, crc: int) -> None:
        """Note where the payload of a chunk is, and its CRC-32."""
        place = self._places.get(location)
        if place is None:
            self._locations.append(location)
            place = self._places[location] = len(self._locations)
        self._located[number] = place
        self._crcs[number] = crc

    def dump(self) -> list[object]:
        """Return what was located as plain data: for each location numbers and checksums."""
        columns: list[tuple[list[int], list[int]]] = [([], []) for _ in self._locations]
        for number, place in enumerate(self._located):
            if place:
                numbers, crcs = columns[place - 1]
                numbers.append(number)
                crcs.append(self._crcs[number])
        return [[*both] for both in zip(self._locations, columns, strict=True)]

    def merge(self, dumped: Sequence[Any]) -> None:
        """Add what another process located, after JSON."""
        for (start, nbytes, strides, *rest), (numbers, crcs) in dumped:
            steps = None if strides is None else tuple(strides)
            location = ItemLocation(start, nbytes, steps, *rest)
            for number, crc in zip(numbers, crcs, strict=True):
                self.locate(number, location, crc)

    def payload(self, number: int) -> Payload | None:
        """Return the payload of a chunk, if it was located."""
        place = self._located[number]
        if not place:
            return None
        _, chunk = self.chunk(number)
        start, nbytes, strides, first, has_crc, is_recorded = self._locations[place - 1]
        crc = self._crcs[number] if has_crc else None
        offset = chunk.offset + start
        return Payload(chunk.file, offset, nbytes, strides, first, crc, is_recorded)

    def payloads(self, tensor: Tensor) -> tuple[Payload | None, ...] | None:
        """Return what was located of a tensor's chunks; None unless they are items."""
        first = self._first_of.get(tensor.name)
        if first is None:
            return None
        return tuple([self.payload(first + index) for index in range(len(tensor.chunks))])

    def forget(self) -> None:
        """Forget what was located."""
        self._located = array("I", bytes(4 * self.count))
