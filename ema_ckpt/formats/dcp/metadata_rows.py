"""Read rows of chunks and of items, by one regular expression for many alike."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from ema_ckpt.formats.dcp.metadata_values import (
    BUILT,
    OPENED,
    SIZED,
    ChunkBox,
    Form,
    ItemKey,
    ItemPlace,
    Values,
    unexpected,
)
from ema_ckpt.formats.pickle.machine import Machine

_ONE = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6})"
REF = rb"(h.|j....)"
INT = rb"(" + _ONE + rb")"
# As many numbers as their tuple's opcode takes: TUPLE1, TUPLE2, TUPLE3, or MARK ... TUPLE.
INTS = rb"(%b\x85|%b{2}\x86|%b{3}\x87|\(%b+t)" % ((_ONE,) * 4)
COUNT = rb"(?:K.|M..|J....|N)"
_SHORT_TEXT = 0x8C
_NAME = rb"(h.|j....|\x8c.[^\x94]*\x94)"  # a text with this byte in it is read alone
_BLOCK = 4096  # instances; their groups are in memory at a time
INSTANCE_COUNT = 2  # memoized objects of an instance: itself and its dict


class RowReader(Protocol):
    """Reads instances that are as an earlier one but for names and numbers, and may read none."""

    def read_tensors(self, form: Form, machine: Machine) -> None:
        """Read tensors that differ from an earlier one in names, dtypes and numbers alone."""
        ...

    def read_chunks(self, form: Form, machine: Machine) -> None:
        """Read chunks that differ from an earlier one in numbers alone."""
        ...

    def read_items(self, form: Form, machine: Machine) -> None:
        """Read indices and places that differ from earlier ones in names and numbers alone."""
        ...


class _Row:
    """Instances alike, one after the other: literal opcodes, and expressions, in turn.

    An expression is one group, or none, as `COUNT`: what it matches is not needed.
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


class BlockReader:
    """Reads rows of one pickle in blocks, by expressions that are compiled for each form."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._rows: dict[tuple[bytes, ...], _Row] = {}

    def read_tensors(self, form: Form, machine: Machine) -> None:
        """Read none: each of them holds chunks, which are read in rows."""

    def read_chunks(self, form: Form, machine: Machine) -> None:
        """Read chunks that differ from an earlier one in numbers alone."""
        ref, key, size, key2, size2 = form
        opened = ref + OPENED + key + size
        row = self._row(opened, INTS, SIZED + key2 + size2, INTS, SIZED + BUILT)
        values, push, memo = self._values, machine.stack.append, machine.memo
        tuples = values.tuples
        numbers = memo.skip()
        for found, end in row.blocks(machine):
            count = memo.count
            for run, run2 in found:
                offsets = tuples.get(run) or values.tuple(run)
                sizes = tuples.get(run2) or values.tuple(run2)
                push(ChunkBox(offsets, sizes))
                memo.items += (offsets, sizes)
                numbers.extend((count + 4, count + 7))
                count += 8
            machine.pos, memo.count = end, count

    def read_items(self, form: Form, machine: Machine) -> None:
        """Read indices and places that differ from earlier ones in names and numbers alone."""
        index_ref, key, key2, key3, size, place_ref, key4, key5, key6 = form
        row = self._row(
            *(index_ref + OPENED + key, _NAME, key2, COUNT, key3 + size, INTS),
            *(SIZED + BUILT + place_ref + OPENED + key4, REF, key5, INT, key6, INT, BUILT),
        )
        values, memo = self._values, machine.memo
        tuples, refs, ints = values.tuples, values.refs, values.ints
        push, built = machine.stack.append, memo.items.append
        number = memo.skip().append
        for found, end in row.blocks(machine):
            count = memo.count
            for name_run, run, file_ref, run2, run3 in found:
                if name_run[0] == _SHORT_TEXT:
                    name: object = values.written(name_run)
                    built(name)
                    number(count + INSTANCE_COUNT)
                    count += 1
                else:
                    name = refs.get(name_run) or values.ref(machine, name_run)
                file = refs.get(file_ref) or values.ref(machine, file_ref)
                if not isinstance(name, str) or file.__class__ is not str:
                    raise unexpected()
                offsets = tuples.get(run) or values.tuple(run)
                offset, nbytes = ints.get(run2), ints.get(run3)
                if offset is None:
                    offset = values.natural(run2)
                if nbytes is None:
                    nbytes = values.natural(run3)
                push(ItemKey(name, offsets))
                push(ItemPlace(file, offset, nbytes))
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
