"""Read DCP checkpoints: a `.metadata` pickle beside rows of `torch.save` archives.

`.metadata` names every chunk and the file, offset and length of the archive that holds it
(`filesystem.py`: `_StorageInfo`); only files it names belong to the checkpoint. Strides, and where
the bytes begin, are in the archive itself.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ema_ckpt.core.catalog import (
    Catalog,
    Chunk,
    Diagnostic,
    Files,
    ItemKind,
    Nesting,
    Object,
    Path,
    Payload,
    Problem,
    Tensor,
    check_geometry,
    refuse_problems,
)
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import RefusedError, SourceError, UnsafeError, about
from ema_ckpt.core.text import counted, shown
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.dcp.consistency import find_mismatches, path_mismatches, unknown_entries
from ema_ckpt.formats.dcp.items import TensorEntry
from ema_ckpt.formats.dcp.metadata import Metadata, parse
from ema_ckpt.formats.dcp.metadata_values import ItemPlace, differ_by_one_bit
from ema_ckpt.formats.pickle.safe_globals import executor_within
from ema_ckpt.formats.pickle.tensors import TensorRef, load_tensor, load_value
from ema_ckpt.formats.sidecar import Sidecar
from ema_ckpt.formats.torch_zip.reader import Archive, read_archive
from ema_ckpt.formats.torch_zip.template import ArchiveTemplate, template_of
from ema_ckpt.storage.files import safe_name

METADATA_NAME = ".metadata"
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_MAX_METADATA_NBYTES = 1 << 32
_MAX_NAMED_RANKS = 1 << 16  # that are missing, and still named
_ONE_READ_NBYTES = 16 << 10
_EMPTY_PLACE = ItemPlace("", 0, 0)


def open_dcp(
    source: Files,
    names: tuple[str, ...],
    path: str,
    resolved: str,
    parts: Sequence[Metadata] | None = None,
    *,
    lenient: bool = False,
) -> Catalog:
    """Read the metadata `names` (`.metadata`, or every `__R.metadata`) of the directory `source`.

    Args:
        parts: the content of `names` where it has been parsed before.
        lenient: list a damaged record beside them in `Catalog.problems`, and go on.

    Raises:
        UnsafeError: `unsafe-pickle`, `unsafe-path`.
        SourceError: `unreadable`, `out-of-bounds`.
    """
    parts = parts or read_metadata(source, names)
    parts_by_name = _by_name(parts)
    required: dict[str, int] = {}
    tensors: list[Tensor] = []
    objects: list[Object] = []
    for name, listing in parts_by_name.items():
        first = listing[0]
        entry_path = first.paths.get(name, (name,))
        if first.entries[name] is None:
            place = first.items.get((name, None), _EMPTY_PLACE)
            _require(place.file, place.offset + place.nbytes, required)
            objects.append(Object(name, entry_path, place.file, place.offset, place.nbytes))
        else:
            tensors.append(_tensor(name, entry_path, listing, required))
    problems = list(_wrong_paths(parts))
    if not lenient:
        refuse_problems([*problems, *_without_entry(parts)])
    content, warnings = _read_sidecar(source, names, parts, required, problems if lenient else None)
    recorded = tuple(content.digests)
    ranks = _ranks_in(required, _DATA_FILE)
    opaque = {name: kind for part in parts for name, kind in part.opaque.items()}
    warnings += [
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
        reader=_Reader(source, parts, content.chunks),
        nested=any(part.paths for part in parts),
        world_size=1 + max(ranks) if ranks else None,
        files=required,
        item_files=frozenset(required),
        digests=sidecar.digests_of(content, tensors, sidecar.SIDECAR),
        warnings=tuple(warnings),
        nesting=content.nesting or Nesting(),
        order=tuple(parts_by_name),
        unknown_entries=unknown_entries(parts),
        problems=tuple(problems),
        made_by=_digests(parts),
        find_mismatches=_mismatches(source, names, parts, recorded),
    )


def _digests(parts: Iterable[Metadata]) -> str:
    return " ".join(f"{part.crc:08x}" for part in parts)


def _wrong_paths(parts: Iterable[Metadata]) -> Iterator[Problem]:
    """Find entries whose path is the name of another, or differs from theirs by a bit."""
    for part in parts:
        for name, problem in path_mismatches(part):
            yield Problem("index-mismatch", name, METADATA_NAME, f"{METADATA_NAME}: {problem}")
        for name, path in part.paths.items():
            joined = ".".join(map(str, path))
            if joined != name and joined in part.entries:
                problem = f"planner_data places {name!r} at {joined!r}, where another entry is"
                yield Problem("index-mismatch", name, METADATA_NAME, f"{METADATA_NAME}: {problem}")


def _without_entry(parts: Sequence[Metadata]) -> Iterator[Problem]:
    """Find what is stored and no entry tells of: it would be left out without a word."""
    for name, message in find_mismatches(parts, ()):
        yield Problem("index-mismatch", name, METADATA_NAME, message)


def _mismatches(
    source: Files, names: Sequence[str], parts: Sequence[Metadata], recorded: Sequence[str]
) -> Callable[[], Sequence[tuple[str, str]]]:
    """Return the search for mismatches. Metadata that nobody keeps is read once more by then: it
    takes much memory, and only one verb searches.
    """
    references = [weakref.ref(part) for part in parts]

    def find() -> Sequence[tuple[str, str]]:
        kept = [part for reference in references if (part := reference()) is not None]
        if len(kept) < len(references):
            kept = read_metadata(source, names)
        return find_mismatches(kept, recorded)

    return find


def required_files(parts: Iterable[Metadata]) -> dict[str, int]:
    """Map every data file that the metadata names to the least size (bytes) it must have."""
    required: dict[str, int] = {}
    for part in parts:
        for file, end in part.items.ends().items():
            _require(file, end, required)
    return required


def _read_sidecar(
    source: Files,
    names: Sequence[str],
    parts: Sequence[Metadata],
    files: Iterable[str],
    problems: list[Problem] | None,
) -> tuple[Sidecar, list[Diagnostic]]:
    """Read the sidecar if it is about one of the files of this checkpoint, as they are now."""
    try:
        content = sidecar.read(source, problems)
    except RefusedError as error:
        return Sidecar(), [sidecar.unread(error)]
    except SourceError as error:
        if error.code == "missing-file":
            return Sidecar(), []
        raise
    for name, part in zip(names, parts, strict=True):
        if content.is_stale(name, part.crc):
            damaged = list(_damaged_names(content, parts))
            if problems is None:
                refuse_problems(damaged)
            else:
                problems += damaged
            return Sidecar(), [sidecar.stale(name)]
    is_related = not content.files or {METADATA_NAME, *files} & set(content.files)
    return content if is_related else Sidecar(), []


def _damaged_names(content: Sidecar, parts: Sequence[Metadata]) -> Iterator[Problem]:
    """Find the one name that differs by one bit from the one recorded: no other program does it."""
    stored = set[str]()
    for part in parts:
        stored.update(part.entries, part.opaque)
    lost = sorted(content.digests.keys() - stored)
    if len(lost) != 1:
        return
    added = stored - content.digests.keys()
    like = [name for name in added if differ_by_one_bit(name, lost[0])]
    if len(like) == 1:
        names = f"{like[0]!r} is recorded as {lost[0]!r}"
        remedy = f"take the file from its source, or delete {sidecar.SIDECAR} if it is another save"
        message = f"{METADATA_NAME}: {names}: one bit was damaged; {remedy}"
        yield Problem("index-mismatch", like[0], METADATA_NAME, message)


def read_metadata(source: Files, names: Sequence[str]) -> list[Metadata]:
    """Parse each metadata file.

    Raises:
        UnsafeError: `unsafe-pickle`, `unsafe-path`.
        SourceError: `unreadable`, `missing-file`, `missing-metadata`.
    """
    parts = []
    _check_ranks(source, names)
    for file in names:
        nbytes = source.size(file)
        if nbytes > _MAX_METADATA_NBYTES:
            raise SourceError("unreadable", f"{file}: {nbytes} bytes is no metadata", file=file)
        parts.append(parse(source.read(file, 0, nbytes), file))
    return parts


def _by_name(parts: Iterable[Metadata]) -> dict[str, list[Metadata]]:
    """List the metadata that have each flat name, in the order of the state dict if possible.

    `planner_data` keeps that order. The entries lie by the rank that wrote them, so that replicated
    tensors, which DCP spreads over the ranks, come out shuffled; EMAs that are lists depend on the
    order.
    """
    by_name: dict[str, list[Metadata]] = {}
    for part in parts:
        for name in part.entries:
            by_name.setdefault(name, []).append(part)
    ordered = {name: by_name[name] for part in parts for name in part.paths if name in by_name}
    return ordered | by_name


def _check_ranks(source: Files, names: Sequence[str]) -> None:
    """Refuse a checkpoint of per-rank metadata that lacks the file of a rank that saved data."""
    ranks = _ranks_in(names, _RANK_METADATA)
    if not ranks:
        return
    if max(ranks) > 2 * len(names) + _MAX_NAMED_RANKS:
        named = counted(len(names), "file")
        message = f"__{max(ranks)}.metadata: of so many ranks there are only {named} of metadata"
        raise SourceError("missing-metadata", message, file="__0.metadata")
    saved: dict[int, str] = {}
    for name in source.listing():
        match = _DATA_FILE.fullmatch(name)
        if match:
            saved[int(match[1])] = name
    written = {rank for rank, name in saved.items() if rank > max(ranks) and source.size(name)}
    missing = sorted({*range(max(ranks)), *written} - ranks)
    if missing:
        files = shown([f"__{rank}.metadata" for rank in missing])
        remedy = "copy it, or delete the data files if an earlier save left them"
        message = f"{files}: missing; without it nothing tells what these ranks saved; {remedy}"
        raise SourceError("missing-metadata", message, file=f"__{missing[0]}.metadata")


def _ranks_in(names: Iterable[str], pattern: re.Pattern[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := pattern.fullmatch(name))}


def _require(file: str, end: int, required: dict[str, int]) -> None:
    """Record that a file, if there is one, must have so many bytes; check its name."""
    if not file:
        return
    if file not in required:
        safe_name(file)
    required[file] = max(end, required.get(file, 0))


def _tensor(name: str, path: Path, parts: list[Metadata], required: dict[str, int]) -> Tensor:
    first = parts[0].entries[name]
    chunks: list[Chunk] = []
    for part in parts:
        entry = part.entries[name]
        if not isinstance(first, TensorEntry) or not isinstance(entry, TensorEntry):
            raise _unreadable(f"{name!r} is a tensor on one rank only", name)
        if (entry.shape, entry.dtype) != (first.shape, first.dtype):
            raise _unreadable(f"ranks disagree on the shape of {name!r}", name)
        stored = part.items.chunks_of(name, entry)
        for _, _, file, start, nbytes in stored:
            end = start + nbytes
            if file not in required:
                _require(file, end, required)
            elif end > required[file]:
                required[file] = end
        chunks += stored
    if not isinstance(first, TensorEntry):
        raise _unreadable(f"{name!r} is no tensor", name)
    check_geometry(name, first.shape, first.dtype, METADATA_NAME)
    return Tensor(name, path, first.shape, first.dtype, tuple(chunks))


def _unreadable(problem: str, tensor: str) -> SourceError:
    return SourceError("unreadable", f"{METADATA_NAME}: {problem}", tensor=tensor)


class _Reader:
    """Opens the archives behind chunks and objects."""

    def __init__(
        self, source: Files, parts: Iterable[Metadata], crcs: Mapping[tuple[str, int], int]
    ) -> None:
        """`crcs` are those recorded when the checkpoint was written, by file and offset."""
        self._source = source
        self._crcs = crcs
        # The extensions that encoded an item, by its file and offset.
        self._transformed = {
            (place.file, place.offset): ", ".join(place.transforms)
            for part in parts
            for place in part.items.transformed()
        }
        self._pickles: dict[bytes, TensorRef] = {}
        self._templates: dict[ItemKind, tuple[ArchiveTemplate, Payload]] = {}

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        return tuple([self._payload(tensor, chunk) for chunk in tensor.chunks])

    def _payload(self, tensor: Tensor, chunk: Chunk) -> Payload:
        if 0 in chunk.sizes:
            return Payload(chunk.file, chunk.offset, 0)
        kind = ItemKind(chunk.nbytes, tensor.dtype.name, chunk.sizes)
        recognised = self.recognise(kind, chunk.file, chunk.offset)
        return self._parse_archive(tensor, chunk) if recognised is None else recognised

    def recognise(
        self, kind: ItemKind, file: str, offset: int, item: memoryview | None = None
    ) -> Payload | None:
        earlier = self._templates.get(kind)
        if earlier is None or (file, offset) in self._transformed:
            return None
        template, model = earlier
        if item is None:
            if offset + kind.nbytes > self._source.size(file):
                return None
            if kind.nbytes <= _ONE_READ_NBYTES:
                item = memoryview(self._source.read(file, offset, kind.nbytes))
        if item is not None:
            match = template.match(item[: template.start], item[template.stop :])
        else:
            head = self._source.read(file, offset, template.start)
            tail_nbytes = kind.nbytes - template.stop
            match = template.match(
                head, self._source.read(file, offset + template.stop, tail_nbytes)
            )
        if match is None:
            return None
        start = offset + template.start
        payload = Payload(file, start, model.nbytes, model.strides, model.start, match.crc)
        return self._as_recorded(payload, file, offset)

    def refuse_encoded(self, file: str, offset: int) -> None:
        transform = self._transformed.get((file, offset))
        if transform:
            message = f"{file}: written through the extension {transform}; save without it"
            raise SourceError("unsupported", message)

    def _as_recorded(self, payload: Payload, file: str, offset: int) -> Payload:
        """Return the payload with the CRC-32 recorded beside the item at `offset`, if one was."""
        recorded = self._crcs.get((file, offset)) if self._crcs else None
        if recorded is None:
            return payload
        return payload._replace(crc=recorded, is_recorded=True, own_crc=payload.crc)

    def _parse_archive(self, tensor: Tensor, chunk: Chunk) -> Payload:
        name, file = tensor.name, chunk.file
        try:
            archive = self._archive(file, chunk.offset, chunk.nbytes)
            ref = self._ref(archive)
        except SourceError as error:
            raise about(error, tensor=name, file=file) from None
        if ref.dtype != tensor.dtype or ref.shape != chunk.sizes:
            expected = f"expected {tensor.dtype.name} {list(chunk.sizes)} as .metadata says"
            actual = f"found {ref.dtype.name} {list(ref.shape)}"
            message = f"{file}: tensor {name!r}: {expected}, {actual}"
            raise SourceError("index-mismatch", message, tensor=name, file=file)
        stored = archive.storage(ref.storage.key, ref.storage.nbytes, name)
        strides = ref.strides_in_storage()
        payload = Payload(file, stored.offset, stored.nbytes, strides, ref.start, stored.crc)
        template = template_of(archive, stored.name)
        if template is not None:
            kind = ItemKind(chunk.nbytes, tensor.dtype.name, chunk.sizes)
            self._templates[kind] = (template, payload)
        return self._as_recorded(payload, file, chunk.offset)

    def load(self, item: Object) -> object:
        where = f"{item.file}: object {item.name!r}"
        try:
            archive = self._archive(item.file, item.offset, item.nbytes)
            data = archive.read("data.pkl")
            recorded = self._crcs.get((item.file, item.offset))
            if recorded is not None and recorded != (crc := crc32(data)):
                values = f"expected CRC-32 {recorded:08x}, found {crc:08x}"
                message = f"{where}: {values}: {sidecar.OTHER_BYTES}; use another copy"
                raise SourceError("checksum", message)
            value = load_value(data, where)
            unsafe = executor_within(value)
            if unsafe is not None:
                raise UnsafeError("unsafe-pickle", f"{where}: {unsafe}")
            return value
        except SourceError as error:
            raise about(error, tensor=item.name, file=item.file, kind="object") from None

    def _archive(self, file: str, offset: int, nbytes: int) -> Archive:
        if not file:
            raise SourceError("incomplete", f"{METADATA_NAME}: no file holds it")
        self.refuse_encoded(file, offset)
        end, size = offset + nbytes, self._source.size(file)
        if end > size:
            message = f"{file}: expected at least {end} bytes, found {size}: the file is truncated"
            raise SourceError("truncated-file", message)
        # All tensors of a file begin there then, and a scalar is said to take its own bytes only.
        magic = self._source.read(file, offset, min(size - offset, 16))
        if magic[:2] != b"PK" and magic[8:9] == b"{":
            message = f"{file}: written with SerializationFormat.SAFETENSORS; save with TORCH_SAVE"
            raise SourceError("unsupported", message)
        return read_archive(self._source, file, offset, nbytes)

    def _ref(self, archive: Archive) -> TensorRef:
        data = archive.read("data.pkl")
        if "byteorder" in archive.records and archive.read("byteorder") != b"little":
            raise SourceError("unsupported", f"{archive.file}: written on a big-endian machine")
        ref = self._pickles.get(data)
        if ref is None:
            ref = self._pickles[data] = load_tensor(data, archive.file)
        return ref
