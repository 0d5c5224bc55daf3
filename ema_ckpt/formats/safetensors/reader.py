"""safetensors: reading one file, or the shards of a Hugging Face index.

A file is an unsigned 64-bit little-endian header length, a JSON header
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}` padded with
spaces, and a buffer that the tensors cover without hole or overlap
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from ema_ckpt.core.catalog import (
    Catalog,
    Chunk,
    Diagnostic,
    Files,
    Nesting,
    Object,
    Payload,
    Tensor,
    check_geometry,
)
from ema_ckpt.core.dtypes import DType, by_safetensors
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.text import counted, shown
from ema_ckpt.formats import sidecar as record
from ema_ckpt.storage.files import safe_name

MAX_HEADER_NBYTES = 100_000_000
LENGTH_NBYTES = 8
METADATA = "__metadata__"
_SHARDING = (
    "DCP_SHARDING_INFO"  # torch's HuggingFaceStorageWriter: where in its tensor each piece begins
)
# Types of the format below one byte; a header that names one is sound, but nothing here reads it.
_SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")


class _Shard(NamedTuple):
    """One file's header: its tensors in stored order, its metadata, the size the file must have."""

    file: str
    nbytes: int
    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SafetensorsReader:
    """Payloads lie bare at the chunk's span; digests are CRCs of just these bytes.

    `crcs` goes by chunk and not by name, as tensors may get other names where several files make
    one checkpoint.
    """

    crcs: Mapping[Chunk, int]

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        """The one payload of a tensor."""
        chunk = tensor.chunks[0]
        return (Payload(chunk.file, chunk.offset, chunk.nbytes, crc=self.crcs.get(chunk)),)

    def load(self, item: Object) -> object:
        """A plain object out of the record that this package left in the file."""
        return item.inline


def open_safetensors(
    source: Files, names: tuple[str, ...], path: str, resolved: str, *, lenient: bool = False
) -> Catalog:
    """Read the headers of one `.safetensors` file, or of all shards of an index.

    Args:
        names: the file, or the `*.index.json` file (anything after it is ignored).
        lenient: turn a missing or short shard into a warning, as `inspect` wants it.

    Raises:
        SourceError: `bad-header`, `index-mismatch`, `missing-file`, `truncated-file`, `checksum`,
            `unsupported`.
        UnsafeError: `unsafe-path`.
    """
    warnings: list[Diagnostic] = []
    is_index = names[0].endswith(".index.json")
    if is_index:
        shards, files = _open_index(source, names[0], lenient, warnings)
    else:
        shards = [_open_shard(source, names[0], lenient, warnings)]
        files = {names[0]: shards[0].nbytes}
    found = _record(source, shards, files)
    if found.version > record.VERSION:
        warnings.append(
            Diagnostic(
                "unchecked", f"{resolved}: digests of version {found.version} are not known here"
            )
        )
    tensors = tuple(tensor for shard in shards for tensor in shard.tensors)
    if len(shards) == len(files) and (is_index or set(found.files) <= set(files)):
        _refuse_lost(found, {tensor.name for tensor in tensors}, resolved)
    if found.digests.keys() >= {tensor.name for tensor in tensors}:
        tensors = _in_recorded_order(tensors, found.digests)
    metadata = {
        key: text for shard in shards for key, text in shard.metadata.items() if key != record.KEY
    }
    ties = dict(found.ties) or _saved_ties(metadata, tensors)
    if found.nesting is not None or found.ties:
        tensors = _restored(tensors, found)
    digests = record.digests_of(found, tensors, resolved)
    return Catalog(
        path=path,
        resolved=resolved,
        format="safetensors",
        tensors=tensors,
        objects=found.objects,
        source=source,
        reader=SafetensorsReader(
            {t.chunks[0]: digests[t.name] for t in tensors if t.name in digests}
        ),
        nested=found.nesting is not None,
        files=files,
        digests=digests,
        warnings=tuple(warnings),
        nesting=found.nesting or Nesting(),
        ties=ties,
        header_text={key: text for key, text in metadata.items() if key not in ties},
    )


def _record(source: Files, shards: list[_Shard], files: Mapping[str, int]) -> record.Record:
    if len(files) == len(shards) == 1 and record.KEY in shards[0].metadata:
        return record.parse(shards[0].metadata[record.KEY], shards[0].file)
    return _sidecar(source, files)


def _in_recorded_order(tensors: Sequence[Tensor], names: Iterable[str]) -> tuple[Tensor, ...]:
    # A file is ordered by element size; averages without names are paired with parameters in the
    # model's order.
    place = {name: index for index, name in enumerate(names)}
    return tuple(sorted(tensors, key=lambda tensor: place[tensor.name]))


def _restored(tensors: Sequence[Tensor], found: record.Record) -> tuple[Tensor, ...]:
    """The tensors at their paths, and again under the names that were dropped because they are
    tied.
    """
    shared = set(found.ties.values())
    placed = {
        tensor.name: replace(
            tensor,
            path=found.paths.get(tensor.name, (tensor.name,)),
            storage=(tensor.name,) if tensor.name in shared else None,
        )
        for tensor in tensors
    }
    again = [
        replace(placed[kept], name=name, path=found.paths.get(name, (name,)))
        for name, kept in found.ties.items()
        if kept in placed and name not in placed
    ]
    return (*placed.values(), *again)


def _refuse_lost(found: record.Record, names: set[str], where: str) -> None:
    lost = sorted(found.digests.keys() - names)
    if lost:
        message = f"{where}: digests are recorded of tensors that are not there: {shown(lost)}"
        raise SourceError("index-mismatch", message, tensor=lost[0])


def _saved_ties(metadata: Mapping[str, str], tensors: Sequence[Tensor]) -> dict[str, str]:
    # safetensors.torch.save_model leaves {dropped name: kept name} among the metadata, where any
    # text may stand: enough, if both end alike, to pass it on and to excuse a name that is missing,
    # and not to list one.
    names = {tensor.name for tensor in tensors}
    return {
        key: text
        for key, text in metadata.items()
        if text in names and key not in names and key.rpartition(".")[2] == text.rpartition(".")[2]
    }


def _sidecar(source: Files, files: Mapping[str, int]) -> record.Record:
    """The record beside the files, if it speaks of one of them."""
    try:
        nbytes = source.size(record.SIDECAR)
    except SourceError as error:
        if error.code == "missing-file":
            return record.Record()
        raise
    found = record.parse(source.read(record.SIDECAR, 0, nbytes), record.SIDECAR)
    return found if files.keys() & set(found.files) else record.Record()


def _open_index(
    source: Files, index: str, lenient: bool, warnings: list[Diagnostic]
) -> tuple[list[_Shard], dict[str, int]]:
    weight_map, total = _read_index(source, index)
    wanted: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        wanted.setdefault(file, set()).add(name)
    shards, files = [], {}
    for file, names in wanted.items():
        files[file] = 0
        try:
            shard = _open_shard(source, file, lenient, warnings, indexed=True)
        except SourceError as error:
            if not lenient or error.code not in ("missing-file", "truncated-file"):
                raise
            warnings.append(
                Diagnostic(error.code, f"{error}; it should hold {shown(sorted(names))}")
            )
            continue
        _refuse_mismatch(index, shard, names)
        files[file] = shard.nbytes
        shards.append(shard)
    stored = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    if total is not None and total != stored and len(shards) == len(wanted):
        # Indices that count tied tensors twice, or bytes of another dtype, are common: no reason to
        # refuse.
        warnings.append(
            Diagnostic(
                "index-mismatch", f"{index}: total_size is {total}, the shards hold {stored} bytes"
            )
        )
    return shards, files


def _read_index(source: Files, index: str) -> tuple[dict[str, str], int | None]:
    document = record.load_json(source.read(index, 0, source.size(index)), index)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise SourceError("bad-header", f"{index}: no weight_map from names to files", file=index)
    for file in set(weight_map.values()):
        safe_name(file)
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, int(total) if isinstance(total, int | float) else None


def _refuse_mismatch(index: str, shard: _Shard, wanted: set[str]) -> None:
    held = {tensor.name for tensor in shard.tensors}
    if held == wanted:
        return
    lacking, extra = sorted(wanted - held), sorted(held - wanted)
    parts = [f"lacks {shown(lacking)}"] if lacking else []
    parts += [f"holds {shown(extra)}, which the index places elsewhere or nowhere"] if extra else []
    message = f"{shard.file} {' and '.join(parts)}, against {index}"
    raise SourceError("index-mismatch", message, tensor=(lacking + extra)[0], file=shard.file)


def _open_shard(
    source: Files, file: str, lenient: bool, warnings: list[Diagnostic], *, indexed: bool = False
) -> _Shard:
    size = source.size(file)
    header, start = _read_header(source, file, size)
    metadata = _metadata(header.pop(METADATA, None), file, indexed=indexed)
    tensors = tuple(_tensor(name, value, start, file) for name, value in header.items())
    expected = start + _buffer_nbytes(tensors, start, file)
    if size < expected:
        message = f"{file}: expected {expected} bytes, found {size}: the file is truncated"
        if not lenient:
            raise SourceError("truncated-file", message, file=file)
        warnings.append(Diagnostic("truncated-file", message))
    if size > expected:
        raise _bad(
            file, f"{counted(size - expected, 'byte')} too many: the last tensor ends at {expected}"
        )
    return _Shard(file, expected, tensors, metadata)


def _bad(file: str, what: str, tensor: str | None = None) -> SourceError:
    return SourceError("bad-header", f"{file}: {what}", tensor=tensor, file=file)


def _read_header(source: Files, file: str, size: int) -> tuple[dict[str, Any], int]:
    """The parsed header and the offset at which the buffer begins."""
    if size < LENGTH_NBYTES:
        message = f"{file}: {counted(size, 'byte')}, too few for a safetensors file"
        raise SourceError("truncated-file", message, file=file)
    first = source.read(file, 0, LENGTH_NBYTES)
    (nbytes,) = struct.unpack("<Q", first)
    if first == b"version ":
        raise _bad(file, "a Git LFS pointer and not the file itself; fetch it with `git lfs pull`")
    if nbytes > MAX_HEADER_NBYTES:
        raise _bad(
            file,
            f"not safetensors: its header of {nbytes} bytes is above the limit of {MAX_HEADER_NBYTES}",
        )
    raw = source.read(file, LENGTH_NBYTES, nbytes)
    if not raw.startswith(b"{"):
        raise _bad(file, "the header does not begin with '{'")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(file, f"the header is not UTF-8: {error}") from None
    return record.load_json(text, file), LENGTH_NBYTES + nbytes


def _metadata(value: object, file: str, *, indexed: bool) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise _bad(file, "__metadata__ is not a map from text to text")
    if not all(record.is_unicode(text) for item in value.items() for text in item):
        raise _bad(file, "__metadata__ is not valid Unicode")
    if _SHARDING in value and not (indexed and _begins_at_zero(value[_SHARDING], file)):
        raise SourceError(
            "unsupported",
            f"{file}: holds only the rows of one rank, as torch's HuggingFaceStorageWriter saves them; "
            "merge the ranks with torch's consolidate_safetensors_files first, or save with the default writer",
            file=file,
        )
    return {key: text for key, text in value.items() if key not in (_SHARDING, "DCP_VERSION")}


def _begins_at_zero(text: str, file: str) -> bool:
    """Whether a file of torch's writer holds the beginning of each tensor: the whole, if an index
    names no other.
    """
    places = record.load_json(text.encode(), file)
    offsets = (
        [p.get("saved_offsets") for p in places.values() if isinstance(p, dict)]
        if isinstance(places, dict)
        else []
    )
    return bool(offsets) and all(isinstance(found, list) and not any(found) for found in offsets)


def _tensor(name: str, value: Any, start: int, file: str) -> Tensor:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad(file, f"tensor {name!r} has not exactly dtype, shape and data_offsets", name)
    if not record.is_unicode(name):
        raise _bad(file, f"the tensor name {name!r} is not valid Unicode", name)
    dtype = _dtype(name, value["dtype"], file)
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _bad(file, f"tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}", name)
    check_geometry(name, tuple(shape), dtype, file)
    begin, end = offsets
    nbytes = prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        what = f"{dtype.name} {shape} takes {nbytes} bytes, its offsets span {end - begin}"
        raise _bad(file, f"tensor {name!r}: {what}", name)
    chunk = Chunk((0,) * len(shape), tuple(shape), file, start + begin, nbytes)
    return Tensor(name, (name,), tuple(shape), dtype, (chunk,))


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**63 for item in value
    )


def _dtype(name: str, code: object, file: str) -> DType:
    found = by_safetensors(code) if isinstance(code, str) else None
    if found is not None:
        return found
    if code in _SUB_BYTE:
        message = f"{file}: tensor {name!r} has the dtype {code}, which ema_ckpt does not read"
        raise SourceError("unsupported", message, tensor=name, file=file)
    raise _bad(file, f"tensor {name!r} has the unknown dtype {code!r}", name)


def _buffer_nbytes(tensors: Sequence[Tensor], start: int, file: str) -> int:
    """Bytes of the buffer, once it is certain that the tensors cover it without hole or overlap."""
    position = start
    for tensor in sorted(tensors, key=lambda t: (t.chunks[0].offset, t.chunks[0].nbytes)):
        chunk = tensor.chunks[0]
        if chunk.offset != position:
            what = (
                "overlaps the one before it"
                if chunk.offset < position
                else "leaves a hole before it"
            )
            where = f"begins at {chunk.offset - start}, expected {position - start}"
            raise _bad(file, f"tensor {tensor.name!r} {what}: it {where}", tensor.name)
        position += chunk.nbytes
    return position - start
