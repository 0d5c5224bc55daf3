"""NumPy's arrays as they are pickled, read without NumPy: their bytes lie in the pickle.

An array is `_reconstruct(...)` with the state `(1, shape, dtype, is_fortran, data)`, or from
protocol 5 on `_frombuffer(data, dtype, shape, order)` (numpy/_core/src/multiarray/methods.c).
"""

from __future__ import annotations

from math import prod
from reprlib import repr as brief  # bounded: a hostile value may nest without end

from ema_ckpt.core.box import are_sizes, row_major_strides
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.pickle.byte_values import LocatedByteArray, LocatedBytes
from ema_ckpt.formats.pickle.numpy_numbers import NumpyDType, under_both_names
from ema_ckpt.formats.pickle.safe_globals import Global, Maker, Opaque
from ema_ckpt.formats.pickle.tensors import StorageRef, TensorRef

Ints = tuple[int, ...]


class Array(Opaque):
    """An array; `ref` finds its bytes in the pickle once the state is there."""

    __slots__ = ("reason", "ref")

    def __init__(self, *args: object) -> None:
        super().__init__("numpy", "ndarray", (), called=False)
        self.ref: TensorRef | None = None
        self.reason = "it has no data"
        del args

    def setstate(self, state: object) -> None:
        """Find the bytes that `(version, shape, dtype, is_fortran, data)` tells of."""
        match state:
            case (_, tuple() as shape, NumpyDType() as dtype, is_fortran, data):
                self.locate(shape, dtype, bool(is_fortran), data)
            case _:
                raise ValueError("an array has a state of an unknown form")

    def locate(self, shape: Ints, dtype: NumpyDType, is_fortran: bool, data: object) -> None:
        """Refer to `data` as to a storage whose key is its position in the pickle."""
        if not are_sizes(shape):
            raise ValueError("an array has an impossible shape")
        self.args = (dtype.dtype and Global("torch", dtype.dtype.name, None), shape)
        found = dtype.dtype
        if found is None or dtype.is_swapped():
            order = "big-endian " if found else ""
            self.reason = f"it is an array of {order}{brief(dtype.code)}, which is not read"
        elif not isinstance(data, LocatedBytes | LocatedByteArray):
            self.reason = "the pickle has its bytes as text; pickle it again with protocol 4"
        elif len(data) != prod(shape) * found.itemsize:
            raise SourceError("out-of-bounds", f"an array of {list(shape)} has {len(data)} bytes")
        else:
            strides = row_major_strides(shape)
            if is_fortran:
                strides = row_major_strides(shape[::-1])[::-1]
            storage = StorageRef(str(data.position), found, prod(shape))
            self.ref = TensorRef(storage, found, 0, shape, strides)


def _from_buffer(data: object, dtype: object, shape: object, order: object) -> Array:
    array = Array()
    if not isinstance(dtype, NumpyDType) or not isinstance(shape, tuple):
        raise ValueError("an array has a state of an unknown form")
    array.locate(shape, dtype, order == "F", data)
    return array


ARRAY_GLOBALS: dict[tuple[str, str], Maker] = {
    **under_both_names("multiarray", "_reconstruct", Array),
    **under_both_names("numeric", "_frombuffer", _from_buffer),
}
