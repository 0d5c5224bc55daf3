"""Interpret pickles over a closed set of constructors, so that nothing in them can run.

Python's own unpickler imports and calls what the data names; a memo opcode of nine bytes makes its
C form take gigabytes. Here no global is ever imported. A caller lists the globals it knows, each
with the function that replaces it; every other global is only a name. A call of an unlisted one is
rejected, an instance of one becomes an `Opaque` placeholder. Opcodes:
https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from ema_ckpt.core.errors import SourceError, UnsafeError
from ema_ckpt.formats.pickle.byte_values import LocatedByteArray, LocatedBytes, text_or_bytes
from ema_ckpt.formats.pickle.damage import ShortcutMissedError, own_errors, refused_call
from ema_ckpt.formats.pickle.effort import Effort
from ema_ckpt.formats.pickle.keys import repeated_key
from ema_ckpt.formats.pickle.memo import UNBUILT, Memo
from ema_ckpt.formats.pickle.safe_globals import Global, Maker, Opaque, Replacement
from ema_ckpt.formats.pickle.several import MARK, Several, guarded

Allowed = Mapping[tuple[str, str], Maker]
_STOP = ord(".")
_unpack_u4 = struct.Struct("<I").unpack_from


class Machine:
    """The state of one interpretation: data, position, stack, memo."""

    def __init__(
        self,
        data: bytes,
        allowed: Allowed,
        persistent: Callable[[object], object] | None,
        strict: bool,
        prepare: Callable[[Global], None] | None = None,
    ) -> None:
        self.data = data
        self.pos: int = 0
        self.stack: list[object] = []
        self.memo = Memo(len(data))
        self.allowed = allowed
        self.persistent = persistent
        self.strict = strict
        self.prepare = prepare
        self.globals: dict[tuple[str, str], Global] = {}
        self.effort = Effort(len(data))
        self.locates = False  # whether bytes know where they lie
        self.table = _TABLE  # what interprets each opcode

    def run(self) -> object:
        """Interpret up to STOP and return the value.

        The most frequent opcodes are interpreted here, without a call.
        """
        data, constants, pos = self.data, _CONSTANTS, self.pos
        stack, memo, items = self.stack, self.memo, self.memo.items
        while (op := data[pos]) != _STOP:
            pos += 1
            if op == 0x72 and memo.numbers is None:  # LONG_BINPUT
                (number,) = _unpack_u4(data, pos)
                pos += 4
                if number == memo.count:
                    items.append(stack[-1])
                    memo.count += 1
                    continue
                self.put(number)
            elif op == 0x4B:  # BININT1
                stack.append(data[pos])
                pos += 1
            elif op == 0x68 and memo.numbers is None and data[pos] < len(items):  # BINGET
                value = items[data[pos]]
                pos += 1
                stack.append(value)
                if value.__class__ is Global and value.shortcut is not None:
                    self.pos = pos
                    value.shortcut(self)
                    pos = self.pos
            elif op in constants:
                stack.append(constants[op])
            else:
                self.pos = pos
                self.table[op](self)
                pos = self.pos
        self.pos = pos + 1
        return stack.pop()

    def read(self, nbytes: int) -> bytes:
        """Read the next `nbytes` bytes."""
        end = self.pos + nbytes
        if nbytes < 0 or end > len(self.data):
            raise ValueError("the pickle ends inside an opcode")
        part = self.data[self.pos : end]
        self.pos = end
        return part

    def read_line(self, encoding: str = "utf-8") -> str:
        """Read the line that a text opcode takes."""
        end = self.data.index(b"\n", self.pos)
        part = self.data[self.pos : end]
        self.pos = end + 1
        return part.decode(encoding)

    def pop_mark(self) -> list[object]:
        """Pop everything above the topmost mark, and the mark."""
        stack = self.stack
        index = len(stack) - 1
        while stack[index] is not MARK:
            index -= 1
            if index < 0:
                raise ValueError("a mark is missing")
        items = stack[index + 1 :]
        del stack[index:]
        return items

    def put(self, index: int) -> None:
        """Memoize the top of the stack under `index`."""
        top = self.stack[-1]
        if not self.memo.put(index, top):
            if self.prepare is not None:  # shortcuts remember what entries meant
                raise ShortcutMissedError
            self.memo.replace(index, top)

    def get(self, index: int) -> None:
        """Push a memoized object; try the shortcut of a global."""
        value = self.memo.get(index)
        if value is UNBUILT:
            raise ShortcutMissedError
        self.stack.append(value)
        if value.__class__ is Global and value.shortcut is not None:
            value.shortcut(self)

    def replace_top(
        self, value: object, end: int, count: int, kept: Iterable[tuple[int, object]]
    ) -> None:
        """Put `value` in place of a class whose instance ends at `end`, for a shortcut.

        The instance has `count` memoized objects, of which `kept` are built, each with its number
        among them.
        """
        self.memo.skip_to(count, kept)
        self.stack[-1] = value
        self.pos = end

    def push_several(self, *objects: Several) -> None:
        """Push what stands for several objects: from now on no opcode may take one for one."""
        self.stack += objects
        self.table = _GUARDED_TABLE

    def state(self) -> tuple[int, int, object, tuple[int, int]]:
        """Return what `go_back` needs to undo what a shortcut reads from here on."""
        return self.pos, len(self.stack), self.stack[-1], self.memo.state()

    def go_back(self, state: tuple[int, int, object, tuple[int, int]]) -> None:
        """Undo what was read since `state`, which has taken nothing from the stack but its top."""
        self.pos, depth, top, memo = state
        self.stack[depth - 1 :] = [top]
        self.memo.go_back(memo)

    def find_global(self, module: str, name: str) -> Global:
        """Return the one `Global` of that name."""
        named = self.globals.get((module, name))
        if named is None:
            named = Global(module, name, self.allowed.get((module, name)))
            self.globals[module, name] = named
            if self.prepare is not None:
                self.prepare(named)
        return named

    def call(self, function: object, args: object, calls: bool) -> None:
        """Push the result of a call (`calls`: REDUCE and its like), or a new instance (NEWOBJ)."""
        if isinstance(function, Opaque):
            raise refused_call(function.module, function.name)
        if not isinstance(function, Global) or type(args) is not tuple:
            raise ValueError("something that is no global is called")
        if function.make is not None:
            self.effort.check_args(args)
            self.stack.append(function.make(*args))
        elif function.is_executor or (calls and self.strict):
            raise refused_call(function.module, function.name)
        else:
            calls = calls and not function.is_plain_class
            self.stack.append(Opaque(function.module, function.name, args, calls))


Read = Callable[[Machine], object]


def _push(read: Read) -> Callable[[Machine], None]:
    def op(machine: Machine) -> None:
        machine.stack.append(read(machine))

    return op


def _number(layout: str) -> Callable[[Machine], int]:
    unpack, nbytes = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def read(machine: Machine) -> int:
        (value,) = unpack(machine.data, machine.pos)
        machine.pos += nbytes
        return value  # type: ignore[no-any-return]

    return read


_U1, _U2, _U4, _I4, _U8, _F8 = (_number(layout) for layout in ("B", "<H", "<I", "<i", "<q", ">d"))


def _text(size: Callable[[Machine], int]) -> Callable[[Machine], None]:
    def op(machine: Machine) -> None:
        text = machine.read(size(machine)).decode("utf-8", "surrogatepass")
        machine.stack.append(text)

    return op


def _bytes(size: Callable[[Machine], int]) -> Callable[[Machine], bytes]:
    def read(machine: Machine) -> bytes:
        nbytes = size(machine)
        if not machine.locates:
            return machine.read(nbytes)
        position, data = machine.pos, LocatedBytes(machine.read(nbytes))
        data.position = position
        return data

    return read


def _old_text(size: Callable[[Machine], int]) -> Read:
    read = _bytes(size)
    return lambda machine: text_or_bytes(read(machine))


def _byte_array(machine: Machine) -> bytearray:
    nbytes = _U8(machine)
    position, data = machine.pos, LocatedByteArray(machine.read(nbytes))
    data.position = position
    return data if machine.locates else bytearray(data)


def _long(size: Callable[[Machine], int]) -> Read:
    return lambda machine: int.from_bytes(machine.read(size(machine)), "little", signed=True)


def _int_line(machine: Machine) -> object:
    text = machine.read_line()
    return {"00": False, "01": True}[text] if text in ("00", "01") else int(text)


def _quoted_line(machine: Machine) -> object:
    text = machine.read_line("latin-1")
    if "\\" in text:
        raise SourceError("unsupported", "a text of pickle protocol 0 has escapes")
    return text[1:-1]


def _tuple(size: int) -> Callable[[Machine], None]:
    def op(machine: Machine) -> None:
        stack = machine.stack
        if len(stack) < size:
            raise ValueError("the stack is too short")
        items = tuple(stack[-size:])
        del stack[-size:]
        stack.append(items)

    return op


def _proto(machine: Machine) -> None:
    version = _U1(machine)
    if version > 5:
        raise SourceError("unsupported", f"pickle protocol {version} is newer than 5")


def _stack_global(machine: Machine) -> object:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("the name of a global is no text")
    return machine.find_global(module, name)


def _call(machine: Machine, calls: bool) -> None:
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.call(function, args, calls)


def _newobj_ex(machine: Machine) -> None:
    keywords, args, function = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    if keywords and isinstance(function, Global) and function.make is not None:
        raise SourceError("unsupported", f"{function!r} is called with arguments by name")
    machine.call(function, (*args, keywords) if type(args) is tuple else args, calls=False)


def _inst(machine: Machine) -> None:
    function = machine.find_global(machine.read_line(), machine.read_line())
    machine.call(function, tuple(machine.pop_mark()), calls=True)


def _obj(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.call(items[0], tuple(items[1:]), calls=True)


def _build(machine: Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    if isinstance(target, Replacement):
        machine.effort.check_state(state)
        target.setstate(state)
    elif not isinstance(target, dict):  # the attributes of an OrderedDict hold nothing needed
        raise ValueError(f"a {type(target).__name__} is given a state")


def _frozenset(machine: Machine) -> frozenset[object]:
    items = machine.pop_mark()
    machine.effort.check_keys(items)
    return frozenset(items)


def _set_items(machine: Machine, items: list[object]) -> None:
    target = machine.stack[-1]
    if isinstance(target, dict):
        keys, values = items[::2], items[1::2]
        machine.effort.check_keys(keys)
        count = len(target) + len(keys)
        target.update(zip(keys, values, strict=True))
        if len(target) < count:
            raise repeated_key(target)
    elif isinstance(target, Opaque):
        target.entries.extend(items)
    else:
        raise ValueError(f"a {type(target).__name__} is given items")


def _set_item(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set_items(machine, [key, value])


def _dict(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.stack.append({})
    _set_items(machine, items)


def _extend(machine: Machine, items: list[object]) -> None:
    target = machine.stack[-1]
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, set):
        machine.effort.check_keys(items)
        target.update(items)
    elif isinstance(target, Opaque):
        target.entries.extend(items)
    else:
        raise ValueError(f"a {type(target).__name__} is given items")


def _persistent_id(machine: Machine) -> object:
    if machine.persistent is None:
        raise UnsafeError("unsafe-pickle", "it refers to something outside of it (persistent id)")
    return machine.persistent(machine.stack.pop())


def _frame(machine: Machine) -> None:
    nbytes = int.from_bytes(machine.read(8), "little")
    if nbytes > len(machine.data) - machine.pos:
        raise IndexError("it ends inside a frame")


def _extension(_machine: Machine) -> NoReturn:
    raise UnsafeError("unsafe-pickle", "the pickle calls through copyreg's extension registry")


def _unknown(machine: Machine) -> NoReturn:
    op = machine.data[machine.pos - 1]
    raise SourceError("unreadable", f"not a pickle: opcode 0x{op:02x} at byte {machine.pos - 1}")


_OPCODES: dict[bytes, Callable[[Machine], object]] = {
    b"\x80": _proto,
    b"\x95": _frame,
    b"\x94": lambda m: m.memo.append(m.stack[-1]),
    b"q": lambda m: m.put(_U1(m)),
    b"r": lambda m: m.put(_U4(m)),
    b"p": lambda m: m.put(int(m.read_line())),
    b"h": lambda m: m.get(_U1(m)),
    b"j": lambda m: m.get(_U4(m)),
    b"g": lambda m: m.get(int(m.read_line())),
    b"K": _push(_U1),
    b"M": _push(_U2),
    b"J": _push(_I4),
    b"G": _push(_F8),
    b"\x8a": _push(_long(_U1)),
    b"\x8b": _push(_long(_I4)),
    b"I": _push(_int_line),
    b"L": _push(lambda m: int(m.read_line().rstrip("L"))),
    b"F": _push(lambda m: float(m.read_line())),
    b"\x8c": _text(_U1),
    b"X": _text(_U4),
    b"\x8d": _text(_U8),
    b"C": _push(_bytes(_U1)),
    b"B": _push(_bytes(_U4)),
    b"\x8e": _push(_bytes(_U8)),
    b"\x96": _push(_byte_array),
    b"T": _push(_old_text(_I4)),
    b"U": _push(_old_text(_U1)),
    b"S": _push(_quoted_line),
    b"V": _push(lambda m: m.read_line("raw-unicode-escape")),
    b"]": lambda m: m.stack.append([]),
    b"}": lambda m: m.stack.append({}),
    b"\x8f": lambda m: m.stack.append(set()),
    b"\x85": _tuple(1),
    b"\x86": _tuple(2),
    b"\x87": _tuple(3),
    b"t": lambda m: m.stack.append(tuple(m.pop_mark())),
    b"l": _push(lambda m: m.pop_mark()),
    b"d": _dict,
    b"\x91": _push(_frozenset),
    b"c": _push(lambda m: m.find_global(m.read_line(), m.read_line())),
    b"\x93": _push(_stack_global),
    b"R": lambda m: _call(m, True),
    b"\x81": lambda m: _call(m, False),
    b"\x92": _newobj_ex,
    b"i": _inst,
    b"o": _obj,
    b"b": _build,
    b"s": _set_item,
    b"u": lambda m: _set_items(m, m.pop_mark()),
    b"a": lambda m: _extend(m, [m.stack.pop()]),
    b"e": lambda m: _extend(m, m.pop_mark()),
    b"\x90": lambda m: _extend(m, m.pop_mark()),
    b"0": lambda m: m.stack.pop(),
    b"1": lambda m: m.pop_mark(),
    b"2": _push(lambda m: m.stack[-1]),
    b"Q": _push(_persistent_id),
    b"\x82": _extension,
    b"\x83": _extension,
    b"\x84": _extension,
}
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False, 0x29: (), 0x28: MARK}
_TABLE = [_OPCODES.get(bytes([op]), _unknown) for op in range(256)]
_GUARDED_TABLE = [guarded(op, interpret) for op, interpret in enumerate(_TABLE)]


def loads(
    data: bytes,
    allowed: Allowed,
    *,
    where: str,
    persistent: Callable[[object], object] | None = None,
    strict: bool = True,
    prepare: Callable[[Global], None] | None = None,
) -> object:
    """Read a pickle without running anything in it.

    Args:
        data: the pickle.
        allowed: (module, name) of every global that may be called, and the function called instead.
        where: file and record, for messages.
        persistent: returns the value of a persistent id (torch's storages).
        strict: reject a call of any unlisted global. If not, reject known executors only; the rest
            become `Opaque`.
        prepare: called with each `Global` when it is first named; may give it a `shortcut` that
            reads a whole instance at once.

    Raises:
        UnsafeError: `unsafe-pickle` naming the global.
        SourceError: `unreadable` if it is no whole pickle, `unsupported` for forms nobody writes.
    """
    with own_errors(data, where):
        try:
            return Machine(data, allowed, persistent, strict, prepare).run()
        except ShortcutMissedError:
            return Machine(data, allowed, persistent, strict).run()


def load_at(
    data: bytes,
    position: int,
    allowed: Allowed,
    *,
    where: str,
    persistent: Callable[[object], object] | None = None,
    prepare: Callable[[Global], None] | None = None,
) -> tuple[object, int]:
    """Read the pickle at `position` as `loads` does, not strictly; return where it ends, too.

    Bytes in it are `LocatedBytes`.
    """
    machine = Machine(data, allowed, persistent, False, prepare)
    machine.pos, machine.locates = position, True
    with own_errors(data, where):
        return machine.run(), machine.pos
