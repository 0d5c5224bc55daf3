"""Read the frequent instances of a `.metadata` whole, each by one regular expression.

A checkpoint of 20 000 tensors on 8 ranks is 12 million opcodes, nearly all of instances of three
classes: chunk, index and place. An instance that torch would write differently is left to the
interpreter, opcode by opcode. A test compares both ways on all fixtures and on damaged ones.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ema_ckpt.core.catalog import Ints
from ema_ckpt.formats.pickle.machine import Machine
from ema_ckpt.formats.pickle.safe_globals import Global

_INT_NBYTES = {0x4B: 1, 0x4D: 2, 0x4A: 4}  # by opcode; LONG1 (0x8A) says its own
_REF = rb"(h.|j....)"
_ONE = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6})"
_INT = rb"(" + _ONE + rb")"
# As many numbers as their tuple's opcode takes: TUPLE1, TUPLE2, TUPLE3, or MARK ... TUPLE.
_INTS = rb"(%b\x85|%b{2}\x86|%b{3}\x87|\(%b+t)" % ((_ONE,) * 4)
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
_INSTANCE_COUNT = 2  # memoized objects of an instance: itself and its dict
_SIZE_COUNT = 3  # of a `torch.Size`: its numbers, the tuple around them, itself

Form = tuple[bytes, ...]
"""Opcodes of an instance that recur in others: they refer to its fields' names and to `Size`."""

Reader = Callable[[Machine], "Form | None"]
"""Reads one instance; None if it is not as expected. An empty form tells nothing of others."""


class _Class(NamedTuple):
    """A class with a reader, and the opcode that pushes it."""

    ref: bytes
    named: Global
    reader: Reader


class Shortcuts:
    """Reader of whole instances; it keeps the memo as the interpreter would.

    `chunk`, `index` and `place` are the classes that replace torch's; `make_place` makes the value
    of a place from file, offset and length.
    """

    def __init__(
        self, chunk: object, index: object, place: object, make_place: Callable[..., object]
    ) -> None:
        self._readers: dict[object, Reader] = {
            chunk: self._chunk,
            index: self._index,
            place: self._place,
        }
        self._make_place = make_place
        self._classes: dict[bytes, _Class] = {}
        self._rows: dict[tuple[bytes, ...], re.Pattern[bytes]] = {}
        self._refs: dict[bytes, object] = {}
        self._ints: dict[bytes, Ints] = {}
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
        current = _Class(self._ref_before(machine, named), named, reader)
        if current.ref:
            self._classes[current.ref] = current
        index_form: Form = ()
        while (form := current.reader(machine)) is not None:
            following = self._following(machine)
            if following is not None and form:
                if current.reader == following.reader == self._chunk:
                    self._read_chunks(machine, current.ref, form)
                elif index_form and following.reader == self._index:
                    self._read_items(machine, (following.ref, *index_form, current.ref, *form))
                following = self._following(machine)
            if following is None:
                return
            index_form = form if current.reader == self._index else ()
            current = following
            machine.pos += len(current.ref)
            machine.stack.append(current.named)

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

    def _row(self, *parts: bytes) -> re.Pattern[bytes]:
        """Return the expression of instances alike: literal opcodes, and expressions, in turn."""
        row = self._rows.get(parts)
        if row is None:
            texts = [part if index % 2 else re.escape(part) for index, part in enumerate(parts)]
            row = self._rows[parts] = re.compile(b"".join(texts), re.DOTALL)
        return row

    def _read_chunks(self, machine: Machine, ref: bytes, form: Form) -> None:
        """Read chunks that differ from the one before in numbers alone."""
        key, size, key2, size2 = form
        opened = ref + _OPENED + key + size
        row = self._row(opened, _INTS, _SIZED + key2 + size2, _INTS, _SIZED + _BUILT)
        data, pos, count, tuples = machine.data, machine.pos, machine.memo.count, self._tuples
        memo, numbers, push = machine.memo.items, machine.memo.skip(), machine.stack.append
        while match := row.match(data, pos):
            run, run2 = match.groups()
            pair = tuples.get(run) or self._tuple(run), tuples.get(run2) or self._tuple(run2)
            push(pair)
            memo += pair
            numbers.extend((count + 4, count + 7))
            count += 8
            pos = match.end()
        machine.pos, machine.memo.count = pos, count

    def _read_items(self, machine: Machine, form: Form) -> None:
        """Read indices and places that differ from those before in names and numbers alone."""
        index_ref, key, key2, key3, size, place_ref, key4, key5, key6 = form
        second = _SIZED + _BUILT + place_ref + _OPENED + key4
        opened = index_ref + _OPENED + key
        row = self._row(
            *(opened, _REF, key2, _COUNT, key3 + size, _INTS),
            *(second, _REF, key5, _INT, key6, _INT, _BUILT),
        )
        data, pos, count, tuples = machine.data, machine.pos, machine.memo.count, self._tuples
        memo, numbers, stack = machine.memo.items, machine.memo.skip(), machine.stack
        while match := row.match(data, pos):
            name_ref, run, file_ref, run2, run3 = match.groups()
            name, file = self._ref(machine, name_ref), self._ref(machine, file_ref)
            (offset,), (nbytes,) = self._numbers(run2), self._numbers(run3)
            if name.__class__ is not str or file.__class__ is not str or min(offset, nbytes) < 0:
                break
            offsets = tuples.get(run) or self._tuple(run)
            stack += ((name, offsets), self._make_place(file, offset, nbytes))
            memo.append(offsets)
            numbers.append(count + 4)
            count += 7
            pos = match.end()
        machine.pos, machine.memo.count = pos, count

    def _ref(self, machine: Machine, ref: bytes) -> object:
        value = self._refs.get(ref)
        if value is None:
            index = ref[1] if len(ref) == 2 else struct.unpack_from("<I", ref, 1)[0]
            value = machine.memo.get(index) if index < machine.memo.count else None
            if isinstance(value, str | Global | tuple):
                self._refs[ref] = value
        return value

    def _numbers(self, run: bytes) -> Ints:
        numbers = self._ints.get(run)
        if numbers is None:
            numbers = self._ints[run] = tuple(_decode_ints(run))
        return numbers

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
        (offset,), (nbytes,) = self._numbers(run), self._numbers(run2)
        if offset < 0 or nbytes < 0:
            return None
        place = self._make_place(file, offset, nbytes)
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
