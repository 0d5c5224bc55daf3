"""Tensors of one value: a file in memory that holds one element, read with strides of 0."""

from __future__ import annotations

import math
import struct
from reprlib import repr as brief  # bounded: an integer may have more digits than Python prints

from ema_ckpt.core.box import whole
from ema_ckpt.core.catalog import Chunk, Files, Ints, Payload, Tensor, check_geometry
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import UsageError

_CODES = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "int8": "<b",
    "uint64": "<Q",
    "uint32": "<I",
    "uint16": "<H",
    "uint8": "<B",
    "bool": "<?",
}
_BFLOAT16_INF = 0x7F80
_PREFIX = "\0constant:"  # no file of a checkpoint can have such a name


def constant_tensor(name: str, shape: Ints, dtype: DType, value: float) -> Tensor:
    """Return a tensor whose elements all are `value`; its chunk lies in a file in memory.

    Raises:
        UsageError: `usage` for a value that the type does not hold.
    """
    check_geometry(name, shape, dtype, "rules")
    data = encode(value, dtype)
    box = whole(shape)
    chunk = Chunk(box.offsets, box.sizes, _PREFIX + data.hex(), 0, len(data))
    return Tensor(name, (name,), shape, dtype, (chunk,))


def encode(value: float, dtype: DType) -> bytes:
    """Return one element as it is stored.

    Raises:
        UsageError: `usage` for a value that the type does not hold.
    """
    try:
        exact = value if dtype.kind == "float" else int(value)
        if exact != value and not math.isnan(value):
            raise ValueError
        if dtype.name == "bool" and exact not in (0, 1):
            raise ValueError
        if dtype.name == "bfloat16":
            (bits,) = struct.unpack("<I", struct.pack("<f", exact))
            half = _rounded_half(bits)
            if half & 0x7FFF == _BFLOAT16_INF and not math.isinf(value):
                raise OverflowError
            return struct.pack("<H", half)
        return struct.pack(_CODES[dtype.name], exact)
    except (KeyError, ValueError, OverflowError, struct.error):
        raise UsageError("usage", f"constant {brief(value)} is no value of {dtype.name}") from None


def _rounded_half(bits: int) -> int:
    """Round the bits of a float32 to its upper half, to nearest, ties to even; NaN stays NaN."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return bits >> 16 | 0x40
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def constant_payload(tensor: Tensor) -> tuple[Payload, ...] | None:
    """Return where the bytes of a constant are, or None for any other tensor."""
    if not tensor.chunks or not tensor.chunks[0].file.startswith(_PREFIX):
        return None
    chunk = tensor.chunks[0]
    return (Payload(chunk.file, 0, chunk.nbytes, (0,) * len(tensor.shape)),)


class FilesWithConstants:
    """The files of a checkpoint, and those in memory that constants are read from.

    Attributes:
        inner: the files of the checkpoint, which may be computed as they are read.
    """

    def __init__(self, inner: Files) -> None:
        self.inner = inner
        self.root = inner.root

    def size(self, name: str) -> int:
        data = _constant(name)
        return self.inner.size(name) if data is None else len(data)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        data = _constant(name)
        if data is None:
            return self.inner.read(name, offset, nbytes)
        return data[offset : offset + nbytes]

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        data = _constant(name)
        if data is None:
            self.inner.read_into(name, offset, buffer)
        else:
            buffer[:] = data[offset : offset + len(buffer)]

    def listing(self) -> list[str]:
        return self.inner.listing()

    def close(self) -> None:
        self.inner.close()


def _constant(name: str) -> bytes | None:
    return bytes.fromhex(name[len(_PREFIX) :]) if name.startswith(_PREFIX) else None
