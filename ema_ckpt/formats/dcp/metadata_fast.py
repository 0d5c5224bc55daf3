"""Read the frequent instances of a `.metadata` whole, each by one regular expression.

A checkpoint of 20 000 tensors on 8 ranks is 12 million opcodes, nearly all of instances of four
classes: tensor, chunk, index and place. An instance that torch would write differently is left to
the interpreter, opcode by opcode. A test compares both ways on all fixtures and on damaged ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from functools import partial
from typing import NamedTuple

from ema_ckpt.core.catalog import Ints
from ema_ckpt.formats.dcp.metadata_rows import COUNT, INSTANCE_COUNT, INT, INTS, REF, RowReader
from ema_ckpt.formats.dcp.metadata_values import (
    BOOLEAN,
    BUILT,
    OPENED,
    REFERENCE,
    SIZED,
    ChunkBox,
    Form,
    ItemKey,
    ItemPlace,
    Values,
)
from ema_ckpt.formats.pickle.machine import Machine
from ema_ckpt.formats.pickle.memo import UNBUILT
from ema_ckpt.formats.pickle.safe_globals import Global, Replacement
from ema_ckpt.formats.pickle.several import Several

_FIELD = re.compile(rb"[\x88\x89]|h.|j....", re.DOTALL)
_BOOLEANS = {b"\x88": True, b"\x89": False}
_FIELDS = rb"((?:[\x88\x89]|h.|j....){4,5})"  # of `TensorProperties`, after the dtype
_APPENDED = (b"aub", b"eub")  # one item of a list; or all from the mark on
_SIZE = REF + rb"(?:" + INTS + re.escape(SIZED) + rb")?"
_TEXT = rb"(?:" + REF + rb"|\x8c(.))"  # a text is read by its length
_CHUNK = re.compile(re.escape(OPENED) + REF + _SIZE + REF + _SIZE + BUILT, re.DOTALL)
_HEAD = re.compile(re.escape(OPENED) + REF + _TEXT, re.DOTALL)
_INDEX_TAIL = re.compile(REF + COUNT + REF + _SIZE + BUILT, re.DOTALL)
_INFO_TAIL = re.compile(REF + INT + REF + INT + BUILT, re.DOTALL)
_TENSOR_HEAD = re.compile(
    re.escape(OPENED) + REF + REF + re.escape(b")\x81\x94(") + REF + _FIELDS + b"t\x94b"
    + REF + _SIZE + REF + re.escape(b"]\x94") + rb"(\(?)",
    re.DOTALL,
)  # fmt: skip
_MAX_FORMS = 8  # of tensors, of chunks, of items: torch writes a handful, and each takes its time
_SIZE_CLASS = ("torch", "Size")
_SIZE_COUNT = 3  # of a `torch.Size`: its numbers, the tuple around them, itself

Reader = Callable[[Machine], "Form | None"]
"""Reads one instance; None if it is not as expected. An empty form tells nothing of others."""


class Classes(NamedTuple):
    """What replaces torch's classes."""

    tensor: Callable[[], Replacement]
    properties: Callable[[], Replacement]
    chunk: object
    item_index: object
    place: object


class _Class(NamedTuple):
    """A class with a reader, and the opcode that pushes it."""

    ref: bytes
    named: Global
    reader: Reader


class Shortcuts:
    """Reader of whole instances; it keeps the memo as the interpreter would."""

    def __init__(self, classes: Classes, values: Values, rows: RowReader) -> None:
        self._new = classes
        self._values = values
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
        self._read_alike: dict[Reader, Callable[[Form, Machine], None]] = {
            self._tensor: rows.read_tensors,
            self._chunk: rows.read_chunks,
            self._place: rows.read_items,
        }
        self._forms: dict[Reader, set[Form]] = {reader: set() for reader in self._read_alike}
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
        if not form:
            return ()
        form = (read.ref, *form)
        if read.reader == self._index:
            return form
        first = index + form if read.reader == self._place else form
        if (index or read.reader != self._place) and self._is_one_of_few(read.reader, first):
            self._alike[first[0]] = partial(self._read_alike[read.reader], first)
        return ()

    def _is_one_of_few(self, reader: Reader, form: Form) -> bool:
        """Whether rows of a form are read; no more forms are than torch may write."""
        forms = self._forms[reader]
        if len(forms) < _MAX_FORMS:
            forms.add(form)
        return form in forms

    def _ref_before(self, machine: Machine, named: Global) -> bytes:
        """Return the opcode, just before this position, that pushed a class; empty if in doubt."""
        for opcode, nbytes in ((b"h", 2), (b"j", 5)):
            ref = machine.data[machine.pos - nbytes : machine.pos]
            if ref[:1] == opcode and self._values.ref(machine, ref) is named:
                return ref
        return b""

    def _following(self, machine: Machine) -> _Class | None:
        """Return the class that the next opcode pushes, if it has a reader."""
        pos = machine.pos
        nbytes = 2 if machine.data[pos : pos + 1] == b"h" else 5
        return self._classes.get(machine.data[pos : pos + nbytes])

    def _size(self, machine: Machine, ref: bytes, run: bytes | None, memo: _Memo) -> Ints | None:
        value = self._values.ref(machine, ref)
        if run is None:
            return value if isinstance(value, tuple) else None
        if value.__class__ is not Global or (value.module, value.name) != _SIZE_CLASS:
            return None
        numbers = self._values.tuple(run)
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
        machine.replace_top(ChunkBox(offsets, sizes), match.end(), memo.count, memo.kept)
        return form if run and run2 else ()

    def _are_named(self, machine: Machine, names: tuple[str, ...], *refs: bytes) -> bool:
        """Whether opcodes refer to the fields that are expected, in this order."""
        if (names, refs) not in self._checked:
            if [self._values.ref(machine, ref) for ref in refs] != list(names):
                return False
            self._checked.add((names, refs))
        return True

    def _text(self, machine: Machine, head: re.Match[bytes], memo: _Memo) -> tuple[str | None, int]:
        """Read the text after a head, in full or by reference; return it and the next position."""
        ref, length = head[2], head[3]
        if ref is not None:
            value = self._values.ref(machine, ref)
            return (value if isinstance(value, str) else None), head.end()
        data, pos = machine.data, head.end()
        end = pos + length[0]
        text = self._values.text(data[pos:end])
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
        machine.replace_top(ItemKey(name, offsets), tail.end(), memo.count, memo.kept)
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
        count = sum([len(chunk) if isinstance(chunk, Several) else 1 for chunk in chunks])
        end = _APPENDED[bool(opened)] if chunks else b"ub"
        if bool(opened) != (count > 1) or not machine.data.startswith(end, machine.pos):
            machine.go_back(before)  # to where a frame begins within it, for example
            return None
        del machine.stack[below:]
        machine.pos += len(end)
        return (key, properties_ref, _kinds(others), key2, ref, key3) if run else ()

    def _properties(
        self, machine: Machine, ref: bytes, refs: bytes, memo: _Memo
    ) -> Replacement | None:
        """Read `TensorProperties` by the class, and by their fields: references and booleans."""
        named, make = self._values.ref(machine, ref), self._new.properties
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
        value = self._values.ref(machine, opcode)
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
        place = ItemPlace(file, self._values.natural(run), self._values.natural(run2))
        machine.replace_top(place, tail.end(), memo.count, memo.kept)
        return key, key2, key3


def _kinds(fields: bytes) -> bytes:
    """Return a letter for each of a tensor's properties: a boolean, or a reference."""
    found = _FIELD.findall(fields)
    return b"".join([BOOLEAN if field in _BOOLEANS else REFERENCE for field in found])


class _Memo:
    """Memoized objects of an instance: how many there are, and those that are built."""

    __slots__ = ("count", "kept")

    def __init__(self) -> None:
        self.count = INSTANCE_COUNT
        self.kept: list[tuple[int, object]] = []

    def add(self, value: object) -> None:
        """Add an object that is built."""
        self.kept.append((self.count, value))
        self.count += 1

    def add_size(self, numbers: Ints) -> None:
        """Add the three objects of a `torch.Size`; the last of them may be needed again."""
        self.count += _SIZE_COUNT
        self.kept.append((self.count - 1, numbers))
