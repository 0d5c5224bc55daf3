"""What instances in a `.metadata` are made of, decoded once however often it recurs."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from ema_ckpt.core.catalog import Ints
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.pickle.safe_globals import Global

if TYPE_CHECKING:
    from ema_ckpt.formats.pickle.machine import Machine

Key = tuple[str, Ints | None]
"""Name of an item, and the offsets of its chunk; None of an object."""

Form = tuple[bytes, ...]
"""Opcodes of an instance that recur in others: they refer to its fields' names and to `Size`."""

OPENED = b")\x81\x94}\x94("  # EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK
SIZED = b"\x94\x85\x94R\x94"  # after the numbers of a `torch.Size`
BUILT = b"ub"
REFERENCE, BOOLEAN = b"r", b"b"  # kinds of a tensor's properties, in its form
_INT_NBYTES = {0x4B: 1, 0x4D: 2, 0x4A: 4}  # by opcode; LONG1 (0x8A) says its own


# What stands for an instance in the place of it is no plain tuple: the interpreter takes none of
# these for arguments, pairs or a `torch.Size`, as it takes no instance for them.


class ChunkBox(NamedTuple):
    """A chunk as the shortcuts read it (`ChunkStorageMetadata`)."""

    offsets: Ints
    sizes: Ints


class ItemKey(NamedTuple):
    """The index of an item as the shortcuts read it (`MetadataIndex`): its `Key`."""

    name: str
    offsets: Ints


class ItemPlace(NamedTuple):
    """Where an item lies: a file beside `.metadata`, and the bytes of it (`_StorageInfo`)."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()


class Values:
    """Texts, numbers and references of one pickle, by the bytes that stand for them."""

    def __init__(self) -> None:
        self.refs: dict[bytes, object] = {}
        self.ints: dict[bytes, int] = {}  # offsets and lengths, none of them negative
        self.tuples: dict[bytes, Ints] = {}
        self._texts: dict[bytes, str] = {}

    def text(self, run: bytes) -> str:
        """Decode a text."""
        text = self._texts.get(run)
        if text is None:
            text = self._texts[run] = run.decode("utf-8", "surrogatepass")
        return text

    def written(self, run: bytes) -> str:
        """Return the text of an opcode that holds it, and of its MEMOIZE."""
        if run[1] != len(run) - 3:
            raise unexpected()
        return self.text(run[2:-1])

    def ref(self, machine: Machine, ref: bytes) -> object:
        """Return what an opcode fetches from the memo."""
        value = self.refs.get(ref)
        if value is None:
            index = ref[1] if len(ref) == 2 else struct.unpack_from("<I", ref, 1)[0]
            value = machine.memo.get(index) if index < machine.memo.count else None
            if isinstance(value, str | Global | tuple):
                self.refs[ref] = value
        return value

    def natural(self, run: bytes) -> int:
        """Decode an offset or a length. Raises SourceError if it is negative."""
        number = self.ints.get(run)
        if number is None:
            (number,) = _decode_ints(run)
            if number < 0:
                raise unexpected()
            self.ints[run] = number
        return number

    def tuple(self, run: bytes) -> Ints:
        """Decode the numbers of a tuple, given with the tuple's opcodes around them."""
        numbers = self.tuples.get(run)
        if numbers is None:
            inner = run[1:-1] if run[:1] == b"(" else run[:-1]
            numbers = self.tuples[run] = tuple(_decode_ints(inner))
        return numbers


def is_memory_format(value: object) -> bool:
    """Whether a value is a member of `_MEM_FORMAT_ENCODING`, which stands for its number here."""
    return type(value) is int and value in (0, 1, 2)


def differ_by_one_bit(a: str, b: str) -> bool:
    """Whether two names differ in one bit of one character, as damage makes them."""
    if len(a) != len(b):
        return False
    return sum((ord(x) ^ ord(y)).bit_count() for x, y in zip(a, b, strict=True)) == 1


def unexpected() -> SourceError:
    """Return what makes the interpreter read the whole pickle, and say what is wrong with it."""
    return SourceError("unreadable", "an item of the metadata is not as torch writes it")


def _decode_ints(run: bytes) -> list[int]:
    numbers, pos = [], 0
    while pos < len(run):
        op = run[pos]
        pos += 1
        if op == 0x8A:
            nbytes = run[pos]
            pos += 1
        else:
            nbytes = _INT_NBYTES[op]
        data = run[pos : pos + nbytes]
        numbers.append(int.from_bytes(data, "little", signed=op in (0x4A, 0x8A)))
        pos += nbytes
    return numbers
