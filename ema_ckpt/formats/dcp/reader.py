"""Checkpoints of `torch.distributed.checkpoint`: a `.metadata` pickle beside rows of `torch.save`
archives.

`.metadata` names every chunk and the file, offset and length of the archive that holds it
(`filesystem.py`: `_StorageInfo`); only files it names belong to the checkpoint. Strides, and where
the bytes begin, are in the archive itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial

from ema_ckpt.core.catalog import (
    Catalog,
    Chunk,
    Diagnostic,
    Files,
    Object,
    Payload,
    Tensor,
    check_geometry,
)
from ema_ckpt.core.errors import SourceError, UnsafeError, about
from ema_ckpt.core.text import shown
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.dcp.consistency import find_mismatches, unknown_entries
from ema_ckpt.formats.dcp.metadata import ItemPlace, Metadata, TensorEntry, parse
from ema_ckpt.formats.pickle.safe_globals import executor_within
from ema_ckpt.formats.pickle.tensors import TensorRef, load_tensor, load_value
from ema_ckpt.formats.torch_zip.reader import Archive, read_archive
from ema_ckpt.formats.torch_zip.template import ArchiveTemplate, template_of
from ema_ckpt.storage.files import safe_name

METADATA_NAME = ".metadata"
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_MAX_METADATA_NBYTES = 1 << 32
_ONE_READ_NBYTES = 16 << 10
_EMPTY_PLACE = ItemPlace("", 0, 0)


def is_rank_metadata(name: str) -> bool:
    """Whether a file name is the metadata of one rank (written with `use_collectives=False`)."""
    return _RANK_METADATA.fullmatch(name) is not None


def open_dcp(
    source: Files,
    names: tuple[str, ...],
    path: str,
    resolved: str,
    parts: Sequence[Metadata] | None = None,
) -> Catalog:
    """Read the metadata `names` (`.metadata`, or every `__R.metadata`) of the directory `source`.

    `parts` is the content of `names` where it has been parsed before.

    Raises:
        UnsafeError: `unsafe-pickle`, `unsafe-path`.
        SourceError: `unreadable`, `out-of-bounds`.
    """
    parts = parts or read_metadata(source, names)
    metadata = _by_name(parts)
    tensors, objects, required = [], [], dict[str, int]()
    for name, entries in metadata.items():
        first, dotted = entries[0], entries[0].paths.get(name, (name,))
        if first.entries[name] is None:
            place = first.items.get((name, None), _EMPTY_PLACE)
            objects.append(
                Object(name, dotted, _claim(place, required), place.offset, place.nbytes)
            )
        else:
            tensors.append(_tensor(name, dotted, entries, required))
    recorded = _recorded(source, required)
    opaque = {name: kind for part in parts for name, kind in part.opaque.items()}
    warnings = [
        Diagnostic("opaque", f"{name!r} is a {kind}, unknown to ema_ckpt")
        for name, kind in opaque.items()
    ]
    return Catalog(
        path=path,
        resolved=resolved,
        format="dcp",
        tensors=tuple(tensors),
        objects=tuple(objects),
        source=source,
        reader=_Reader(source, _transformed(parts)),
        nested=any(part.paths for part in parts),
        world_size=_world_size(required),
        files=required,
        digests=sidecar.digests_of(recorded, tensors, sidecar.SIDECAR),
        warnings=tuple(warnings),
        order=tuple(metadata),
        unknown_entries=unknown_entries(parts),
        find_mismatches=partial(_find_mismatches, source, names, tuple(recorded.digests)),
    )


def _find_mismatches(
    source: Files, names: Sequence[str], recorded: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Read once more, since only one verb asks: what the metadata says twice and differently."""
    return find_mismatches(read_metadata(source, names), recorded)


def required_files(parts: Iterable[Metadata]) -> dict[str, int]:
    """Every data file that the metadata names, and the least size (bytes) it must have."""
    required: dict[str, int] = {}
    for part in parts:
        for place in part.items.values():
            _claim(place, required)
    return required


def _recorded(source: Files, files: Iterable[str]) -> sidecar.Sidecar:
    """What our own writers left beside `.metadata`, digests above all, if it speaks of one of its
    files.
    """
    try:
        nbytes = source.size(sidecar.SIDECAR)
    except SourceError:
        return sidecar.Sidecar()
    found = sidecar.parse(source.read(sidecar.SIDECAR, 0, nbytes), sidecar.SIDECAR)
    return (
        found
        if not found.files or {METADATA_NAME, *files} & set(found.files)
        else sidecar.Sidecar()
    )


def read_metadata(source: Files, names: Sequence[str]) -> list[Metadata]:
    """Parse each metadata file.

    Raises:
        UnsafeError: `unsafe-pickle`, `unsafe-path`.
        SourceError: `unreadable`, `missing-file`, `missing-metadata`.
    """
    parts = []
    _refuse_missing_ranks(source, names)
    for file in names:
        nbytes = source.size(file)
        if nbytes > _MAX_METADATA_NBYTES:
            raise SourceError("unreadable", f"{file}: {nbytes} bytes is no metadata", file=file)
        parts.append(parse(source.read(file, 0, nbytes), file))
    return parts


def _by_name(parts: Iterable[Metadata]) -> dict[str, list[Metadata]]:
    """For each flat name, the metadata that know it, in the order of the state dict, as far as that
    is told.

    `planner_data` keeps that order. The entries lie by the rank that wrote them, so that replicated
    tensors, which DCP spreads over the ranks, come out shuffled; EMAs that are lists depend on the
    order.
    """
    known: dict[str, list[Metadata]] = {}
    for part in parts:
        for name in part.entries:
            known.setdefault(name, []).append(part)
    told = dict.fromkeys(name for part in parts for name in part.paths if name in known)
    return {name: known[name] for name in {**told, **known}}


def _refuse_missing_ranks(source: Files, names: Sequence[str]) -> None:
    """Where every rank wrote metadata of its own, what one held is known from its file alone."""
    ranks = {int(match[1]) for name in names if (match := _RANK_METADATA.fullmatch(name))}
    if not ranks:
        return
    saved = {
        int(match[1]): name for name in source.listing() if (match := _DATA_FILE.fullmatch(name))
    }
    written = {rank for rank, name in saved.items() if rank > max(ranks) and source.size(name)}
    missing = sorted({*range(max(ranks)), *written} - ranks)
    if missing:
        files = shown([f"__{rank}.metadata" for rank in missing])
        remedy = "copy it, or delete the data files if an earlier save left them"
        message = f"{files}: missing; without it nothing tells what these ranks saved; {remedy}"
        raise SourceError("missing-metadata", message, file=f"__{missing[0]}.metadata")


def _claim(place: ItemPlace, required: dict[str, int]) -> str:
    """Note that a file must reach to the end of an item; its name, checked."""
    file = place.file
    end = place.offset + place.nbytes
    known = required.get(file)
    if known is None:
        if file:
            safe_name(file)
            required[file] = end
    elif end > known:
        required[file] = end
    return file


def _tensor(
    name: str, path: tuple[str | int, ...], entries: list[Metadata], required: dict[str, int]
) -> Tensor:
    first = entries[0].entries[name]
    chunks: list[Chunk] = []
    for part in entries:
        entry = part.entries[name]
        if not isinstance(first, TensorEntry) or not isinstance(entry, TensorEntry):
            raise SourceError(
                "unreadable", f"{METADATA_NAME}: {name!r} is a tensor on one rank only", tensor=name
            )
        if (entry.shape, entry.dtype) != (first.shape, first.dtype):
            raise SourceError(
                "unreadable",
                f"{METADATA_NAME}: ranks disagree on the shape of {name!r}",
                tensor=name,
            )
        for offsets, sizes in entry.chunks:
            place = part.items.get((name, offsets), _EMPTY_PLACE)
            chunks.append(
                Chunk(offsets, sizes, _claim(place, required), place.offset, place.nbytes)
            )
    if not isinstance(first, TensorEntry):
        raise SourceError("unreadable", f"{METADATA_NAME}: {name!r} is no tensor", tensor=name)
    check_geometry(name, first.shape, first.dtype, METADATA_NAME)
    return Tensor(name, path, first.shape, first.dtype, tuple(chunks))


def _transformed(parts: Iterable[Metadata]) -> dict[tuple[str, int], str]:
    """Items that an extension encoded, by file and offset, and the extension's name."""
    return {
        (place.file, place.offset): ", ".join(place.transforms)
        for part in parts
        for place in part.items.values()
        if place.transforms
    }


def _world_size(required: Iterable[str]) -> int | None:
    ranks = [int(match[1]) for file in required if (match := _DATA_FILE.fullmatch(file))]
    return 1 + max(ranks) if ranks else None


class _Reader:
    """Opens the archives behind chunks and objects."""

    def __init__(self, source: Files, transformed: dict[tuple[str, int], str]) -> None:
        self._source = source
        self._transformed = transformed
        self._pickles: dict[bytes, TensorRef] = {}
        self._templates: dict[
            tuple[int, str, tuple[int, ...]], tuple[ArchiveTemplate, Payload]
        ] = {}

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        """The payload of each chunk, from its archive's directory and `data.pkl`."""
        return tuple(self._payload(tensor, chunk) for chunk in tensor.chunks)

    def _payload(self, tensor: Tensor, chunk: Chunk) -> Payload:
        if 0 in chunk.sizes:
            return Payload(chunk.file, chunk.offset, 0)
        return self._cast(tensor, chunk) or self._located(tensor, chunk)

    def _cast(self, tensor: Tensor, chunk: Chunk) -> Payload | None:
        """The payload, if the item equals the template of one of the same shape, its data aside."""
        known = self._templates.get((chunk.nbytes, tensor.dtype.name, chunk.sizes))
        if known is None or (chunk.file, chunk.offset) in self._transformed:
            return None
        template, model = known
        read, file, start = self._source.read, chunk.file, chunk.offset
        if start + chunk.nbytes > self._source.size(file):
            return None
        if chunk.nbytes <= _ONE_READ_NBYTES:
            item = read(file, start, chunk.nbytes)
            head, directory = item[: len(template.head)], item[template.directory_start :]
        else:
            head = read(file, start, len(template.head))
            directory = read(
                file, start + template.directory_start, chunk.nbytes - template.directory_start
            )
        crc = template.crc(directory) if head == template.head else None
        if crc is None:
            return None
        return Payload(
            file, start + len(template.head), model.nbytes, model.strides, model.start, crc
        )

    def _located(self, tensor: Tensor, chunk: Chunk) -> Payload:
        try:
            archive = self._archive(chunk.file, chunk.offset, chunk.nbytes)
            ref = self._ref(archive)
        except SourceError as error:
            raise about(error, tensor=tensor.name, file=chunk.file) from None
        if ref.dtype != tensor.dtype or ref.shape != chunk.sizes:
            found = f"{ref.dtype.name} {list(ref.shape)}"
            message = (
                f"expected {tensor.dtype.name} {list(chunk.sizes)} as .metadata says, found {found}"
            )
            raise SourceError(
                "index-mismatch",
                f"{chunk.file}: tensor {tensor.name!r}: {message}",
                tensor=tensor.name,
                file=chunk.file,
            )
        stored = archive.storage(ref.storage.key, ref.storage.nbytes, tensor.name)
        strides = ref.strides_in_storage()
        payload = Payload(chunk.file, stored.offset, stored.nbytes, strides, ref.start, stored.crc)
        template = template_of(archive, stored.name)
        if template is not None:
            self._templates[chunk.nbytes, tensor.dtype.name, chunk.sizes] = (template, payload)
        return payload

    def load(self, item: Object) -> object:
        """An object item, unpickled safely.

        Raises:
            UnsafeError: `unsafe-pickle` if it calls, or so much as names, what runs code.
        """
        where = f"{item.file}: object {item.name!r}"
        try:
            archive = self._archive(item.file, item.offset, item.nbytes)
            value = load_value(archive.read("data.pkl"), where)
            unsafe = executor_within(value)
            if unsafe is not None:
                raise UnsafeError("unsafe-pickle", f"{where}: {unsafe}")
            return value
        except SourceError as error:
            raise about(error, tensor=item.name, file=item.file, kind="object") from None

    def _archive(self, file: str, offset: int, nbytes: int) -> Archive:
        if not file:
            raise SourceError("incomplete", f"{METADATA_NAME}: no file holds it")
        transform = self._transformed.get((file, offset))
        if transform:
            raise SourceError(
                "unsupported", f"{file}: written through the extension {transform}; save without it"
            )
        size = self._source.size(file)
        if offset + nbytes > size:
            message = f"{file}: expected at least {offset + nbytes} bytes, found {size}: the file is truncated"
            raise SourceError("truncated-file", message)
        magic = self._source.read(file, offset, min(nbytes, 16))
        if magic[:2] != b"PK" and magic[8:9] == b"{":
            raise SourceError(
                "unsupported",
                f"{file}: written with SerializationFormat.SAFETENSORS; save with TORCH_SAVE",
            )
        return read_archive(self._source, file, offset, nbytes)

    def _ref(self, archive: Archive) -> TensorRef:
        data = archive.read("data.pkl")
        ref = self._pickles.get(data)
        if ref is None:
            if "byteorder" in archive.records and archive.read("byteorder") != b"little":
                raise SourceError("unsupported", f"{archive.file}: written on a big-endian machine")
            ref = self._pickles[data] = load_tensor(data, archive.file)
        return ref
