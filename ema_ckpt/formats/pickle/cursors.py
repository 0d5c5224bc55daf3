"""Positions in a pickle that move side by side over the same opcodes: arrays instead of a loop.

A million instances that one program pickled differ in names and numbers alone. Each step reads one
opcode at every position; positions at which something else stands are no longer `good`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]
    Flags = NDArray[np.bool_]
    Words = NDArray[np.uint64]

_WORD = 8  # bytes that are looked at together
_MAX_DIMENSIONS = 16
_OPCODE = np.uint64(0xFF)
_OPCODE_BITS = np.uint64(8)
_LONG1_BITS = np.uint64(16)
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(_WORD)], np.uint64)
_TOPS = np.array([0, *((1 << 8 * n) >> 1 for n in range(1, _WORD))], np.uint64)
_BININT1, _BININT2, _BININT, _LONG1 = 0x4B, 0x4D, 0x4A, 0x8A
_NONE, _TRUE, _FALSE, _MARK, _TUPLE, _MEMOIZE = 0x4E, 0x88, 0x89, 0x28, 0x74, 0x94
_EMPTY_TUPLE = 0x29
_CALLED = b"\x85\x94R\x94"  # TUPLE1 MEMOIZE REDUCE MEMOIZE
_BINGET, _LONG_BINGET, _SHORT_TEXT = 0x68, 0x6A, 0x8C
_NO_INT = 255
_INT_NBYTES = np.full(256, _NO_INT, np.uint8)
_INT_NBYTES[[_BININT1, _BININT2, _BININT]] = 1, 2, 4
_NO_OPCODE = -1
# By the count of numbers; more of them need a mark.
_TUPLE_OF = np.array([_EMPTY_TUPLE, 0x85, 0x86, 0x87, _NO_OPCODE], np.int64)


class Cursors:
    """Positions in a pickle, of which those with the expected opcodes so far are `good`."""

    def __init__(self, data: bytes, positions: Numbers) -> None:
        self.positions = positions
        self.good = np.ones(len(positions), np.bool_)
        self._words = np.frombuffer(data, "<u8", len(data) // _WORD)
        self._end = max(len(data) // _WORD - 2, 0) * _WORD  # a word is never read beyond the data

    def skip_literal(self, text: bytes) -> None:
        """Move over bytes that are the same everywhere."""
        for first in range(0, len(text), _WORD):
            part = text[first : first + _WORD]
            word = self._read()
            if len(part) < _WORD:
                word &= _MASKS[len(part)]
            self.good &= word == np.uint64(int.from_bytes(part, "little"))
            self.positions = self.positions + len(part)

    def read_reference(self) -> Numbers:
        """Read opcodes that fetch from the memo: the numbers that they fetch."""
        numbers, is_reference = self._reference(self._read())
        self.good &= is_reference
        return numbers

    def read_text(self) -> tuple[Numbers, Numbers, Numbers]:
        """Read a text and its MEMOIZE, or a reference.

        Returns:
            The number in the memo, or -1 of a text; where texts begin, and their bytes.
        """
        word = self._read()
        is_text = (word & _OPCODE) == _SHORT_TEXT
        nbytes = (word >> _OPCODE_BITS & _OPCODE).astype(np.int64)
        starts = self.positions + 2
        ends = starts + nbytes
        position = self.positions
        numbers, is_reference = self._reference(word)
        self.positions = np.where(is_text, ends, position)
        is_memoized = (self._read() & _OPCODE) == _MEMOIZE
        is_within = self._within()
        after = position + np.where((word & _OPCODE) == _BINGET, 2, 5)
        self.positions = np.where(is_text, ends + 1, after)
        self.good &= np.where(is_text, is_memoized & is_within, is_reference)
        return np.where(is_text, -1, numbers), starts, nbytes

    def read_integer(self) -> Numbers:
        """Read an integer that is not negative."""
        numbers, is_integer = self._integer()
        self.good &= is_integer
        return numbers

    def skip_count(self) -> None:
        """Move over an integer or None."""
        is_none = (self._read() & _OPCODE) == _NONE
        position = self.positions
        _, is_integer = self._integer()
        self.positions = np.where(is_none, position + 1, self.positions)
        self.good &= is_none | is_integer

    def skip_boolean(self) -> None:
        """Move over True or False."""
        op = self._read() & _OPCODE
        self.good &= (op == _TRUE) | (op == _FALSE)
        self.positions = self.positions + 1

    def skip_either(self, is_first: Flags, first: bytes, second: bytes) -> None:
        """Move over one of two short texts of one length: the first where that is expected."""
        word = self._read() & _MASKS[len(first)]
        expected = [np.uint64(int.from_bytes(text, "little")) for text in (first, second)]
        self.good &= word == np.where(is_first, *expected)
        self.positions = self.positions + len(first)

    def skip_mark(self) -> Flags:
        """Move over a mark where there is one, and tell where."""
        is_marked: Flags = (self._read() & _OPCODE) == _MARK
        self.positions = self.positions + is_marked
        return is_marked

    def read_size(self) -> tuple[Numbers, Numbers]:
        """Read what follows the class of a `torch.Size`: a tuple of integers, none below zero.

        Returns:
            The numbers, a row for each position and filled up with zeros; and how many there are.
        """
        is_empty = (self._read() & _OPCODE) == _EMPTY_TUPLE
        is_marked = self.skip_mark()
        counts = np.zeros(len(self.positions), np.int64)
        columns: list[Numbers] = []
        is_next = self.good & ~is_empty
        for _ in range(_MAX_DIMENSIONS):
            position = self.positions
            numbers, is_integer = self._integer()
            is_next &= is_integer
            self.positions = np.where(is_next, self.positions, position)
            if not is_next.any():
                break
            counts += is_next
            columns.append(np.where(is_next, numbers, 0))
        closed = np.where(is_marked, _TUPLE, _TUPLE_OF[np.minimum(counts, 4)])
        op = (self._read() & _OPCODE).astype(np.int64)
        self.good &= (op == closed) & (is_empty | (counts > 0))
        self.positions = self.positions + 1
        # Python does not memoize the empty tuple.
        self.good &= is_empty | ((self._read() & _OPCODE) == _MEMOIZE)
        self.positions = self.positions + ~is_empty
        self.skip_literal(_CALLED)
        if not columns:
            return np.zeros((len(counts), 0), np.int64), counts
        return np.stack(columns, axis=1), counts

    def _read(self) -> Words:
        """Return the eight bytes at each position; one too near to the end is no longer good."""
        self.good &= self._within()
        word, bits = self.positions >> 3, (self.positions & 7).astype(np.uint64) << np.uint64(3)
        low: Words = self._words.take(word, mode="clip") >> bits
        high: Words = self._words.take(word + 1, mode="clip") << np.uint64(1)
        both: Words = low | high << (np.uint64(63) - bits)
        return both

    def _within(self) -> Flags:
        return self.positions < self._end

    def _reference(self, word: Words) -> tuple[Numbers, Flags]:
        """Read references, and tell where there are some."""
        op, argument = word & _OPCODE, word >> _OPCODE_BITS
        is_short, is_long = op == _BINGET, op == _LONG_BINGET
        numbers = np.where(is_short, argument & _OPCODE, argument & _MASKS[4])
        self.positions = self.positions + np.where(is_short, 2, 5)
        return numbers.astype(np.int64), is_short | is_long

    def _integer(self) -> tuple[Numbers, Flags]:
        """Read integers, and tell where there are some; positions are moved at these alone."""
        word = self._read()
        op = (word & _OPCODE).astype(np.int64)
        nbytes = _INT_NBYTES[op].astype(np.int64)
        is_long = op == _LONG1
        moved = nbytes + 1
        argument = word >> _OPCODE_BITS
        if is_long.any():
            long_nbytes = (argument & _OPCODE).astype(np.int64)
            nbytes = np.where(is_long, long_nbytes, nbytes)
            moved = np.where(is_long, long_nbytes + 2, moved)
            argument = np.where(is_long, word >> _LONG1_BITS, argument)
        # LONG1 of seven bytes would not fit into the word.
        is_integer = (nbytes > 0) & (nbytes < np.where(is_long, 7, _WORD))
        nbytes = np.where(is_integer, nbytes, 0)
        numbers = argument & _MASKS[nbytes]
        is_signed = is_long | (op == _BININT)
        is_integer &= ~is_signed | (numbers & _TOPS[nbytes] == 0)
        self.positions = np.where(is_integer, self.positions + moved, self.positions)
        return numbers.astype(np.int64), is_integer
