"""Read the frequent instances of a `.metadata` whole, each by one regular expression.

A checkpoint of 20 000 tensors on 8 ranks is 12 million opcodes, nearly all of instances of four
classes: tensor, chunk, index and place. An instance that torch would write differently is left to
the interpreter, opcode by opcode. A test compares both ways on all fixtures and on damaged ones.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ema_ckpt.core.catalog import Ints
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.pickle.machine import Machine
from ema_ckpt.formats.pickle.memo import UNBUILT
from ema_ckpt.formats.pickle.safe_globals import Global, Replacement

_INT_NBYTES = {0x4B: 1, 0x4D: 2, 0x4A: 4}  # by opcode; LONG1 (0x8A) says its own
_REF = rb"(h.|j....)"
_ONE = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6})"
_INT = rb"(" + _ONE + rb")"
# As many numbers as their tuple's opcode takes: TUPLE1, TUPLE2, TUPLE3, or MARK ... TUPLE.
_INTS = rb"(%b\x85|%b{2}\x86|%b{3}\x87|\(%b+t)" % ((_ONE,) * 4)
_FIELD = re.compile(rb"[\x88\x89]|h.|j....", re.DOTALL)
_BOOLEANS = {b"\x88": True, b"\x89": False}
_FIELDS = rb"((?:[\x88\x89]|h.|j....){4,5})"  # of `TensorProperties`, after the dtype
_APPENDED = (b"aub", b"eub")  # one item of a list; or all from the mark on
_COUNT = rb"(?:K.|M..|J....|N)"
_OPENED = b")\x81\x94}\x94("  # EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK
_SIZED = b"\x94\x85\x94R\x94"  # after the numbers of a `torch.Size`
_BUILT = b"ub"
_SIZE = _REF + rb"(?:" + _INTS + re.escape(_SIZED) + rb")?"
_TEXT = rb"(?:" + _REF + rb"|\x8c(.))"  # a text is read by its length
_CHUNK = re.compile(re.escape(_OPENED) + _REF + _SIZE + _REF + _SIZE + _BUILT, re.DOTALL)
_HEAD = re.compile(re.escape(_OPENED) + _REF + _TEXT, re.DOTALL)
_INDEX_TAIL = re.compile(_REF + _COUNT + _REF + _SIZE + _BUILT, re.DOTALL)
_INFO_TAIL = re.compile(_REF + _INT + _REF + _INT + _BUILT, re.DOTALL)
_SHORT_TEXT = 0x8C
_NAME = rb"(h.|j....|\x8c.[^\x94]*\x94)"  # a text with this byte in it is read alone
_MAX_ROWS = 64  # expressions: torch writes a handful of forms, and each takes long to compile
_BLOCK = 4096  # instances; their groups are in memory at a time
_TENSOR_HEAD = re.compile(
    re.escape(_OPENED) + _REF + _REF + re.escape(b")\x81\x94(") + _REF + _FIELDS + b"t\x94b"
    + _REF + _SIZE + _REF + re.escape(b"]\x94") + rb"(\(?)",
    re.DOTALL,
)  # fmt: skip
_INSTANCE_COUNT = 2  # memoized objects of an instance: itself and its dict
_SIZE_COUNT = 3  # of a `torch.Size`: its numbers, the tuple around them, itself

Form = tuple[bytes, ...]
"""Opcodes of an instance that recur in others: they refer to its fields' names and to `Size`."""

Reader = Callable[[Machine], "Form | None"]
"""Reads one instance; None if it is not as expected. An empty form tells nothing of others."""


class Classes(NamedTuple):
    """What replaces torch's classes, and what makes a place from file, offset and length."""

    tensor: Callable[[], Replacement]
    properties: Callable[[], Replacement]
    chunk: object
    item_index: object
    place: object
    make_place: Callable[[str, int, int], object]


class _Class(NamedTuple):
    """A class with a reader, and the opcode that pushes it."""

    ref: bytes
    named: Global
    reader: Reader


class _Row:
    """Instances alike, one after the other: literal opcodes, and expressions, in turn.

    An expression is one group, or none, as `_COUNT`: what it matches is not needed.
    """

    def __init__(self, parts: Sequence[bytes]) -> None:
        texts = [part if index % 2 else re.escape(part) for index, part in enumerate(parts)]
        one = b"".join(texts)
        # The same without groups: a parenthesis that is no literal one.
        bare = re.sub(rb"(?<!\\)\((?!\?)", b"(?:", one)
        self._one = re.compile(one, re.DOTALL)
        self._block = re.compile(b"(?:%b){1,%d}+" % (bare, _BLOCK), re.DOTALL)

    def blocks(self, machine: Machine) -> Iterator[tuple[list[tuple[bytes, ...]], int]]:
        """Find the instances from here on, in blocks: the groups of each, and the block's end."""
        while match := self._block.match(machine.data, machine.pos):
            end = match.end()
            yield self._one.findall(machine.data, machine.pos, end), end


class Shortcuts:
    """Reader of whole instances; it keeps the memo as the interpreter would."""

    def __init__(self, classes: Classes) -> None:
        self._new = classes
        self._readers: dict[object, Reader] = {
            classes.tensor: self._tensor,
            classes.chunk: self._chunk,
            classes.item_index: self._index,
            classes.place: self._place,
        }
        self._known_properties: dict[bytes, Replacement] = {}
        self._classes: dict[bytes, _Class] = {}
        # Reads chunks, or items, that are as an earlier one but for names and numbers, by class.
        self._alike: dict[bytes, Callable[[Machine], None]] = {}
        self._rows: dict[tuple[bytes, ...], _Row] = {}
        self._refs: dict[bytes, object] = {}
        self._ints: dict[bytes, int] = {}  # offsets and lengths, none of them negative
        self._tuples: dict[bytes, Ints] = {}
        self._texts: dict[str, str] = {}
        # Field names that were looked up and are right, by class: they recur in every instance.
        self._checked: set[tuple[object, ...]] = set()

    def prepare(self, loaded: Global) -> None:
        """Attach the shortcut of a class that the pickle has just named."""
        reader = self._readers.get(loaded.make)
        if reader is not None:
            loaded.shortcut = partial(self._read_row, loaded, reader)

    def _read_row(self, named: Global, reader: Reader, machine: Machine) -> None:
        """Read an instance of the class that was just pushed, and all that follow it in a row."""
        ref = self._ref_before(machine, named)
        if not ref:
            reader(machine)
            return
        self._classes[ref] = _Class(ref, named, reader)
        machine.stack.pop()
        machine.pos -= len(ref)
        self._read_all(machine, self._readers.values())

    def _read_all(self, machine: Machine, readers: Container[Reader]) -> None:
        """Read all instances from here on that have one of `readers`, up to another opcode or one
        that is not as expected.
        """
        index: Form = ()  # reference and form of the index just before
        while (current := self._following(machine)) is not None:
            if current.reader not in readers:
                return
            before, read_alike = machine.pos, self._alike.get(current.ref)
            if read_alike is not None:
                read_alike(machine)
            if machine.pos != before:
                continue
            machine.pos += len(current.ref)
            machine.stack.append(current.named)
            read = current.reader(machine)
            if read is None:
                return
            index = self._remember(current, read, index)

    def _remember(self, read: _Class, form: Form, index: Form) -> Form:
        """Note the form of an instance, by which those alike are read; return it of an index.

        Args:
            index: the same of the instance before it.
        """
        if not form or len(self._rows) >= _MAX_ROWS:
            return ()
        form = (read.ref, *form)
        if read.reader == self._chunk:
            self._alike[read.ref] = partial(self._read_chunks, form)
        elif index and read.reader == self._place:
            self._alike[index[0]] = partial(self._read_items, index + form)
        return form if read.reader == self._index else ()

    def _ref_before(self, machine: Machine, named: Global) -> bytes:
        """Return the opcode, just before this position, that pushed a class; empty if in doubt."""
        for opcode, nbytes in ((b"h", 2), (b"j", 5)):
            ref = machine.data[machine.pos - nbytes : machine.pos]
            if ref[:1] == opcode and self._ref(machine, ref) is named:
                return ref
        return b""

    def _following(self, machine: Machine) -> _Class | None:
        """Return the class that the next opcode pushes, if it has a reader."""
        pos = machine.pos
        nbytes = 2 if machine.data[pos : pos + 1] == b"h" else 5
        return self._classes.get(machine.data[pos : pos + nbytes])

    def _read_chunks(self, form: Form, machine: Machine) -> None:
        """Read chunks that differ from an earlier one in numbers alone."""
        ref, key, size, key2, size2 = form
        opened = ref + _OPENED + key + size
        row = self._row(opened, _INTS, _SIZED + key2 + size2, _INTS, _SIZED + _BUILT)
        tuples, push, memo = self._tuples, machine.stack.append, machine.memo
        numbers = memo.skip()
        for found, end in row.blocks(machine):
            count = memo.count
            for run, run2 in found:
                pair = tuples.get(run) or self._tuple(run), tuples.get(run2) or self._tuple(run2)
                push(pair)
                memo.items += pair
                numbers.extend((count + 4, count + 7))
                count += 8
            machine.pos, memo.count = end, count

    def _read_items(self, form: Form, machine: Machine) -> None:
        """Read indices and places that differ from earlier ones in names and numbers alone."""
        index_ref, key, key2, key3, size, place_ref, key4, key5, key6 = form
        row = self._row(
            *(index_ref + _OPENED + key, _NAME, key2, _COUNT, key3 + size, _INTS),
            *(_SIZED + _BUILT + place_ref + _OPENED + key4, _REF, key5, _INT, key6, _INT, _BUILT),
        )
        tuples, refs, ints, memo = self._tuples, self._refs, self._ints, machine.memo
        make_place, push, built = self._new.make_place, machine.stack.append, memo.items.append
        number = memo.skip().append
        for found, end in row.blocks(machine):
            count = memo.count
            for name_run, run, file_ref, run2, run3 in found:
                if name_run[0] == _SHORT_TEXT:
                    name: object = self._written(name_run)
                    built(name)
                    number(count + _INSTANCE_COUNT)
                    count += 1
                else:
                    name = refs.get(name_run) or self._ref(machine, name_run)
                file = refs.get(file_ref) or self._ref(machine, file_ref)
                if name.__class__ is not str or file.__class__ is not str:
                    raise _unexpected()
                offsets = tuples.get(run) or self._tuple(run)
                offset, nbytes = ints.get(run2), ints.get(run3)
                if offset is None:
                    offset = self._natural(run2)
                if nbytes is None:
                    nbytes = self._natural(run3)
                push((name, offsets))
                push(make_place(file, offset, nbytes))
                built(offsets)
                number(count + 4)
                count += 7
            machine.pos, memo.count = end, count

    def _row(self, *parts: bytes) -> _Row:
        """Return the row of instances alike: literal opcodes, and expressions, in turn."""
        row = self._rows.get(parts)
        if row is None:
            row = self._rows[parts] = _Row(parts)
        return row

    def _written(self, run: bytes) -> str:
        """Return the text of an opcode that holds it, and of its MEMOIZE."""
        if run[1] != len(run) - 3:
            raise _unexpected()
        text = run[2:-1].decode("utf-8", "surrogatepass")
        return self._texts.setdefault(text, text)

    def _ref(self, machine: Machine, ref: bytes) -> object:
        value = self._refs.get(ref)
        if value is None:
            index = ref[1] if len(ref) == 2 else struct.unpack_from("<I", ref, 1)[0]
            value = machine.memo.get(index) if index < machine.memo.count else None
            if isinstance(value, str | Global | tuple):
                self._refs[ref] = value
        return value

    def _natural(self, run: bytes) -> int:
        """Decode an offset or a length. Raises SourceError if it is negative."""
        number = self._ints.get(run)
        if number is None:
            (number,) = _decode_ints(run)
            if number < 0:
                raise _unexpected()
            self._ints[run] = number
        return number

    def _tuple(self, run: bytes) -> Ints:
        """Decode the numbers of a tuple, given with the tuple's opcodes around them."""
        numbers = self._tuples.get(run)
        if numbers is None:
            inner = run[1:-1] if run[:1] == b"(" else run[:-1]
            numbers = self._tuples[run] = tuple(_decode_ints(inner))
        return numbers

    def _size(self, machine: Machine, ref: bytes, run: bytes | None, memo: _Memo) -> Ints | None:
        value = self._ref(machine, ref)
        if run is None:
            return value if isinstance(value, tuple) else None
        if value.__class__ is not Global or value.name != "Size":
            return None
        numbers = self._tuple(run)
        memo.add_size(numbers)
        return numbers

    def _chunk(self, machine: Machine) -> Form | None:
        match = _CHUNK.match(machine.data, machine.pos)
        if match is None:
            return None
        key, ref, run, key2, ref2, run2 = match.groups()
        memo = _Memo()
        offsets = self._size(machine, ref, run, memo)
        sizes = self._size(machine, ref2, run2, memo)
        if offsets is None or sizes is None:
            return None
        form: Form = (key, ref, key2, ref2)
        if not self._are_named(machine, ("offsets", "sizes"), key, key2):
            return None
        machine.replace_top((offsets, sizes), match.end(), memo.count, memo.kept)
        return form if run and run2 else ()

    def _are_named(self, machine: Machine, names: tuple[str, ...], *refs: bytes) -> bool:
        """Whether opcodes refer to the fields that are expected, in this order."""
        if (names, refs) not in self._checked:
            if [self._ref(machine, ref) for ref in refs] != list(names):
                return False
            self._checked.add((names, refs))
        return True

    def _text(self, machine: Machine, head: re.Match[bytes], memo: _Memo) -> tuple[str | None, int]:
        """Read the text after a head, in full or by reference; return it and the next position."""
        ref, length = head[2], head[3]
        if ref is not None:
            value = self._ref(machine, ref)
            return (value if isinstance(value, str) else None), head.end()
        data, pos = machine.data, head.end()
        end = pos + length[0]
        text = data[pos:end].decode("utf-8", "surrogatepass")
        text = self._texts.setdefault(text, text)
        memo.add(text)
        return (text, end + 1) if data[end : end + 1] == b"\x94" else (None, end)

    def _index(self, machine: Machine) -> Form | None:
        head = _HEAD.match(machine.data, machine.pos)
        if head is None:
            return None
        memo = _Memo()
        name, pos = self._text(machine, head, memo)
        tail = _INDEX_TAIL.match(machine.data, pos)
        if name is None or tail is None:
            return None
        key, (key2, key3, ref, run) = head[1], tail.groups()
        offsets = self._size(machine, ref, run, memo)
        if offsets is None:
            return None
        if not self._are_named(machine, ("fqn", "index", "offset"), key, key2, key3):
            return None
        machine.replace_top((name, offsets), tail.end(), memo.count, memo.kept)
        return (key, key2, key3, ref) if run else ()

    def _tensor(self, machine: Machine) -> Form | None:
        """Read a tensor with all of its chunks."""
        match = _TENSOR_HEAD.match(machine.data, machine.pos)
        if match is None:
            return None
        key, properties_ref, dtype_ref, others, key2, ref, run, key3, opened = match.groups()
        memo = _Memo()
        properties = self._properties(machine, properties_ref, dtype_ref + others, memo)
        size = self._size(machine, ref, run, memo)
        if properties is None or size is None:
            return None
        if not self._are_named(machine, ("properties", "size", "chunks"), key, key2, key3):
            return None
        memo.count += 1  # the list
        tensor, chunks = self._new.tensor(), list[object]()
        tensor.setstate({"properties": properties, "size": size, "chunks": chunks})
        before = machine.state()
        machine.replace_top(tensor, match.end(), memo.count, memo.kept)
        below = len(machine.stack)
        self._read_all(machine, [self._chunk])  # nothing that would nest
        chunks += machine.stack[below:]
        end = _APPENDED[bool(opened)] if chunks else b"ub"
        if bool(opened) != (len(chunks) > 1) or not machine.data.startswith(end, machine.pos):
            machine.go_back(before)  # to where a frame begins within it, for example
            return None
        del machine.stack[below:]
        machine.pos += len(end)
        return ()

    def _properties(
        self, machine: Machine, ref: bytes, refs: bytes, memo: _Memo
    ) -> Replacement | None:
        """Read `TensorProperties` by the class, and by their fields: references and booleans."""
        named, make = self._ref(machine, ref), self._new.properties
        if named.__class__ is not Global or named.make is not self._new.properties:
            return None
        key = ref + refs
        if key not in self._known_properties:
            values = [self._field(machine, field) for field in _FIELD.findall(refs)]
            if None in values:
                return None
            properties = make()
            properties.setstate(tuple(values))
            self._known_properties[key] = properties
        memo.add(self._known_properties[key])
        memo.count += 1  # the tuple
        return self._known_properties[key]

    def _field(self, machine: Machine, opcode: bytes) -> object:
        """Return what one opcode pushes: a boolean, or an object of the memo; None if unknown."""
        if opcode in _BOOLEANS:
            return _BOOLEANS[opcode]
        value = self._ref(machine, opcode)
        return None if value is UNBUILT else value

    def _place(self, machine: Machine) -> Form | None:
        head = _HEAD.match(machine.data, machine.pos)
        if head is None:
            return None
        memo = _Memo()
        file, pos = self._text(machine, head, memo)
        tail = _INFO_TAIL.match(machine.data, pos)
        if file is None or tail is None:
            return None
        key, (key2, run, key3, run2) = head[1], tail.groups()
        if not self._are_named(machine, ("relative_path", "offset", "length"), key, key2, key3):
            return None
        place = self._new.make_place(file, self._natural(run), self._natural(run2))
        machine.replace_top(place, tail.end(), memo.count, memo.kept)
        return key, key2, key3


class _Memo:
    """Memoized objects of an instance: how many there are, and those that are built."""

    __slots__ = ("count", "kept")

    def __init__(self) -> None:
        self.count = _INSTANCE_COUNT
        self.kept: list[tuple[int, object]] = []

    def add(self, value: object) -> None:
        """Add an object that is built."""
        self.kept.append((self.count, value))
        self.count += 1

    def add_size(self, numbers: Ints) -> None:
        """Add the three objects of a `torch.Size`; the last of them may be needed again."""
        self.count += _SIZE_COUNT
        self.kept.append((self.count - 1, numbers))


def _unexpected() -> SourceError:
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
