"""Table of element types: torch's name, size, and the name in each format."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ema_ckpt.core.errors import SourceError


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: torch's name without the `torch.` prefix.
        itemsize: bytes an element.
        safetensors: its code in a safetensors header, or None if the format lacks it.
        storage_class: torch's legacy storage class (`FloatStorage`), or None for types that are
            pickled as `UntypedStorage` with a dtype beside it.
        numpy: numpy's dtype string, or None if numpy has no such type.
        kind: `float`, `low` (8 bits and fewer: scaled formats that are never cast), `complex`,
            `int` or `bool`; `unread` for the types of tensors that are listed and not read.
    """

    name: str
    itemsize: int
    safetensors: str | None
    storage_class: str | None
    numpy: str | None
    kind: str

    @property
    def is_floating(self) -> bool:
        """Real floating-point types, the scaled 8-bit ones included."""
        return self.kind in ("float", "low")

    @property
    def is_discrete(self) -> bool:
        """Integers and bools, of which no average is made."""
        return self.kind in ("int", "bool")

    @property
    def part(self) -> DType:
        """Type of the two parts of a complex number; the type itself if it is not complex."""
        return DTYPES_BY_NAME[_COMPLEX_PARTS.get(self.name, self.name)]

    @property
    def is_castable(self) -> bool:
        """Types that `--dtype` may change: float64, float32, float16 and bfloat16."""
        return self.kind == "float"


DTYPES = (
    DType("float64", 8, "F64", "DoubleStorage", "<f8", "float"),
    DType("float32", 4, "F32", "FloatStorage", "<f4", "float"),
    DType("float16", 2, "F16", "HalfStorage", "<f2", "float"),
    DType("bfloat16", 2, "BF16", "BFloat16Storage", None, "float"),
    DType("float8_e4m3fn", 1, "F8_E4M3", None, None, "low"),
    DType("float8_e5m2", 1, "F8_E5M2", None, None, "low"),
    DType("float8_e8m0fnu", 1, "F8_E8M0", None, None, "low"),
    DType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", None, None, "low"),
    DType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", None, None, "low"),
    DType("float4_e2m1fn_x2", 1, "F4", None, None, "low"),
    DType("complex32", 4, None, None, None, "complex"),
    DType("complex64", 8, "C64", "ComplexFloatStorage", "<c8", "complex"),
    DType("complex128", 16, None, "ComplexDoubleStorage", "<c16", "complex"),
    DType("int64", 8, "I64", "LongStorage", "<i8", "int"),
    DType("int32", 4, "I32", "IntStorage", "<i4", "int"),
    DType("int16", 2, "I16", "ShortStorage", "<i2", "int"),
    DType("int8", 1, "I8", "CharStorage", "|i1", "int"),
    DType("uint64", 8, "U64", None, "<u8", "int"),
    DType("uint32", 4, "U32", None, "<u4", "int"),
    DType("uint16", 2, "U16", None, "<u2", "int"),
    DType("uint8", 1, "U8", "ByteStorage", "|u1", "int"),
    DType("bool", 1, "BOOL", "BoolStorage", "|b1", "bool"),
)
# Quantized types, and those of fewer bits.
_FOREIGN = re.compile(r"(q?u?int|b?float|b?complex|bits)\d+(_?\w+)?")
_COMPLEX_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
DTYPES_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
DTYPE_NAMES = frozenset(DTYPES_BY_NAME)
_BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES if dtype.safetensors}
_BY_STORAGE_CLASS = {dtype.storage_class: dtype for dtype in DTYPES if dtype.storage_class}


def by_name(name: str) -> DType:
    """The type torch calls `name` (with or without `torch.`).

    Raises:
        SourceError: `unsupported`, naming the type; `unreadable` for what is no type's name.
    """
    bare = name.removeprefix("torch.")
    if bare in DTYPES_BY_NAME:
        return DTYPES_BY_NAME[bare]
    if is_dtype_name(bare):
        raise SourceError("unsupported", f"dtype {name!r} is not one that ema_ckpt reads")
    raise SourceError("unreadable", f"{name!r} is no dtype")


def is_dtype_name(name: str) -> bool:
    """Whether torch has, or may have, a type of that name."""
    return name in DTYPES_BY_NAME or _FOREIGN.fullmatch(name) is not None


def unread(name: str) -> DType:
    """A type that no reader here understands, by its name; its size is not known, so zero."""
    return DType(name, 0, None, None, None, "unread")


def by_safetensors(code: str) -> DType | None:
    """The type a safetensors header calls `code`, or None."""
    return _BY_SAFETENSORS.get(code)


def by_storage_class(name: str) -> DType | None:
    """The type whose legacy torch storage class is `name`, or None."""
    return _BY_STORAGE_CLASS.get(name)
