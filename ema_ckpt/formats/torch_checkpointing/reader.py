"""Read checkpoints of torch_checkpointing: put each item's files of all ranks together.

The files are those of `torch.save` by default, safetensors or JSON where a layout says so. What
`metadata.pkl` records of a tensor tells which boxes a rank's local tensor is; a DTensor that was
pickled as such says so itself, and both have to agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ema_ckpt.core.box import Box, row_major_strides
from ema_ckpt.core.catalog import (
    Catalog,
    Diagnostic,
    Files,
    Nesting,
    Problem,
    RankPrivate,
    collected,
    refuse_problems,
)
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import SourceError, about
from ema_ckpt.core.text import shown
from ema_ckpt.formats.nesting import flatten
from ema_ckpt.formats.pickle.safe_globals import Global
from ema_ckpt.formats.pickle.tensors import StorageRef, TensorRef
from ema_ckpt.formats.rank_files.merger import Merger, RankFile
from ema_ckpt.formats.safetensors.header import open_shard
from ema_ckpt.formats.sidecar import load_json
from ema_ckpt.formats.torch_checkpointing.metadata import (
    JSON,
    SAFETENSORS,
    TORCH,
    Item,
    ItemFile,
    Metadata,
    Place,
    files_of,
    group_of,
    read_metadata,
)
from ema_ckpt.formats.torch_file.lenient import (
    LenientGlobals,
    Unreadable,
    check_discarded,
    is_unread,
)
from ema_ckpt.formats.torch_file.reader import Content, flat_leaves, is_tensor, read_content
from ema_ckpt.formats.torch_file.sharded_tensors import ShardRef, SubclassReader
from ema_ckpt.formats.torch_zip.reader import Archive, Record, Window

Path = tuple[str | int, ...]
_MAX_JSON_NBYTES = 100_000_000


class _Stored(NamedTuple):
    """What one file holds: leaves by path in the item, and how they nest."""

    content: Content
    leaves: Mapping[Path, object]
    nesting: Nesting


def open_torch_checkpointing(
    source: Files, names: Sequence[str], path: str, resolved: str, *, lenient: bool = False
) -> Catalog:
    """Read the checkpoint whose metadata is the file `names[0]`; payloads are not read.

    Args:
        lenient: list files that are missing or contradict the metadata in `Catalog.problems`, and
            go on with the others.

    Raises:
        SourceError: `missing-file`, `index-mismatch`, `unsupported`, and what reading a file may
            raise. UnsafeError: `unsafe-pickle`, `unsafe-path`.
    """
    metadata = read_metadata(source, names[0])
    opening = _Opening(source, metadata)
    files = list(opening.read_files())
    problems = opening.problems
    if not lenient:
        refuse_problems(problems)
    is_swapped = any(file.content.is_big_endian for file in files)
    merger = Merger(files, resolved, metadata.world_size, problems, is_swapped)
    merger.rank_private += opening.not_read
    merger.warnings += opening.warnings
    merger.add_leaves()
    if not lenient:
        refuse_problems(problems)
    sizes = {file.name: source.size(file.name) for file in files}
    sizes |= {metadata.file: source.size(metadata.file)}
    return merger.catalog(source, path, dict.fromkeys(names, 0) | sizes, opening.nesting())


class _Opening:
    """Reads the files of a checkpoint one after the other, and places what is in them."""

    def __init__(self, source: Files, metadata: Metadata) -> None:
        self.source = source
        self.metadata = metadata
        self.problems: list[Problem] = []
        self.not_read: list[RankPrivate] = []
        self.warnings: list[Diagnostic] = []
        self._nestings: dict[str, Nesting] = {}

    def read_files(self) -> Iterator[RankFile]:
        """Read every file; what is wrong with one is in `problems`."""
        listed = files_of(self.metadata, self.source.listing())
        self._warn_of_unrecorded(listed)
        for file in listed:
            with collected(self.problems):
                stored = self._read(file)
                if stored is not None:
                    leaves = dict(self._placed(file, stored.leaves))
                    self._nestings.setdefault(file.item, stored.nesting)
                    yield RankFile.of(file.name, stored.content, leaves, stored.nesting)

    def nesting(self) -> Nesting:
        """How the leaves of all items nest: as in the first file of each."""
        keys: dict[Path, object] = {}
        tuples: set[Path] = set()
        for item, nesting in self._nestings.items():
            keys |= {(item, *path): key for path, key in nesting.keys.items()}
            tuples |= {(item, *path) for path in nesting.tuples}
        return Nesting(keys, frozenset(tuples))

    def _warn_of_unrecorded(self, listed: Sequence[ItemFile]) -> None:
        """Warn of items that were saved without a resharder and not by all ranks."""
        ranks: dict[str, set[int]] = {}
        for file in listed:
            if file.item not in self.metadata.items:
                ranks.setdefault(file.item, set()).add(file.rank)
        for item, there in ranks.items():
            if len(there) < self.metadata.world_size:
                of = f"of rank {shown(sorted(map(str, there)))} of {self.metadata.world_size}"
                problem = f"{item!r} has the files {of}, and {self.metadata.file} does not record"
                message = f"{problem} whether others had it; what they had, if so, is not read"
                self.warnings.append(Diagnostic("unchecked", message))

    def _read(self, file: ItemFile) -> _Stored | None:
        """Read one file; None for what is of a serialization that is not read."""
        if file.serialization == TORCH:
            return _read_torch(self.source, file.name)
        if file.serialization == SAFETENSORS:
            return _read_safetensors(self.source, file, self.metadata.items[file.item])
        if file.serialization == JSON:
            return _read_json(self.source, file.name)
        self.source.size(file.name)
        reason = f"stored by {file.serialization}, which ema_ckpt does not read"
        self.not_read.append(RankPrivate((file.item,), file.name, reason))
        return None

    def _placed(
        self, file: ItemFile, leaves: Mapping[Path, object]
    ) -> Iterator[tuple[Path, object]]:
        """Yield the leaves with their paths in the checkpoint, tensors as shards of whole ones."""
        item = self.metadata.items.get(file.item)
        groups = item.groups if item else {}
        for path in groups.keys() - leaves.keys():
            if group_of(groups[path], file.rank) is not None:
                problem = f"by {self.metadata.file} rank {file.rank} has it, the file does not"
                self._add_problem(file, path, SourceError("index-mismatch", problem))
        for path, value in leaves.items():
            if path not in groups or not is_tensor(value) or is_unread(value):
                yield (file.item, *path), value
                continue
            try:
                group = group_of(groups[path], file.rank)
                if group is None:
                    problem = f"by {self.metadata.file} rank {file.rank} has no part of it"
                    raise SourceError("index-mismatch", problem)
                yield (file.item, *path), _as_shard(value, group.place(file.rank))
            except SourceError as error:
                if error.code != "unsupported":
                    self._add_problem(file, path, error)
                    continue
                yield (file.item, *path), _unread(value, str(error))

    def _add_problem(self, file: ItemFile, path: Path, error: SourceError) -> None:
        name = ".".join(map(str, (file.item, *path)))
        self.problems.append(Problem.of(about(error, tensor=name, file=file.name)))


def _as_shard(value: object, place: Place) -> ShardRef:
    """Take a local tensor as what `place` says it is of the whole. Raises `index-mismatch`."""
    if isinstance(value, ShardRef):
        boxes = [box for box, _ in place.boxes]
        recorded = _in_words(place.dtype, place.shape, boxes)
        own = _in_words(value.dtype, value.shape, [box for box, _ in value.shards])
        if own != recorded:
            raise _mismatch(recorded, f"a DTensor, {own}")
        return value
    if not isinstance(value, TensorRef):
        raise SourceError("unsupported", "it is no plain tensor")
    shards = []
    for box, corner in place.boxes:
        local = Box(corner, box.sizes)
        is_whole = place.local is None or place.local == value.shape
        if value.dtype != place.dtype or not is_whole or not local.fits(value.shape):
            recorded = f"{place.dtype.name} {list(place.local or box.sizes)} at {list(corner)}"
            raise _mismatch(recorded, f"{value.dtype.name} {list(value.shape)}")
        shards.append((box, _part(value, local)))
    return ShardRef(place.dtype, place.shape, tuple(shards), place.ranks)


def _part(whole: TensorRef, local: Box) -> TensorRef:
    """The part of a tensor in a box of it."""
    start = whole.start
    for offset, stride in zip(local.offsets, whole.strides, strict=True):
        start += offset * stride
    return replace(whole, start=start, shape=local.sizes)


def _in_words(dtype: DType, shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """What a rank has of a tensor; all ranks that have nothing of it are alike."""
    parts = [f"{list(box.sizes)} at {list(box.offsets)}" for box in boxes if box.numel]
    return f"{' and '.join(parts) or 'no part'} of {dtype.name} {list(shape)}"


def _mismatch(recorded: str, found: str) -> SourceError:
    remedy = "the file is another save's or another rank's; copy the checkpoint anew"
    problem = f"by the metadata the rank has {recorded}, the file has {found}; {remedy}"
    return SourceError("index-mismatch", problem)


def _unread(value: object, reason: str) -> Unreadable:
    """A tensor whose place is not read: listed, and refused only where it is selected."""
    shape = value.shape if isinstance(value, TensorRef | ShardRef) else ()
    named = Global("torch_checkpointing", "ShardingMetadata", None)
    return Unreadable(named, "unsupported", reason, (shape, value))


# Files.


def _read_torch(source: Files, name: str) -> _Stored:
    lenient = LenientGlobals(SubclassReader())
    content = read_content(source, name, lenient)
    leaves, nesting = flat_leaves(content)
    check_discarded(lenient.unsafe, [value for _, value in leaves], name)
    return _Stored(content, dict(leaves), nesting)


def _read_safetensors(source: Files, file: ItemFile, item: Item) -> _Stored:
    """Read the header; names in it are paths that were joined by dots."""
    paths = {".".join(map(str, path)): path for path in item.groups}
    shard = open_shard(source, file.name)
    records: dict[str, Record] = {}
    leaves: dict[Path, object] = {}
    for tensor in shard.tensors:
        (chunk,) = tensor.chunks
        record = Record(f"data/{tensor.name}", chunk.offset, chunk.nbytes, None)
        records[record.name] = record
        storage = StorageRef(tensor.name, tensor.dtype, tensor.numel)
        strides = row_major_strides(tensor.shape)
        path = paths.get(tensor.name, (tensor.name,))
        leaves[path] = TensorRef(storage, tensor.dtype, 0, tensor.shape, strides)
    return _Stored(_content(source, file.name, records, shard.nbytes), leaves, Nesting())


def _read_json(source: Files, name: str) -> _Stored:
    nbytes = source.size(name)
    if nbytes > _MAX_JSON_NBYTES:
        message = f"{name}: {nbytes} bytes of JSON, above the limit of {_MAX_JSON_NBYTES}"
        raise SourceError("unsupported", message, file=name)
    value = load_json(source.read(name, 0, nbytes), name)
    leaves, nesting = flatten(value, is_tensor, nbytes + 64)
    return _Stored(_content(source, name, {}, nbytes), dict(leaves), nesting)


def _content(source: Files, name: str, records: Mapping[str, Record], nbytes: int) -> Content:
    archive = Archive(name, records, Window(source, name, 0, source.size(name)))
    return Content(None, archive, nbytes, is_big_endian=False, is_zip=False)
