"""NumPy's numbers and dtypes as they are pickled, read without NumPy: a number as a plain one.

A number is `scalar(dtype, bytes)`; a dtype is `dtype(code, False, True)` with the state
`(3, byte order, ...)` (numpy/_core/src/multiarray/scalartypes.c.src, descriptor.c).
"""

from __future__ import annotations

import struct

from ema_ckpt.core.dtypes import DTYPES, DTYPES_BY_NAME, DType
from ema_ckpt.formats.pickle.safe_globals import Global, Maker, Opaque

_BY_CODE = {dtype.numpy[1:]: dtype for dtype in DTYPES if dtype.numpy}
_FORMATS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?", "i1": "b", "u1": "B"}
_FORMATS |= {f"{sign}{size}": code for sign, codes in (("i", "hiq"), ("u", "HIQ"))
             for size, code in zip((2, 4, 8), codes, strict=True)}  # fmt: skip


class NumpyDType(Opaque):
    """A NumPy dtype: its code (`f4`), or the name of a type of ml_dtypes, and its byte order."""

    __slots__ = ("code", "order")

    def __init__(self, code: object, *_flags: object) -> None:
        super().__init__("numpy", "dtype", (code,), called=False)
        is_foreign = isinstance(code, Global) and code.module.partition(".")[0] == "ml_dtypes"
        self.code = code.name if is_foreign and isinstance(code, Global) else code
        self.order = "<"

    def setstate(self, state: object) -> None:
        """Take the byte order, the second of the state."""
        if isinstance(state, tuple) and len(state) > 1 and isinstance(state[1], str):
            self.order = state[1]

    @property
    def dtype(self) -> DType | None:
        """The type that is meant, or None: structures, text and objects."""
        if not isinstance(self.code, str):
            return None
        return _BY_CODE.get(self.code) or DTYPES_BY_NAME.get(self.code)

    def is_swapped(self) -> bool:
        """Whether its numbers are big-endian and have several bytes."""
        return self.order == ">" and self.dtype is not None and self.dtype.itemsize > 1


def _number(dtype: object, data: object = b"") -> object:
    """Return the same value as a plain number."""
    if isinstance(data, str):  # of Python 2, where the bytes happen to be text
        data = data.encode()
    if not isinstance(dtype, NumpyDType) or not isinstance(data, bytes):
        return Opaque("numpy", "number", (dtype, data), called=False)
    code = _FORMATS.get(dtype.code) if isinstance(dtype.code, str) else None
    if code is None:
        return Opaque("numpy", "number", (dtype, data), called=False)
    (value,) = struct.unpack((">" if dtype.order == ">" else "<") + code, data)
    return value


def under_both_names(module: str, name: str, make: Maker) -> dict[tuple[str, str], Maker]:
    """Table of a global that NumPy 1 and NumPy 2 keep in different modules."""
    return {(f"numpy.{core}.{module}", name): make for core in ("core", "_core")}


NUMBER_GLOBALS: dict[tuple[str, str], Maker] = {
    ("numpy", "dtype"): NumpyDType,
    **under_both_names("multiarray", "scalar", _number),
}
