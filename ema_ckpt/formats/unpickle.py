"""A pickle reader that cannot run anything: an opcode interpreter over a closed set of constructors.

Python's own unpickler imports and calls what the data names; a memo opcode of nine bytes makes its C form
take gigabytes. Here no global is ever imported. A caller lists the globals it knows with the function that
stands in for each; every other global is a name. Calling an unlisted one is refused, making an instance of
one gives an `Opaque` placeholder. Opcodes: https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import NoReturn

from ema_ckpt.errors import EmaCkptError, SourceError, UnsafeError
from ema_ckpt.formats.globals import Global, Maker, Opaque, Standin, is_executor

__all__ = ["UNBUILT", "Machine", "loads"]

Allowed = Mapping[tuple[str, str], Maker]


class _Mark:
    """Marks a place on the stack."""


_MARK = _Mark()
UNBUILT = _Mark()
_EMPTY: tuple[object, ...] = ()


class Machine:
    """The state of one interpretation: data, position, stack, memo.

    `memo` is a list: real pickles number their entries in order. Entries far ahead go to `sparse`, so that
    a huge index costs nothing. `UNBUILT` in `memo` is an entry that a shortcut did not build.
    """

    def __init__(
        self,
        data: bytes,
        allowed: Allowed,
        persistent: Callable[[object], object] | None,
        strict: bool,
        prepare: Callable[[Global], None] | None = None,
    ) -> None:
        self.data = data
        self.pos = 0
        self.stack: list[object] = []
        self.memo: list[object] = []
        self.sparse: dict[int, object] = {}
        self.allowed = allowed
        self.persistent = persistent
        self.strict = strict
        self.prepare = prepare
        self.globals: dict[tuple[str, str], Global] = {}

    def run(self) -> object:
        """Interpret up to STOP and return the value."""
        data, table = self.data, _TABLE
        while True:
            op = data[self.pos]
            self.pos += 1
            if op == 0x2E:  # STOP
                return self.stack.pop()
            table[op](self)

    def take(self, nbytes: int) -> bytes:
        """The next `nbytes` bytes of the stream."""
        end = self.pos + nbytes
        if nbytes < 0 or end > len(self.data):
            raise ValueError("the pickle ends inside an opcode")
        part = self.data[self.pos : end]
        self.pos = end
        return part

    def line(self, encoding: str = "utf-8") -> str:
        """The next line of a text opcode."""
        end = self.data.index(b"\n", self.pos)
        part = self.data[self.pos : end]
        self.pos = end + 1
        return part.decode(encoding)

    def popmark(self) -> list[object]:
        """Everything above the topmost mark, which is removed too."""
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a mark is missing")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def put(self, index: int) -> None:
        """Memoize the top of the stack under `index`."""
        top = self.stack[-1]
        if index == len(self.memo):
            self.memo.append(top)
        elif index < len(self.memo):
            if self.prepare is not None:  # shortcuts remember what entries meant
                raise _ShortcutMissedError
            self.memo[index] = top
        else:
            self.sparse[index] = top

    def get(self, index: int) -> None:
        """Push a memoized value; try the shortcut of a global."""
        value = self.memo[index] if index < len(self.memo) else self.sparse[index]
        if value is UNBUILT:
            raise _ShortcutMissedError
        self.stack.append(value)
        if value.__class__ is Global and value.shortcut is not None:
            value.shortcut(self)

    def find(self, module: str, name: str) -> Global:
        """The global of that name, one object for each name."""
        found = self.globals.get((module, name))
        if found is None:
            found = self.globals[module, name] = Global(module, name, self.allowed.get((module, name)))
            if self.prepare is not None:
                self.prepare(found)
        return found

    def call(self, function: object, args: object, calls: bool) -> object:
        """What `REDUCE` (calls) or `NEWOBJ` of a global gives here."""
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise ValueError("something that is no global is called")
        if function.make is not None:
            return function.make(*args)
        if is_executor(function.module, function.name) or (calls and self.strict):
            raise _refused(function)
        return Opaque(function.module, function.name, args, calls)


class _ShortcutMissedError(Exception):
    """A memo entry that a shortcut left out is asked for: interpret again without shortcuts."""


def _refused(found: Global) -> UnsafeError:
    where = f"{found.module}.{found.name}"
    return UnsafeError("unsafe-pickle", f"unpickling would call {where}, which is not on the list of harmless globals")


def _push(make: Callable[[Machine], object]) -> Callable[[Machine], None]:
    def op(machine: Machine) -> None:
        machine.stack.append(make(machine))

    return op


def _number(layout: str) -> Callable[[Machine], int]:
    unpack, nbytes = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def read(machine: Machine) -> int:
        (value,) = unpack(machine.data, machine.pos)
        machine.pos += nbytes
        return value  # type: ignore[no-any-return]

    return read


_U1, _U2, _U4, _I4, _U8, _F8 = (_number(layout) for layout in ("B", "<H", "<I", "<i", "<q", ">d"))


def _text(size: Callable[[Machine], int]) -> Callable[[Machine], object]:
    return lambda machine: machine.take(size(machine)).decode("utf-8", "surrogatepass")


def _raw(size: Callable[[Machine], int], make: Callable[[bytes], object] = bytes) -> Callable[[Machine], object]:
    return lambda machine: make(machine.take(size(machine)))


def _long(size: Callable[[Machine], int]) -> Callable[[Machine], object]:
    return lambda machine: int.from_bytes(machine.take(size(machine)), "little", signed=True)


def _constant(value: object) -> Callable[[Machine], object]:
    return lambda _machine: value


def _tuple(size: int) -> Callable[[Machine], None]:
    def op(machine: Machine) -> None:
        stack = machine.stack
        if len(stack) < size:
            raise ValueError("the stack is too short")
        stack[-size:] = [tuple(stack[-size:])]

    return op


def _memoize(machine: Machine) -> None:
    machine.put(len(machine.memo))


def _frame(machine: Machine) -> None:
    machine.pos += 8


def _proto(machine: Machine) -> None:
    version = _U1(machine)
    if version > 5:
        raise SourceError("unsupported", f"pickle protocol {version} is newer than 5")


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("the name of a global is no text")
    machine.stack.append(machine.find(module, name))


def _global(machine: Machine) -> None:
    machine.stack.append(machine.find(machine.line(), machine.line()))


def _reduce(machine: Machine) -> None:
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.call(function, args, calls=True))


def _newobj(machine: Machine) -> None:
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.call(function, args, calls=False))


def _newobj_ex(machine: Machine) -> None:
    keywords, args, function = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    if keywords:
        raise SourceError("unsupported", "a pickled object is made with keyword arguments")
    machine.stack.append(machine.call(function, args, calls=False))


def _inst(machine: Machine) -> None:
    found = machine.find(machine.line(), machine.line())
    machine.stack.append(machine.call(found, tuple(machine.popmark()), calls=True))


def _obj(machine: Machine) -> None:
    items = machine.popmark()
    machine.stack.append(machine.call(items[0], tuple(items[1:]), calls=True))


def _build(machine: Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    if isinstance(target, Standin):
        target.setstate(state)
    elif not isinstance(target, dict):  # an OrderedDict's attributes (torch's `_metadata`) say nothing we need
        raise ValueError(f"a {type(target).__name__} is given a state")


def _key(key: object) -> object:
    # A tuple of tuples can be small here and take forever to hash: each level may repeat the one below.
    if isinstance(key, tuple) and not all(_is_flat(part) for part in key):
        raise SourceError("unsupported", "a pickled dict or set has a deeply nested tuple as its key")
    return key


def _is_flat(part: object) -> bool:
    return not isinstance(part, tuple) or (len(part) <= 64 and not any(isinstance(inner, tuple) for inner in part))


def _set_pairs(machine: Machine, items: list[object]) -> None:
    target = machine.stack[-1]
    if isinstance(target, dict):
        for at in range(0, len(items), 2):
            target[_key(items[at])] = items[at + 1]
    elif isinstance(target, Opaque):
        target.entries.extend(items)
    else:
        raise ValueError(f"a {type(target).__name__} is given items")


def _setitem(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set_pairs(machine, [key, value])


def _setitems(machine: Machine) -> None:
    _set_pairs(machine, machine.popmark())


def _extend(machine: Machine, items: list[object]) -> None:
    target = machine.stack[-1]
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, set):
        target.update(map(_key, items))
    elif isinstance(target, Opaque):
        target.entries.extend(items)
    else:
        raise ValueError(f"a {type(target).__name__} is given items")


def _append(machine: Machine) -> None:
    _extend(machine, [machine.stack.pop()])


def _appends(machine: Machine) -> None:
    _extend(machine, machine.popmark())


def _dict(machine: Machine) -> None:
    items = machine.popmark()
    machine.stack.append({})
    _set_pairs(machine, items)


def _pop(machine: Machine) -> None:
    machine.stack.pop()


def _pop_mark(machine: Machine) -> None:
    machine.popmark()


def _binpersid(machine: Machine) -> None:
    if machine.persistent is None:
        raise UnsafeError("unsafe-pickle", "the pickle refers to something outside itself (a persistent id)")
    machine.stack.append(machine.persistent(machine.stack.pop()))


def _refuse(machine: Machine) -> NoReturn:
    op = machine.data[machine.pos - 1]
    raise SourceError("unreadable", f"not a pickle: opcode 0x{op:02x} at byte {machine.pos - 1}")


def _extension(_machine: Machine) -> NoReturn:
    raise UnsafeError("unsafe-pickle", "the pickle calls through copyreg's extension registry")


def _int_line(machine: Machine) -> object:
    text = machine.line()
    return {"00": False, "01": True}[text] if text in ("00", "01") else int(text)


def _quoted(machine: Machine) -> object:
    text = machine.line("latin-1")
    if "\\" in text:
        raise SourceError("unsupported", "a text of pickle protocol 0 has escapes")
    return text[1:-1]


_OPCODES: dict[bytes, Callable[[Machine], None]] = {
    b"\x80": _proto,
    b"\x95": _frame,
    b"\x94": _memoize,
    b"q": lambda m: m.put(_U1(m)),
    b"r": lambda m: m.put(_U4(m)),
    b"p": lambda m: m.put(int(m.line())),
    b"h": lambda m: m.get(_U1(m)),
    b"j": lambda m: m.get(_U4(m)),
    b"g": lambda m: m.get(int(m.line())),
    b"K": _push(_U1),
    b"M": _push(_U2),
    b"J": _push(_I4),
    b"G": _push(_F8),
    b"\x8a": _push(_long(_U1)),
    b"\x8b": _push(_long(_I4)),
    b"I": _push(_int_line),
    b"L": _push(lambda m: int(m.line().rstrip("L"))),
    b"F": _push(lambda m: float(m.line())),
    b"\x8c": _push(_text(_U1)),
    b"X": _push(_text(_U4)),
    b"\x8d": _push(_text(_U8)),
    b"C": _push(_raw(_U1)),
    b"B": _push(_raw(_U4)),
    b"\x8e": _push(_raw(_U8)),
    b"\x96": _push(_raw(_U8, bytearray)),
    b"T": _push(_raw(_I4)),
    b"U": _push(_raw(_U1)),
    b"S": _push(_quoted),
    b"V": _push(lambda m: m.line("raw-unicode-escape")),
    b"N": _push(_constant(None)),
    b"\x88": _push(_constant(True)),
    b"\x89": _push(_constant(False)),
    b")": _push(_constant(_EMPTY)),
    b"]": _push(lambda _m: []),
    b"}": _push(lambda _m: {}),
    b"\x8f": _push(lambda _m: set()),
    b"(": _push(_constant(_MARK)),
    b"\x85": _tuple(1),
    b"\x86": _tuple(2),
    b"\x87": _tuple(3),
    b"t": _push(lambda m: tuple(m.popmark())),
    b"l": _push(lambda m: m.popmark()),
    b"d": _dict,
    b"\x91": _push(lambda m: frozenset(map(_key, m.popmark()))),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _newobj,
    b"\x92": _newobj_ex,
    b"i": _inst,
    b"o": _obj,
    b"b": _build,
    b"s": _setitem,
    b"u": _setitems,
    b"a": _append,
    b"e": _appends,
    b"\x90": _appends,
    b"0": _pop,
    b"1": _pop_mark,
    b"2": _push(lambda m: m.stack[-1]),
    b"Q": _binpersid,
    b"\x82": _extension,
    b"\x83": _extension,
    b"\x84": _extension,
}
_TABLE = [_OPCODES.get(bytes([op]), _refuse) for op in range(256)]


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
        allowed: (module, name) of every global that may be called, and what to call in its place.
        where: file and record, for messages.
        persistent: gives the value for a persistent id (torch's storages).
        strict: whether a call of any unlisted global is refused. If not, only known executors are, and the
            rest become `Opaque`.
        prepare: is shown each `Global` when it is first named, and may give it a `shortcut` that reads a
            whole instance at once.

    Raises:
        UnsafeError: `unsafe-pickle` naming the global.
        SourceError: `unreadable` if it is no whole pickle, `unsupported` for forms nobody writes.
    """
    try:
        try:
            return Machine(data, allowed, persistent, strict, prepare).run()
        except _ShortcutMissedError:
            return Machine(data, allowed, persistent, strict).run()
    except EmaCkptError as error:
        raise type(error)(error.code, f"{where}: {error}", file=where) from None
    except RecursionError:
        raise SourceError("unreadable", f"{where}: the pickle is nested too deeply", file=where) from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error, OverflowError) as error:
        raise SourceError("unreadable", f"{where}: damaged pickle ({error})", file=where) from None
