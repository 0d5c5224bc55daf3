"""Pickles written opcode by opcode, without torch and without Python's pickler.

Protocol 2 is for state dicts: no global but those that `torch.load(weights_only=True)` knows
(`_weights_only_unpickler.py`). Protocol 4 is for the metadata of `torch.distributed.checkpoint`,
with the opcodes of Python's own pickler, so that readers tuned for these are as fast on ours.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, NamedTuple, NoReturn

from ema_ckpt.core.dtypes import DTYPE_NAMES
from ema_ckpt.formats.pickle.byte_values import LocatedByteArray, LocatedBytes
from ema_ckpt.formats.pickle.limits import check_expanded_size
from ema_ckpt.formats.pickle.safe_globals import Global
from ema_ckpt.formats.pickle.tensors import TensorRef
from ema_ckpt.formats.pickle.typed_values import Device, Layout, PathText, Size

_MAX_DEPTH = 200
_U2, _U4, _I4 = (struct.Struct(layout) for layout in ("<cH", "<cI", "<ci"))
_LAYOUT = ("torch.serialization", "_get_layout")
_SHORT_TUPLES = (b")", b"\x85", b"\x86", b"\x87")


class Call(NamedTuple):
    """The result of a call: `module.name(*args)`; a shared one is written once in protocol 4."""

    module: str
    name: str
    args: tuple[object, ...]
    is_shared: bool = False


class Instance(NamedTuple):
    """An instance of `module.name`, made without arguments and given `state` unless it is None."""

    module: str
    name: str
    state: object = None


class Pairs(NamedTuple):
    """A dict whose items are produced while they are written."""

    items: Callable[[], Iterable[tuple[object, object]]]


class Listed(NamedTuple):
    """A list whose items are produced while they are written."""

    items: Callable[[], Iterable[object]]


class Encoded(NamedTuple):
    """Opcodes of one object, and how many objects they memoize."""

    data: bytes
    memoized: int


def dumps(root: object) -> bytes:
    """Write the protocol 2 pickle of plain values and containers, with `TensorRef`s in them.

    Raises:
        TypeError: naming the type that cannot be written so that it loads safely.
    """
    check_expanded_size(root)
    writer = PickleWriter(2)
    writer.write(root)
    return bytes(writer.finish())


def encode_int(value: int) -> bytes:
    """Return the opcode of an integer. Raises TypeError above 255 bytes."""
    if 0 <= value < 256:
        return b"K%c" % value
    if 0 <= value < 65536:
        return _U2.pack(b"M", value)
    if -(2**31) <= value < 2**31:
        return _I4.pack(b"J", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) > 255:
        raise TypeError("an integer of more than 255 bytes cannot be written")
    return b"\x8a%c" % len(data) + data


def is_plain(value: object) -> bool:
    """Whether `dumps` can write `value`."""
    try:
        dumps(value)
    except TypeError:
        return False
    return True


class PickleWriter:
    """Opcodes so far that nobody took, in `out`, and the memo.

    Protocol 4 memoizes every object and refers to strings and globals that were written before;
    protocol 2 only to globals and to the words that every storage repeats.
    """

    def __init__(self, protocol: Literal[2, 4]) -> None:
        self.out = bytearray((0x80, protocol))
        self._memoizes_all = protocol == 4
        self._memo: dict[object, int] = {}
        self._count = 0

    def write(self, value: Any, depth: int = 0) -> None:
        """Push `value`. Raises TypeError as `dumps`."""
        _WRITERS[value.__class__](self, value, depth + 1)

    def finish(self) -> bytearray:
        """Return the pickle, which may be large: no copy of it."""
        self.out += b"."
        return self.out

    def pieces(self, root: Instance, nbytes: int) -> Iterator[bytearray]:
        """Yield the pickle of `root` in pieces of about `nbytes`, which are not kept.

        Raises:
            TypeError: as `dumps`.
        """
        for _ in self._instance_steps(root, 1):
            if len(self.out) >= nbytes:
                piece, self.out = self.out, bytearray()
                yield piece
        yield self.finish()

    def _int(self, value: int, _depth: int = 0) -> None:
        self.out += encode_int(value)

    def _str(self, text: str, _depth: int = 0, *, repeats: bool = False) -> None:
        memoized = repeats or self._memoizes_all
        if memoized and self._recall(text):
            return
        data = text.encode("utf-8", "surrogatepass")
        if self._memoizes_all and len(data) < 256:
            self.out += b"\x8c%c" % len(data)
        else:
            self.out += _U4.pack(b"X", len(data))
        self.out += data
        if memoized:
            self._memoize(text)

    def _bytes(self, value: bytes, depth: int) -> None:
        # Protocol 2 has no bytes: Python writes them so, as text in Latin-1.
        self._call(Call("_codecs", "encode", (value.decode("latin-1"), "latin1")), depth)

    def _items(self, items: Collection[object], depth: int) -> None:
        if depth > _MAX_DEPTH and items:
            raise _too_deep()
        for item in items:
            _WRITERS[item.__class__](self, item, depth + 1)

    def _tuple(self, value: tuple[object, ...], depth: int) -> None:
        if len(value) > 3:
            self.out += b"("
        self._items(value, depth)
        self.out += b"t" if len(value) > 3 else _SHORT_TUPLES[len(value)]
        if value:
            self._memoize()

    def _list(self, value: list[object], depth: int) -> None:
        self.out += b"]"
        self._memoize()
        self.out += b"("
        self._items(value, depth)
        self.out += b"e"

    def _listed(self, value: Listed, depth: int) -> None:
        self.out += b"]"
        self._memoize()
        self.out += b"("
        for item in value.items():
            _WRITERS[item.__class__](self, item, depth + 1)
        self.out += b"e"

    def _encoded(self, value: Encoded, _depth: int) -> None:
        self.out += value.data
        self._count += value.memoized

    def _pairs(self, value: dict[object, object] | Pairs, depth: int) -> None:
        _exhaust(self._pair_steps(value, depth))

    def _pair_steps(self, value: dict[object, object] | Pairs, depth: int) -> Iterator[None]:
        """Write a dict, and pause after each item, of the `Pairs` in it too."""
        self.out += b"}"
        self._memoize()
        self.out += b"("
        if depth > _MAX_DEPTH and value:
            raise _too_deep()
        for key, item in value.items():
            _WRITERS[key.__class__](self, key, depth + 1)
            if item.__class__ is Pairs:
                yield from self._pair_steps(item, depth + 1)
            else:
                _WRITERS[item.__class__](self, item, depth + 1)
            yield
        self.out += b"u"

    def _call(self, call: Call, depth: int) -> None:
        if call.is_shared and self._recall(call):
            return
        self._global(call.module, call.name)
        self.write(call.args, depth)
        self.out += b"R"
        self._memoize(call if call.is_shared else None)

    def _instance(self, instance: Instance, depth: int) -> None:
        _exhaust(self._instance_steps(instance, depth))

    def _instance_steps(self, instance: Instance, depth: int) -> Iterator[None]:
        """Write an instance, and pause after each field where its state is a dict."""
        self._global(instance.module, instance.name)
        self.out += b")\x81"
        self._memoize()
        if isinstance(instance.state, dict):
            yield from self._pair_steps(instance.state, depth + 1)
        elif instance.state is not None:
            self.write(instance.state, depth)
        if instance.state is not None:
            self.out += b"b"

    def _dtype(self, value: Global, _depth: int) -> None:
        if value.module != "torch" or value.name not in DTYPE_NAMES:
            named = f"{value.module}.{value.name}"
            raise TypeError(f"a reference to {named} cannot be written so that it loads safely")
        self._global(value.module, value.name)

    def _tensor(self, value: TensorRef, _depth: int) -> None:
        # `_rebuild_tensor_v2(storage, start, shape, strides, requires_grad, hooks)`, or `_v3` with
        # a dtype at the end for types that have no storage class of their own
        # (`torch/_tensor.py`, `_reduce_ex_internal`).
        storage_class = value.dtype.storage_class
        self._global("torch._utils", f"_rebuild_tensor_v{2 if storage_class else 3}")
        self.out += b"(("
        self._str("storage", repeats=True)
        if storage_class:
            self._global("torch", storage_class)
        else:
            self._global("torch.storage", "UntypedStorage")
        self._str(value.storage.key)
        self._str("cpu", repeats=True)
        self._int(value.storage.numel)
        self.out += b"tQ"
        self._int(value.start)
        self._tuple(value.shape, 0)
        self._tuple(value.strides, 0)
        self.out += b"\x89"
        self._global("collections", "OrderedDict")
        self.out += b")R"
        if not storage_class:
            self._global("torch", value.dtype.name)
        self.out += b"tR"

    def _global(self, module: str, name: str) -> None:
        if self._recall((module, name)):
            return
        if self._memoizes_all:
            self._str(module)
            self._str(name)
            self.out += b"\x93"
        else:
            self.out += f"c{module}\n{name}\n".encode()
        self._memoize((module, name))

    def reference(self, key: object) -> bytes | None:
        """Return the opcode that refers to a text, or to (module, name) of a global, if written."""
        index = self._memo.get(key)
        if index is None:
            return None
        return b"h%c" % index if index < 256 else _U4.pack(b"j", index)

    def _recall(self, key: object) -> bool:
        """Refer to what was memoized as `key`; False if nothing was."""
        opcode = self.reference(key)
        if opcode is None:
            return False
        self.out += opcode
        return True

    def _memoize(self, key: object = None) -> None:
        """Number the object on top of the stack, and remember it as `key`."""
        if self._memoizes_all:
            self.out += b"\x94"
        elif key is None:
            return
        else:
            self.out += b"q%c" % self._count
        self._memo[key] = self._count
        self._count += 1


def _exhaust(steps: Iterator[None]) -> None:
    """Take all steps of a value that is written at once."""
    deque(steps, maxlen=0)


def _too_deep() -> TypeError:
    return TypeError("a value that contains itself, or nests too deeply, cannot be written")


class _Writers(dict[type, Callable[[PickleWriter, Any, int], None]]):
    def __missing__(self, kind: type) -> NoReturn:
        message = f"a value of type {kind.__name__} cannot be written so that it loads safely"
        raise TypeError(message)


_WRITERS = _Writers(
    {
        type(None): lambda w, _none, _depth: w.out.extend(b"N"),
        bool: lambda w, value, _depth: w.out.extend(b"\x88" if value else b"\x89"),
        int: PickleWriter._int,
        float: lambda w, value, _depth: w.out.extend(struct.pack(">cd", b"G", value)),
        str: PickleWriter._str,
        bytes: PickleWriter._bytes,
        bytearray: lambda w, v, depth: w._call(Call("builtins", "bytearray", (bytes(v),)), depth),
        LocatedBytes: PickleWriter._bytes,
        LocatedByteArray: lambda w, v, d: w._call(Call("builtins", "bytearray", (bytes(v),)), d),
        complex: lambda w, v, depth: w._call(Call("builtins", "complex", (v.real, v.imag)), depth),
        set: lambda w, v, depth: w._call(Call("builtins", "set", (list(v),)), depth),
        Device: lambda w, v, depth: w._call(Call("torch", "device", (str(v),)), depth),
        Layout: lambda w, v, depth: w._call(Call(*_LAYOUT, (str(v),)), depth),
        PathText: PickleWriter._str,
        Size: lambda w, v, depth: w._call(Call("torch", "Size", (tuple(v),)), depth),
        tuple: PickleWriter._tuple,
        list: PickleWriter._list,
        dict: PickleWriter._pairs,
        Pairs: PickleWriter._pairs,
        Listed: PickleWriter._listed,
        Encoded: PickleWriter._encoded,
        Call: PickleWriter._call,
        Instance: PickleWriter._instance,
        Global: PickleWriter._dtype,
        TensorRef: PickleWriter._tensor,
    }
)
