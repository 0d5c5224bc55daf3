"""Read one safetensors file, or the shards of a Hugging Face index.

A file is an unsigned 64-bit little-endian header length, a JSON header
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}` padded with
spaces, and a buffer that the tensors cover without hole or overlap
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any, NamedTuple, TypeGuard

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
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.dtypes import DType, by_safetensors
from ema_ckpt.core.errors import RefusedError, SourceError
from ema_ckpt.core.text import counted, shown
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.sidecar import Sidecar
from ema_ckpt.storage.files import safe_name

MAX_HEADER_NBYTES = 100_000_000
LENGTH_NBYTES = 8
METADATA = "__metadata__"
# torch's HuggingFaceStorageWriter: the offsets at which each chunk of a file begins in its tensor.
_SHARDING = "DCP_SHARDING_INFO"
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
        chunk = tensor.chunks[0]
        return (Payload(chunk.file, chunk.offset, chunk.nbytes, crc=self.crcs.get(chunk)),)

    def load(self, item: Object) -> object:
        return item.inline


def open_safetensors(
    source: Files, names: tuple[str, ...], path: str, resolved: str, *, lenient: bool = False
) -> Catalog:
    """Read the headers of one `.safetensors` file, or of all shards of an index.

    Args:
        names: the file, or the `*.index.json` file (anything after it is ignored).
        lenient: turn a missing or short shard into a warning, as `inspect` does.

    Raises:
        SourceError: `bad-header`, `index-mismatch`, `missing-file`, `truncated-file`, `checksum`,
            `unsupported`.
        UnsafeError: `unsafe-path`.
    """
    warnings: list[Diagnostic] = []
    is_index = names[0].endswith(".json")
    if is_index:
        shards, files = _open_index(source, names[0], lenient, warnings)
    else:
        _refuse_ranks(names, resolved)
        shards = [_open_shard(source, names[0], lenient, warnings)]
        files = {names[0]: shards[0].nbytes}
    content = _read_sidecar(source, shards, files, warnings)
    if is_index and content.describes:
        index = source.read(names[0], 0, source.size(names[0]))
        if content.is_stale(names[0], crc32(index)):
            content = Sidecar()
            warnings.append(sidecar.stale(names[0]))
    if content.version > sidecar.VERSION:
        message = f"{resolved}: digests of version {content.version} are not known here"
        warnings.append(Diagnostic("unchecked", message))
    stored, metadata = _merge(shards)
    is_whole = is_index or files.keys() >= set(content.files)
    if is_whole and len(shards) == len(files):
        _check_none_lost(content, stored, resolved)
    ties = dict(content.ties) or _saved_ties(metadata, stored)
    tensors = _as_recorded(stored, content)
    digests = sidecar.digests_of(content, tensors, resolved)
    crcs = {item.chunks[0]: digests[item.name] for item in tensors if item.name in digests}
    return Catalog(
        path=path,
        resolved=resolved,
        format="safetensors",
        tensors=tuple(tensors),
        objects=content.objects,
        source=source,
        reader=SafetensorsReader(crcs),
        nested=content.nesting is not None,
        files=files,
        digests=digests,
        warnings=tuple(warnings),
        nesting=content.nesting or Nesting(),
        ties=ties,
        order=content.order,
        header_text={key: text for key, text in metadata.items() if key not in ties},
    )


def _refuse_ranks(names: Sequence[str], where: str) -> None:
    if len(names) > 1:
        problem = "several ranks' files, as torch's HuggingFaceStorageWriter saves them"
        remedy = "merge them with torch's consolidate_safetensors_files first"
        raise SourceError("unsupported", f"{where}: {problem}; {remedy}")


def _merge(shards: Iterable[_Shard]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Merge the tensors, by name, and the metadata of all shards."""
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        tensors |= {tensor.name: tensor for tensor in shard.tensors}
        metadata |= shard.metadata
    metadata.pop(sidecar.KEY, None)
    return tensors, metadata


def _read_sidecar(
    source: Files, shards: list[_Shard], files: Mapping[str, int], warnings: list[Diagnostic]
) -> Sidecar:
    """Read the sidecar in the one file, or the one beside the files if it is about one of them."""
    if len(files) == len(shards) == 1 and sidecar.KEY in shards[0].metadata:
        return sidecar.parse(shards[0].metadata[sidecar.KEY], shards[0].file)
    try:
        content = sidecar.read(source)
    except RefusedError as error:
        warnings.append(sidecar.unread(error))
        return Sidecar()
    except SourceError as error:
        if error.code == "missing-file":
            return Sidecar()
        raise
    return content if files.keys() & set(content.files) else Sidecar()


def _check_none_lost(content: Sidecar, names: Mapping[str, Tensor], where: str) -> None:
    lost = sorted(content.digests.keys() - names.keys())
    if lost:
        message = f"{where}: digests are recorded of tensors that are not there: {shown(lost)}"
        raise SourceError("index-mismatch", message, tensor=lost[0])


def _as_recorded(stored: dict[str, Tensor], content: Sidecar) -> list[Tensor]:
    """Restore order and paths, and list tensors again under names that were dropped as tied."""
    if content.digests.keys() >= stored.keys():
        # A file is ordered by element size; averages without names are paired with parameters in
        # the model's order.
        stored = {name: stored[name] for name in content.digests if name in stored}
    if content.nesting is None and not content.ties:
        return list(stored.values())
    shared = set(content.ties.values())
    restored: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        storage = (name,) if name in shared else None
        restored[name] = replace(tensor, path=content.paths.get(name, (name,)), storage=storage)
    for name, kept in content.ties.items():
        if kept in stored and name not in stored:
            path = content.paths.get(name, (name,))
            restored[name] = replace(restored[kept], name=name, path=path)
    ordered = {name: restored[name] for name in content.order if name in restored}
    restored = ordered | restored
    return list(restored.values())


def _saved_ties(metadata: Mapping[str, str], names: Mapping[str, Tensor]) -> dict[str, str]:
    """Find the ties that safetensors.torch.save_model leaves: {dropped name: kept name}.

    Any text may stand there. An entry whose names end alike is enough to pass the tie on and to
    excuse a missing name, and not to list one.
    """
    ties: dict[str, str] = {}
    for key, text in metadata.items():
        end_alike = key.rpartition(".")[2] == text.rpartition(".")[2]
        if end_alike and text in names and key not in names:
            ties[key] = text
    return ties


def _open_index(
    source: Files, index: str, lenient: bool, warnings: list[Diagnostic]
) -> tuple[list[_Shard], dict[str, int]]:
    weight_map, total = _read_index(source, index)
    names_by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        names_by_file.setdefault(file, set()).add(name)
    shards: list[_Shard] = []
    files: dict[str, int] = {}
    for file, names in names_by_file.items():
        files[file] = 0
        try:
            shard = _open_shard(source, file, lenient, warnings, indexed=True)
        except SourceError as error:
            if not lenient or error.code not in ("missing-file", "truncated-file"):
                raise
            message = f"{error}; it should hold {shown(sorted(names))}"
            warnings.append(Diagnostic(error.code, message))
            continue
        _check_names(index, shard, names)
        files[file] = shard.nbytes
        shards.append(shard)
    stored = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    # Indices that count tied tensors twice, or bytes of another dtype, are common: only a warning.
    if total not in (None, stored) and len(shards) == len(files):
        message = f"{index}: total_size is {total}, the shards hold {stored} bytes"
        warnings.append(Diagnostic("index-mismatch", message))
    return shards, files


def _read_index(source: Files, index: str) -> tuple[dict[str, str], int | None]:
    """Read the file of each name, and the total bytes if the index tells them."""
    document = sidecar.load_json(source.read(index, 0, source.size(index)), index)
    if not isinstance(document, dict):
        document = {}
    weight_map = document.get("weight_map")
    if not _is_text_map(weight_map):
        raise SourceError("bad-header", f"{index}: no weight_map from names to files", file=index)
    for file in set(weight_map.values()):
        safe_name(file)
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers count in floats; what no count can be (1e999) is not compared.
    is_count = isinstance(total, int | float) and 0 <= total < 2**63
    return weight_map, int(total) if is_count else None  # type: ignore[arg-type]


def _is_text_map(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _check_names(index: str, shard: _Shard, expected: set[str]) -> None:
    names = {tensor.name for tensor in shard.tensors}
    lacking, extra = sorted(expected - names), sorted(names - expected)
    problems = [f"lacks {shown(lacking)}"] if lacking else []
    if extra:
        problems.append(f"holds {shown(extra)}, which the index places elsewhere or nowhere")
    if problems:
        message = f"{shard.file} {' and '.join(problems)}, against {index}"
        tensor = (lacking + extra)[0]
        raise SourceError("index-mismatch", message, tensor=tensor, file=shard.file)


def _open_shard(
    source: Files, file: str, lenient: bool, warnings: list[Diagnostic], *, indexed: bool = False
) -> _Shard:
    size = source.size(file)
    header, start = _read_header(source, file, size)
    metadata = _metadata(header.pop(METADATA, None), file, indexed=indexed)
    tensors = tuple(_tensor(name, value, start, file) for name, value in header.items())
    end = _end_of_buffer(tensors, start, file)
    if size < end:
        message = f"{file}: expected {end} bytes, found {size}: the file is truncated"
        if not lenient:
            raise SourceError("truncated-file", message, file=file)
        warnings.append(Diagnostic("truncated-file", message))
    if size > end:
        extra = counted(size - end, "byte")
        raise _bad_header(file, f"{extra} too many: the last tensor ends at {end}")
    return _Shard(file, end, tensors, metadata)


def _bad_header(file: str, problem: str, tensor: str | None = None) -> SourceError:
    return SourceError("bad-header", f"{file}: {problem}", tensor=tensor, file=file)


def _read_header(source: Files, file: str, size: int) -> tuple[dict[str, Any], int]:
    """Parse the header; return it and the byte at which the buffer begins."""
    if size < LENGTH_NBYTES:
        message = f"{file}: {counted(size, 'byte')}, too few for a safetensors file"
        raise SourceError("truncated-file", message, file=file)
    first = source.read(file, 0, LENGTH_NBYTES)
    (nbytes,) = struct.unpack("<Q", first)
    if first == b"version ":
        remedy = "fetch it with `git lfs pull`"
        raise _bad_header(file, f"a Git LFS pointer and not the file itself; {remedy}")
    if nbytes > MAX_HEADER_NBYTES:
        limit = f"above the limit of {MAX_HEADER_NBYTES}"
        raise _bad_header(file, f"not safetensors: its header of {nbytes} bytes is {limit}")
    raw = source.read(file, LENGTH_NBYTES, nbytes)
    if not raw.startswith(b"{"):
        raise _bad_header(file, "the header does not begin with '{'")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad_header(file, f"the header is not UTF-8: {error}") from None
    return sidecar.load_json(text, file), LENGTH_NBYTES + nbytes


def _metadata(value: object, file: str, *, indexed: bool) -> dict[str, str]:
    """Check `__metadata__`, and leave out the entries of torch's HuggingFaceStorageWriter."""
    if value is None:
        return {}
    if not _is_text_map(value):
        raise _bad_header(file, "__metadata__ is not a map from text to text")
    if not all(map(sidecar.is_unicode, chain.from_iterable(value.items()))):
        raise _bad_header(file, "__metadata__ is not valid Unicode")
    sharding = value.pop(_SHARDING, None)
    if sharding is not None and not (indexed and _begins_at_zero(sharding, file)):
        problem = "only the rows of one rank, as torch's HuggingFaceStorageWriter saves them"
        remedy = "merge the ranks with torch's consolidate_safetensors_files first"
        message = f"{file}: holds {problem}; {remedy}, or save with the default writer"
        raise SourceError("unsupported", message, file=file)
    value.pop("DCP_VERSION", None)
    return value


def _begins_at_zero(text: str, file: str) -> bool:
    """Whether each tensor begins in this file: it is whole then, if an index names no other."""
    chunks = sidecar.load_json(text.encode(), file)
    if not isinstance(chunks, dict):
        return False
    begin = [item.get("saved_offsets") for item in chunks.values() if isinstance(item, dict)]
    return bool(begin) and all(isinstance(item, list) and not any(item) for item in begin)


def _tensor(name: str, value: Any, start: int, file: str) -> Tensor:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        problem = f"tensor {name!r} has not exactly dtype, shape and data_offsets"
        raise _bad_header(file, problem, name)
    if not sidecar.is_unicode(name):
        raise _bad_header(file, f"the tensor name {name!r} is not valid Unicode", name)
    dtype = _dtype(name, value["dtype"], file)
    shape, span = value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
        problem = f"tensor {name!r} has shape {shape!r} and data_offsets {span!r}"
        raise _bad_header(file, problem, name)
    check_geometry(name, tuple(shape), dtype, file)
    begin, end = span
    nbytes = prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        problem = f"{dtype.name} {shape} takes {nbytes} bytes, its offsets span {end - begin}"
        raise _bad_header(file, f"tensor {name!r}: {problem}", name)
    chunk = Chunk((0,) * len(shape), tuple(shape), file, start + begin, nbytes)
    return Tensor(name, (name,), tuple(shape), dtype, (chunk,))


def _are_sizes(value: object) -> bool:
    if not isinstance(value, list):
        return False
    return all(type(item) is int and 0 <= item < 2**63 for item in value)


def _dtype(name: str, code: object, file: str) -> DType:
    dtype = by_safetensors(code) if isinstance(code, str) else None
    if dtype is not None:
        return dtype
    if code in _SUB_BYTE:
        message = f"{file}: tensor {name!r} has the dtype {code}, which ema_ckpt does not read"
        raise SourceError("unsupported", message, tensor=name, file=file)
    raise _bad_header(file, f"tensor {name!r} has the unknown dtype {code!r}", name)


def _end_of_buffer(tensors: Iterable[Tensor], start: int, file: str) -> int:
    """Check that the tensors cover the buffer without hole or overlap; return its last byte + 1."""
    end = start
    for tensor in sorted(tensors, key=lambda t: (t.chunks[0].offset, t.chunks[0].nbytes)):
        chunk = tensor.chunks[0]
        if chunk.offset != end:
            overlaps = chunk.offset < end
            problem = "overlaps the one before it" if overlaps else "leaves a hole before it"
            where = f"begins at {chunk.offset - start}, expected {end - start}"
            raise _bad_header(file, f"tensor {tensor.name!r} {problem}: it {where}", tensor.name)
        end += chunk.nbytes
    return end
