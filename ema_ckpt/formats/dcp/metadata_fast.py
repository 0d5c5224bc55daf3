"""Read the frequent instances of a `.metadata` whole, each by one regular expression.

A checkpoint of 20 000 tensors on 8 ranks is 12 million opcodes, nearly all of instances of three
classes: chunk, index and place. An instance that torch would write differently is left to the
interpreter, opcode by opcode. A test compares both ways on all fixtures and on damaged ones.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence

from ema_ckpt.core.catalog import Ints
from ema_ckpt.formats.pickle.machine import UNBUILT, Machine
from ema_ckpt.formats.pickle.safe_globals import Global

_REF = rb"(h.|j....)"
_ONE = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6})"
_INT = rb"(" + _ONE + rb")"
# As many numbers as their tuple's opcode takes: TUPLE1, TUPLE2, TUPLE3, or MARK ... TUPLE.
_INTS = rb"(%b\x85|%b{2}\x86|%b{3}\x87|\(%b+t)" % ((_ONE,) * 4)
_SIZE = _REF + rb"(?:" + _INTS + rb"\x94\x85\x94R\x94)?"
_OPEN = rb"\)\x81\x94\}\x94\("  # EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK
_CHUNK = re.compile(_OPEN + _REF + _SIZE + _REF + _SIZE + rb"ub", re.DOTALL)
_HEAD = re.compile(_OPEN + _REF, re.DOTALL)
_INDEX_TAIL = re.compile(_REF + rb"(?:K.|M..|J....|N)" + _REF + _SIZE + rb"ub", re.DOTALL)
_INFO_TAIL = re.compile(_REF + _INT + _REF + _INT + rb"ub", re.DOTALL)
_FRESH = (UNBUILT, UNBUILT)  # an instance and its dict
_SIZE_STEPS = (UNBUILT, UNBUILT)  # the two tuples inside a `torch.Size`


class Shortcuts:
    """Reader of whole instances; it keeps the memo as the interpreter would.

    `chunk`, `index` and `place` are the classes that replace torch's; `make_place` makes the value
    of a place from file, offset and length.
    """

    def __init__(
        self, chunk: object, index: object, place: object, make_place: Callable[..., object]
    ) -> None:
        self._readers = {chunk: self._chunk, index: self._index, place: self._place}
        self._make_place = make_place
        self._refs: dict[bytes, object] = {}
        self._ints: dict[bytes, Ints] = {}
        self._texts: dict[str, str] = {}
        # Field names that were looked up and are right, by class: they recur in every instance.
        self._checked: set[tuple[object, ...]] = set()

    def prepare(self, loaded: Global) -> None:
        """Attach the shortcut of a class that the pickle has just named."""
        loaded.shortcut = self._readers.get(loaded.make)

    def _ref(self, machine: Machine, ref: bytes) -> object:
        value = self._refs.get(ref)
        if value is None:
            index = ref[1] if len(ref) == 2 else struct.unpack_from("<I", ref, 1)[0]
            value = machine.memo[index] if index < len(machine.memo) else None
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
        return self._numbers(run[1:-1] if run[:1] == b"(" else run[:-1])

    def _size(
        self, machine: Machine, ref: bytes, run: bytes | None, memo: list[object]
    ) -> Ints | None:
        value = self._ref(machine, ref)
        if run is None:
            return value if isinstance(value, tuple) else None
        if value.__class__ is not Global or value.name != "Size":
            return None
        numbers = self._tuple(run)
        memo += (UNBUILT, UNBUILT, numbers)
        return numbers

    def _chunk(self, machine: Machine) -> bool:
        match = _CHUNK.match(machine.data, machine.pos)
        if match is None:
            return False
        key, ref, run, key2, ref2, run2 = match.groups()
        keys = ("chunk", key, ref, key2, ref2)
        if keys in self._checked and run and run2:
            pair = self._tuple(run), self._tuple(run2)
            steps = (*_FRESH, *_SIZE_STEPS, pair[0], *_SIZE_STEPS, pair[1])
            return _accept(machine, pair, steps, match.end())
        memo: list[object] = [UNBUILT, UNBUILT]
        if self._ref(machine, key) != "offsets" or self._ref(machine, key2) != "sizes":
            return False
        offsets = self._size(machine, ref, run, memo)
        sizes = self._size(machine, ref2, run2, memo)
        if offsets is None or sizes is None:
            return False
        if run and run2:
            self._checked.add(keys)
        return _accept(machine, (offsets, sizes), memo, match.end())

    def _text(self, machine: Machine, pos: int, memo: list[object]) -> tuple[str | None, int]:
        """Read a text at `pos`, in full or by reference; return it and the next position."""
        data = machine.data
        if data[pos] == 0x8C:
            end = pos + 2 + data[pos + 1]
            text = data[pos + 2 : end].decode("utf-8", "surrogatepass")
            text = self._texts.setdefault(text, text)
            memo.append(text)
            return (text, end + 1) if data[end : end + 1] == b"\x94" else (None, end)
        nbytes = {0x68: 2, 0x6A: 5}.get(data[pos], 0)
        value = self._ref(machine, data[pos : pos + nbytes]) if nbytes else None
        return (value if isinstance(value, str) else None), pos + nbytes

    def _index(self, machine: Machine) -> bool:
        head = _HEAD.match(machine.data, machine.pos)
        if head is None:
            return False
        memo: list[object] = [UNBUILT, UNBUILT]
        name, pos = self._text(machine, head.end(), memo)
        tail = _INDEX_TAIL.match(machine.data, pos)
        if name is None or tail is None:
            return False
        key, (key2, key3, ref, run) = head[1], tail.groups()
        keys = ("index", key, key2, key3, ref)
        if keys in self._checked and run:
            offsets: Ints | None = self._tuple(run)
            memo += (*_SIZE_STEPS, offsets)
            return _accept(machine, (name, offsets), memo, tail.end())
        offsets = self._size(machine, ref, run, memo)
        names = [self._ref(machine, ref) for ref in (key, key2, key3)]
        if offsets is None or names != ["fqn", "index", "offset"]:
            return False
        if run:
            self._checked.add(keys)
        return _accept(machine, (name, offsets), memo, tail.end())

    def _place(self, machine: Machine) -> bool:
        head = _HEAD.match(machine.data, machine.pos)
        if head is None:
            return False
        memo: list[object] = [UNBUILT, UNBUILT]
        name, pos = self._text(machine, head.end(), memo)
        tail = _INFO_TAIL.match(machine.data, pos)
        if name is None or tail is None:
            return False
        keys = (head[1], tail[1], tail[3])
        if keys not in self._checked:
            if [self._ref(machine, key) for key in keys] != ["relative_path", "offset", "length"]:
                return False
            self._checked.add(keys)
        (offset,), (nbytes,) = self._numbers(tail[2]), self._numbers(tail[4])
        if offset < 0 or nbytes < 0:
            return False
        return _accept(machine, self._make_place(name, offset, nbytes), memo, tail.end())


def _accept(machine: Machine, value: object, memo: Sequence[object], end: int) -> bool:
    machine.stack[-1] = value
    machine.memo += memo
    machine.pos = end
    return True


def _decode_ints(run: bytes) -> list[int]:
    numbers, pos = [], 0
    while pos < len(run):
        op = run[pos]
        start = pos + (2 if op == 0x8A else 1)
        pos = start + (run[pos + 1] if op == 0x8A else {0x4B: 1, 0x4D: 2, 0x4A: 4}[op])
        numbers.append(int.from_bytes(run[start:pos], "little", signed=op in (0x4A, 0x8A)))
    return numbers
