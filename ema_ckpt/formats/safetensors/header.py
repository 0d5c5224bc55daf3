"""Read the header of a safetensors file, as strictly as the reference library does.

A file is an unsigned 64-bit little-endian header length, a JSON header
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}` with spaces
around it, and a buffer that the tensors cover without hole or overlap
(https://github.com/huggingface/safetensors#format). An entry may have further fields, which mean
nothing here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple, TypeGuard

from ema_ckpt.core.box import are_sizes
from ema_ckpt.core.catalog import Chunk, Diagnostic, Files, Tensor, check_geometry
from ema_ckpt.core.dtypes import DType, by_safetensors, unread
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.text import counted
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.text_kinds import text_in

MAX_HEADER_NBYTES = 100_000_000
LENGTH_NBYTES = 8
_PEEK_NBYTES = 512
METADATA = "__metadata__"
FIELDS = ("dtype", "shape", "data_offsets")
# Bits of a number of the format's types below one byte. torch keeps two of four bits in an element,
# where the header counts the numbers; it has no type of six bits.
_SUB_BYTE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_PAIRS = "float4_e2m1fn_x2"
# torch's HuggingFaceStorageWriter: the offsets at which each chunk of a file begins in its tensor.
_SHARDING = "DCP_SHARDING_INFO"

Ints = tuple[int, ...]


class Shard(NamedTuple):
    """One file's header: tensors in stored order, metadata, the size that the file must have.

    `offsets` are the corners at which tensors begin in the whole ones, as torch's
    HuggingFaceStorageWriter says; None if it says nothing.
    """

    file: str
    nbytes: int
    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str]
    offsets: Mapping[str, Ints] | None


def open_shard(source: Files, file: str, *, lenient: bool = False) -> Shard:
    """Read the header of one file; `lenient` passes over a buffer that is cut short.

    Raises:
        SourceError: `bad-header`, `missing-file`, `truncated-file`, `unsupported`.
    """
    size = source.size(file)
    header, start = _read_header(source, file, size)
    metadata = _metadata(header.pop(METADATA, None), file)
    tensors = tuple(_tensor(name, value, start, file) for name, value in header.items())
    spans = {name: value["data_offsets"] for name, value in header.items()}
    end = start + _end_of_buffer(spans, file)
    if size < end and not lenient:
        message = f"{file}: expected {end} bytes, found {size}: the file is truncated"
        raise SourceError("truncated-file", message, file=file)
    if size > end:
        extra = counted(size - end, "byte")
        raise _bad_header(file, f"{extra} too many: the last tensor ends at {end}")
    offsets = _saved_offsets(metadata.pop(_SHARDING, None), tensors, file)
    if offsets is not None:
        metadata.pop("DCP_VERSION", None)
    return Shard(file, end, tensors, metadata, offsets)


def _bad_header(file: str, problem: str, tensor: str | None = None) -> SourceError:
    return SourceError("bad-header", f"{file}: {problem}", tensor=tensor, file=file)


def _read_header(source: Files, file: str, size: int) -> tuple[dict[str, Any], int]:
    """Parse the header; return it and the byte at which the buffer begins."""
    if size < LENGTH_NBYTES:
        message = f"{file}: {counted(size, 'byte')}, too few for a safetensors file"
        raise SourceError("truncated-file", message, file=file)
    first = source.read(file, 0, LENGTH_NBYTES)
    (nbytes,) = struct.unpack("<Q", first)
    if nbytes > MAX_HEADER_NBYTES:
        text = text_in(source.read(file, 0, min(size, _PEEK_NBYTES)))
        if text is not None:
            raise _bad_header(file, f"not safetensors: {text}")
        limit = f"above the limit of {MAX_HEADER_NBYTES}"
        raise _bad_header(file, f"not safetensors: its header of {nbytes} bytes is {limit}")
    raw = source.read(file, LENGTH_NBYTES, nbytes)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad_header(file, f"the header is not UTF-8: {error}") from None
    header = sidecar.load_json(text, file)
    if not isinstance(header, dict):
        raise _bad_header(file, "the header is no map from names to tensors")
    return header, LENGTH_NBYTES + nbytes


def _metadata(value: object, file: str) -> dict[str, str]:
    if value is None:
        return {}
    if not is_text_map(value):
        raise _bad_header(file, "__metadata__ is not a map from text to text")
    if not all(map(sidecar.is_unicode, chain.from_iterable(value.items()))):
        raise _bad_header(file, "__metadata__ is not valid Unicode")
    return value


def is_text_map(value: object) -> TypeGuard[dict[str, str]]:
    """Whether a JSON value is a map from text to text."""
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _saved_offsets(
    text: str | None, tensors: Iterable[Tensor], file: str
) -> dict[str, Ints] | None:
    """Read `{name: {"saved_offsets": [...]}}`, which must have an entry for every tensor."""
    if text is None:
        return None
    recorded = sidecar.load_json(text, f"{file}: {_SHARDING}")
    offsets: dict[str, Ints] = {}
    for tensor in tensors:
        entry = recorded.get(tensor.name) if isinstance(recorded, dict) else None
        corner = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if not _are_sizes(corner) or len(corner) != len(tensor.shape):
            problem = f"{_SHARDING} does not say where tensor {tensor.name!r} begins"
            raise _bad_header(file, problem, tensor.name)
        offsets[tensor.name] = tuple(corner)
    return offsets


def _tensor(name: str, value: Any, start: int, file: str) -> Tensor:
    if not isinstance(value, dict) or not value.keys() >= set(FIELDS):
        problem = f"tensor {name!r} lacks one of dtype, shape and data_offsets"
        raise _bad_header(file, problem, name)
    if not sidecar.is_unicode(name):
        raise _bad_header(file, f"the tensor name {name!r} is not valid Unicode", name)
    code, shape, span = value["dtype"], value["shape"], value["data_offsets"]
    dtype = _dtype(name, code, file)
    if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
        problem = f"tensor {name!r} has shape {shape!r} and data_offsets {span!r}"
        raise _bad_header(file, problem, name)
    fitting = _shape_in_torch(shape, dtype) if dtype else None
    if dtype is None or fitting is None:
        return _unread(name, code, tuple(shape), span, file)
    shape = fitting
    check_geometry(name, tuple(shape), dtype, file)
    begin, end = span
    nbytes = prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        problem = f"{dtype.name} {shape} takes {nbytes} bytes, its offsets span {end - begin}"
        raise _bad_header(file, f"tensor {name!r}: {problem}", name)
    chunk = Chunk((0,) * len(shape), tuple(shape), file, start + begin, nbytes)
    return Tensor(name, (name,), tuple(shape), dtype, (chunk,))


def _dtype(name: str, code: object, file: str) -> DType | None:
    """Return the type of a code; None if torch has none for it."""
    dtype = by_safetensors(code) if isinstance(code, str) else None
    if dtype is None and not (isinstance(code, str) and code in _SUB_BYTE):
        raise _bad_header(file, f"tensor {name!r} has the unknown dtype {code!r}", name)
    return dtype


def _unread(name: str, code: str, shape: Ints, span: Sequence[int], file: str) -> Tensor:
    """List a tensor of a type that torch lacks, so that only a verb that needs it refuses."""
    check_geometry(name, shape, unread(code.lower()), file)
    nbits, nbytes = prod(shape) * _SUB_BYTE[code], span[1] - span[0]
    if nbits != 8 * nbytes:
        problem = f"{code} {list(shape)} takes {nbits} bits, its offsets span {nbytes} bytes"
        raise _bad_header(file, f"tensor {name!r}: {problem}", name)
    reason = f"{file}: torch has no type for {code} of shape {list(shape)}"
    refusal = Diagnostic("unsupported", f"{reason}; leave it out with --exclude")
    chunk = Chunk((0,) * len(shape), shape, file, 0, 0)
    return Tensor(name, (name,), shape, unread(code.lower()), (chunk,), refusal=refusal)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and are_sizes(value, 2**63)


def _shape_in_torch(shape: list[int], dtype: DType) -> list[int] | None:
    if dtype.name != _PAIRS:
        return shape
    return [*shape[:-1], shape[-1] // 2] if shape and shape[-1] % 2 == 0 else None


def stored_shape(shape: Ints, dtype: DType) -> list[int]:
    """Return the shape that a header gives a tensor of torch."""
    if dtype.name == _PAIRS:
        return [*shape[:-1], shape[-1] * 2]
    return list(shape)


def _end_of_buffer(spans: Mapping[str, list[int]], file: str) -> int:
    """Check that the tensors cover the buffer without hole or overlap; return its size."""
    reached = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != reached:
            overlaps = begin < reached
            problem = "overlaps the one before it" if overlaps else "leaves a hole before it"
            where = f"begins at {begin}, expected {reached}"
            raise _bad_header(file, f"tensor {name!r} {problem}: it {where}", name)
        reached = end
    return reached
