"""Pickles of state dicts as `torch.save` makes them, written opcode by opcode, without torch.

Protocol 2, and no global but those that `torch.load(weights_only=True)` knows
(`_weights_only_unpickler.py`). A tensor is `_rebuild_tensor_v2(storage, start, shape, strides,
requires_grad, hooks)`, or `_v3` with a dtype at the end for types that have no storage class of
their own (`torch/_tensor.py`, `_reduce_ex_internal`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ema_ckpt.core.dtypes import DTYPE_NAMES
from ema_ckpt.formats.pickle.limits import check_expanded_size
from ema_ckpt.formats.pickle.safe_globals import Global
from ema_ckpt.formats.pickle.tensors import TensorRef

_MAX_DEPTH = 200


def dumps(root: object) -> bytes:
    """The pickle of plain values and containers with `TensorRef`s in them.

    Raises:
        TypeError: naming the type that cannot be written so that it loads safely.
    """
    check_expanded_size(root)
    writer = _Writer()
    writer.value(root, 0)
    return bytes(writer.out + b".")


def is_plain(value: object) -> bool:
    """Whether `dumps` can write `value`."""
    try:
        dumps(value)
    except TypeError:
        return False
    return True


class _Writer:
    """Opcodes so far, and the memo: globals and the words that every storage repeats."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self._memo: dict[tuple[str, str], int] = {}

    def value(self, value: Any, depth: int) -> None:
        """Push `value`."""
        write = _WRITERS.get(type(value))
        if write is None:
            raise TypeError(
                f"a value of type {type(value).__name__} cannot be written so that it loads safely"
            )
        if depth > _MAX_DEPTH:
            raise TypeError("a value that contains itself, or nests too deeply, cannot be written")
        write(self, value, depth + 1)

    def none(self, _value: None, _depth: int) -> None:
        self.out += b"N"

    def boolean(self, value: bool, _depth: int) -> None:
        self.out += b"\x88" if value else b"\x89"

    def integer(self, value: int, _depth: int = 0) -> None:
        if 0 <= value < 256:
            self.out += b"K%c" % value
        elif 0 <= value < 65536:
            self.out += struct.pack("<cH", b"M", value)
        elif -(2**31) <= value < 2**31:
            self.out += struct.pack("<ci", b"J", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > 255:
                raise TypeError(
                    "a whole number of more than 255 bytes cannot be written so that it loads safely"
                )
            self.out += b"\x8a%c" % len(data) + data

    def real(self, value: float, _depth: int) -> None:
        self.out += struct.pack(">cd", b"G", value)

    def text(self, value: str, _depth: int = 0) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.out += struct.pack("<cI", b"X", len(data)) + data

    def raw(self, value: bytes, depth: int) -> None:
        # Protocol 2 has no bytes: Python writes them so, as text in Latin-1.
        self._global("_codecs", "encode")
        self.value((value.decode("latin-1"), "latin1"), depth)
        self.out += b"R"

    def raw_array(self, value: bytearray, depth: int) -> None:
        self._global("builtins", "bytearray")
        self.value((bytes(value),), depth)
        self.out += b"R"

    def complex_number(self, value: complex, depth: int) -> None:
        self._global("builtins", "complex")
        self.value((value.real, value.imag), depth)
        self.out += b"R"

    def set_of(self, value: set[object], depth: int) -> None:
        self._global("builtins", "set")
        self.value((list(value),), depth)
        self.out += b"R"

    def tuple_of(self, value: tuple[object, ...], depth: int) -> None:
        if len(value) > 3:
            self.out += b"("
        for item in value:
            self.value(item, depth)
        self.out += (b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) <= 3 else b"t"

    def list_of(self, value: list[object], depth: int) -> None:
        self.out += b"]("
        for item in value:
            self.value(item, depth)
        self.out += b"e"

    def dict_of(self, value: dict[object, object], depth: int) -> None:
        self.out += b"}("
        for key, item in value.items():
            self.value(key, depth)
            self.value(item, depth)
        self.out += b"u"

    def named(self, value: Global, _depth: int) -> None:
        if value.module != "torch" or value.name not in DTYPE_NAMES:
            raise TypeError(
                f"a reference to {value.module}.{value.name} cannot be written so that it loads safely"
            )
        self._global(value.module, value.name)

    def tensor(self, value: TensorRef, _depth: int) -> None:
        typed = value.dtype.storage_class
        self._global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        self.out += b"(("
        self._word("storage")
        self._global(*(("torch", typed) if typed else ("torch.storage", "UntypedStorage")))
        self.text(value.storage.key)
        self._word("cpu")
        self.integer(value.storage.numel)
        self.out += b"tQ"
        self.integer(value.start)
        self.tuple_of(value.shape, 0)
        self.tuple_of(value.strides, 0)
        self.out += b"\x89"
        self._global("collections", "OrderedDict")
        self.out += b")R"
        if not typed:
            self._global("torch", value.dtype.name)
        self.out += b"tR"

    def _global(self, module: str, name: str) -> None:
        self._once((module, name), lambda: self.out.extend(f"c{module}\n{name}\n".encode()))

    def _word(self, word: str) -> None:
        self._once(("", word), lambda: self.text(word))

    def _once(self, key: tuple[str, str], write: Callable[[], None]) -> None:
        index = self._memo.get(key)
        if index is not None:
            self.out += b"h%c" % index
            return
        write()
        self._memo[key] = len(self._memo)
        self.out += b"q%c" % self._memo[key]


_WRITERS: dict[type, Callable[[_Writer, Any, int], None]] = {
    type(None): _Writer.none,
    bool: _Writer.boolean,
    int: _Writer.integer,
    float: _Writer.real,
    str: _Writer.text,
    bytes: _Writer.raw,
    bytearray: _Writer.raw_array,
    complex: _Writer.complex_number,
    set: _Writer.set_of,
    tuple: _Writer.tuple_of,
    list: _Writer.list_of,
    dict: _Writer.dict_of,
    Global: _Writer.named,
    TensorRef: _Writer.tensor,
}
