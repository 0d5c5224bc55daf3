"""What each opcode of a pickle does to a `Machine`.
https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from ema_ckpt.core.errors import SourceError, UnsafeError
from ema_ckpt.formats.pickle.safe_globals import Opaque, Replacement

if TYPE_CHECKING:
    from ema_ckpt.formats.pickle.machine import Machine


class Mark:
    """Marks a place on the stack."""


MARK = Mark()
_EMPTY: tuple[object, ...] = ()


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


def _raw(
    size: Callable[[Machine], int], make: Callable[[bytes], object] = bytes
) -> Callable[[Machine], object]:
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
    if isinstance(target, Replacement):
        target.setstate(state)
    elif not isinstance(
        target, dict
    ):  # an OrderedDict's attributes (torch's `_metadata`) say nothing we need
        raise ValueError(f"a {type(target).__name__} is given a state")


def _key(key: object) -> object:
    # A tuple of tuples can be small here and take forever to hash: each level may repeat the one
    # below.
    if isinstance(key, tuple) and not all(_is_flat(part) for part in key):
        raise SourceError(
            "unsupported", "a pickled dict or set has a deeply nested tuple as its key"
        )
    return key


def _is_flat(part: object) -> bool:
    return not isinstance(part, tuple) or (
        len(part) <= 64 and not any(isinstance(inner, tuple) for inner in part)
    )


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
        raise UnsafeError(
            "unsafe-pickle", "the pickle refers to something outside itself (a persistent id)"
        )
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
    b"(": _push(_constant(MARK)),
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
TABLE = [_OPCODES.get(bytes([op]), _refuse) for op in range(256)]
