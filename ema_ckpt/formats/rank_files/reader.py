"""Read rank files, one torch file a process, and put them together by what they record.

A `DTensor` or `ShardedTensor` records which box of which tensor a rank has (verl, lmms-engine and
others write dictionaries of these to `model_world_size_W_rank_R.pt`); a list of names and shapes
places flat pieces. Plain tensors under one name are replicas if their checksums say so; anything
else is rejected with what is missing. The order of file names means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.catalog import (
    Catalog,
    Chunk,
    Diagnostic,
    Files,
    Nesting,
    Object,
    Payload,
    RankPrivate,
    Tensor,
    check_geometry,
)
from ema_ckpt.core.dtypes import DType, by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import OTHER, part_role
from ema_ckpt.core.text import shown
from ema_ckpt.formats.pickle.tensors import TensorRef
from ema_ckpt.formats.rank_files.flat import FlatBox, FlatPiece, find_flat, place_flat
from ema_ckpt.formats.rank_files.names import absent_ranks, check_ranks, family_of, missing_error
from ema_ckpt.formats.rank_files.sharded_tensors import ShardRef, read_subclass
from ema_ckpt.formats.rank_files.zero import TREE, model_file, read_zero
from ema_ckpt.formats.torch_file.lenient import (
    LenientGlobals,
    check_discarded,
    check_supported,
    is_tensor,
    load_inline,
    object_warnings,
    unsafe_within,
)
from ema_ckpt.formats.torch_file.reader import open_archive, read_leaves
from ema_ckpt.formats.torch_zip.reader import Archive, Record

Path = tuple[str | int, ...]
Ints = tuple[int, ...]
_FLAT_NAMES = ("_flat_param", "flat_param")


@dataclass(frozen=True, slots=True)
class _RankFile:
    """One file: its leaves by path, in stored order."""

    name: str
    archive: Archive
    leaves: Mapping[Path, object]
    nesting: Nesting


_Sharded = Sequence[tuple[_RankFile, ShardRef]]
_Plain = Sequence[tuple[_RankFile, TensorRef]]


class _StoredBox(NamedTuple):
    """One rank's data of a box: its first element in the storage, its strides if not row-major."""

    box: Box
    record: Record
    file: str
    start: int
    strides: Ints | None

    def identity(self) -> object:
        """What distinguishes copies without reading them; without a checksum all are different."""
        content = self.file if self.record.crc is None else self.record.crc
        return content, self.record.nbytes, self.start, self.strides


@dataclass(frozen=True, slots=True)
class _Reader:
    """Returns payloads by the name of the tensor: they were located when the files were opened."""

    boxes: Mapping[str, Sequence[_StoredBox]]

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        return tuple(
            Payload(file, record.offset, record.nbytes, strides, start, record.crc)
            for _, record, file, start, strides in self.boxes[tensor.name]
        )

    def load(self, item: Object) -> object:
        return load_inline(item)


def open_rankfiles(source: Files, names: tuple[str, ...], path: str, resolved: str) -> Catalog:
    """Read the rank files `names` of the directory `source`; payloads are not read.

    Raises:
        SourceError: `incomplete` if ranks are missing, `unsupported` if the files do not say how
            their tensors belong together, and what reading a torch file may raise.
        UnsafeError: `unsafe-pickle` if unpickling a tensor would call anything unlisted.
    """
    check_ranks(names, resolved)
    files = [_read_file(source, name) for name in names]
    merger = _Merger(files, resolved)
    model = model_file(names, source.listing())
    if model is not None:
        names = (*names, model)
        merger.add_zero(_read_file(source, model))
    else:
        merger.add_all()
    return Catalog(
        path=path,
        resolved=resolved,
        format="rank-files",
        tensors=tuple(merger.tensors),
        objects=tuple(merger.objects),
        source=source,
        reader=_Reader(merger.boxes),
        nested=merger.nested,
        world_size=len(files),
        files={name: source.size(name) for name in names},
        archives=frozenset(names),
        warnings=tuple(dict.fromkeys(merger.warnings)),
        nesting=files[0].nesting,
        rank_private=tuple(merger.rank_private),
    )


def _read_file(source: Files, name: str) -> _RankFile:
    archive = open_archive(source, name)
    lenient = LenientGlobals(read_subclass)
    leaves, nesting = read_leaves(
        archive, lenient, lambda value: isinstance(value, ShardRef) or is_tensor(value)
    )
    for path, value in leaves:
        check_supported(value, ".".join(map(str, path)), name)
    check_discarded(lenient.unsafe, [value for _, value in leaves], name)
    return _RankFile(name, archive, dict(leaves), nesting)


def _find_flat_pieces(files: Sequence[_RankFile]) -> dict[Path, list[FlatPiece]]:
    """Find flattened tensors by the dictionary they lie in, which every rank must have."""
    homes: dict[Path, list[FlatPiece]] = {}
    for file in files:
        for piece in find_flat(file.leaves, file.name):
            homes.setdefault(piece.home, []).append(piece)
    for home, pieces in homes.items():
        if len(pieces) != len(files):
            where = ".".join(map(str, home)) or "a flat piece"
            message = f"{where} is in {len(pieces)} of {len(files)} rank files only"
            raise SourceError("incomplete", message, file=files[0].name)
        world_size = next((piece.world_size for piece in pieces if piece.world_size), len(files))
        if world_size > len(files):
            missing = absent_ranks([piece.rank for piece in pieces], world_size)
            names = [file.name for file in files]
            raise missing_error(missing, world_size, names, names[0])
    return homes


@dataclass(slots=True)
class _Merger:
    """Puts together what the files of all ranks hold."""

    files: Sequence[_RankFile]
    where: str
    nested: bool = True
    tensors: list[Tensor] = field(default_factory=list)
    objects: list[Object] = field(default_factory=list)
    boxes: dict[str, list[_StoredBox]] = field(default_factory=dict)
    rank_private: list[RankPrivate] = field(default_factory=list)
    warnings: list[Diagnostic] = field(default_factory=list)

    def add_all(self) -> None:
        flat = _find_flat_pieces(self.files)
        used = {path for pieces in flat.values() for piece in pieces for path in piece.used}
        paths: dict[Path, None] = {}
        for file in self.files:
            paths.update(dict.fromkeys(file.leaves))
        leaf_paths = [path for path in paths if path not in used]
        for path in leaf_paths:
            self.add_leaf(path)
        for home, pieces in flat.items():
            self.add_flat(home, pieces)
        self.nested = any(len(path) > 1 for path in leaf_paths) or any(flat)

    def add_leaf(self, path: Path) -> None:
        """Put together what the files hold at one path."""
        name = ".".join(map(str, path))
        values = [(file, file.leaves[path]) for file in self.files if path in file.leaves]
        kinds = {type(value) for _, value in values}
        if kinds == {ShardRef}:
            self.add_shards(name, path, cast("_Sharded", values))
        elif kinds == {TensorRef}:
            self.add_plain(name, path, cast("_Plain", values))
        elif kinds & {ShardRef, TensorRef}:
            file = values[0][0].name
            message = f"{file}: {name!r} is a sharded tensor on some ranks only"
            raise SourceError("unsupported", message, tensor=name, file=file)
        else:
            self.add_object(name, path, values)

    def add_shards(self, name: str, path: Path, sharded: _Sharded) -> None:
        file, first = sharded[0][0].name, sharded[0][1]
        if name.rpartition(".")[2] in _FLAT_NAMES:
            problem = f"{name!r} is a flat parameter of FSDP1: the names and shapes of the"
            remedy = "save with SHARDED_STATE_DICT or FULL_STATE_DICT"
            message = f"{file}: {problem} parameters in it are recorded nowhere; {remedy}"
            raise SourceError("unsupported", message, tensor=name, file=file)
        if first.ranks > len(self.files):
            missing = range(len(self.files), first.ranks)
            names = [rank_file.name for rank_file in self.files]
            raise missing_error(missing, first.ranks, names, self.where)
        boxes = []
        for rank_file, ref in sharded:
            if (ref.shape, ref.dtype) != (first.shape, first.dtype):
                form = f"{ref.dtype.name} {list(ref.shape)}"
                other = f"in {file} it is {first.dtype.name} {list(first.shape)}"
                message = f"{rank_file.name}: {name!r} is {form}, {other}"
                raise SourceError("unreadable", message, tensor=name)
            for box, data in ref.shards:
                boxes.append(_stored_box(rank_file, name, data, box, data.start))
        self.add(path, first.shape, first.dtype, boxes)
        self.compare_replicas(name, boxes)

    def add_plain(self, name: str, path: Path, plain: _Plain) -> None:
        """Add one rank's tensor, replicas, or state that each rank has for itself."""
        file, first = plain[0]
        boxes = [_stored_box(f, name, ref, whole(ref.shape), ref.start) for f, ref in plain]
        forms = {(ref.dtype.name, ref.shape) for _, ref in plain}
        if len(forms) > 1 or len({box.identity() for box in boxes}) > 1:
            family = family_of(file.name)
            if family is not None and part_role(family.name) == OTHER:
                self.add_rank_private(path, file.name, len(plain))
                return
            kinds = {type(value) for f in self.files for value in f.leaves.values()}
            if len(forms) > 1 or ShardRef not in kinds:
                raise _no_place(name, plain)
        self.add(path, first.shape, first.dtype, boxes)
        self.compare_replicas(name, boxes)

    def add_object(self, name: str, path: Path, values: Sequence[tuple[_RankFile, object]]) -> None:
        file, value = values[0]
        for other_file, other in values:
            if unsafe_within(other) is not None:
                file, value = other_file, other
                break
        self.warnings += object_warnings(name, value, file.name)
        if any(repr(other) != repr(value) for _, other in values):
            self.add_rank_private(path, file.name, len(values))
        else:
            self.objects.append(Object(name, path, file.name, inline=value, is_inline=True))

    def add_rank_private(self, path: Path, file: str, count: int) -> None:
        reason = f"private to each rank: {count} files hold different values"
        self.rank_private.append(RankPrivate(path, file, reason))

    def add_flat(self, home: Path, pieces: Sequence[FlatPiece]) -> None:
        order: Sequence[int] = range(len(pieces))
        ranks = [piece.rank for piece in pieces]
        if set(ranks) != {None}:  # the recorded ranks count, not those in the names of the files
            listed = sorted(-1 if rank is None else rank for rank in ranks)
            if listed != list(order):
                message = (
                    f"{self.files[0].name}: the files say that they are those of ranks {listed}"
                )
                raise SourceError("incomplete", message, file=self.files[0].name)
            order = [ranks.index(rank) for rank in order]
        files, pieces = [self.files[rank] for rank in order], [pieces[rank] for rank in order]
        shapes: dict[str, Ints] = {}
        for piece in pieces:
            shapes.update(piece.shapes)
        for name, boxes in place_flat(pieces, [file.name for file in files]):
            self.add_flat_boxes(files, (*home, name), shapes[name], boxes, pieces[0].dtype)

    def add_zero(self, model: _RankFile) -> None:
        """Add DeepSpeed's partitions by the model's file, which has names and shapes."""
        names = [file.name for file in self.files]
        weights = read_zero(names, [file.leaves for file in self.files], model.leaves, model.name)
        for name, shape, boxes in weights.placed:
            self.add_flat_boxes(self.files, (TREE, name), shape, boxes, by_name("float32"))
        for name, ref in weights.whole.items():
            full = f"{TREE}.{name}"
            box = _stored_box(model, full, ref, whole(ref.shape), ref.start)
            self.add((TREE, name), ref.shape, ref.dtype, [box])
        tensors = {tensor.name: tensor for tensor in self.tensors}
        for name, owner in weights.shared.items():
            full, tensor = f"{TREE}.{name}", tensors.get(f"{TREE}.{owner}")
            if tensor is not None and full not in tensors:
                self.boxes[full] = self.boxes[tensor.name]
                self.tensors.append(replace(tensor, name=full, path=(TREE, name)))
        reason = "the optimizer's state in ZeRO partitions is not read"
        self.rank_private.append(RankPrivate(("optimizer_state_dict",), names[0], reason))
        for name in weights.left_out:
            self.rank_private.append(RankPrivate((name,), model.name, "not read from ZeRO's files"))

    def add_flat_boxes(
        self,
        files: Sequence[_RankFile],
        path: Path,
        shape: Ints,
        flat_boxes: Sequence[FlatBox],
        dtype: DType,
    ) -> None:
        """Add a tensor that lies in flat pieces; `dtype` is that of one without elements."""
        name = ".".join(map(str, path))
        boxes, dtypes = [], {}
        for box, number, data, start in flat_boxes:
            boxes.append(_stored_box(files[number], name, data, box, data.start + start))
            dtypes[data.dtype.name] = dtype = data.dtype
        if len(dtypes) > 1:
            message = f"{name!r} has several dtypes: {shown(sorted(dtypes))}"
            raise SourceError("unreadable", message, tensor=name)
        self.add(path, shape, dtype, boxes)

    def add(self, path: Path, shape: Ints, dtype: DType, boxes: list[_StoredBox]) -> None:
        name = ".".join(map(str, path))
        check_geometry(name, shape, dtype, boxes[0].file if boxes else self.files[0].name)
        chunks, identity = [], []
        for box, record, file, start, strides in boxes:
            chunks.append(Chunk(box.offsets, box.sizes, file, record.offset, record.nbytes))
            identity.append((file, record.name, start, strides))
        self.boxes[name] = boxes
        self.tensors.append(Tensor(name, path, shape, dtype, tuple(chunks), tuple(identity)))

    def compare_replicas(self, name: str, boxes: Sequence[_StoredBox]) -> None:
        copies: dict[Box, object] = {}
        for stored in boxes:
            if stored.record.crc is None or not stored.box.numel:
                continue
            if copies.setdefault(stored.box, stored.identity()) != stored.identity():
                problem = f"{name!r}: copies of the same elements differ between ranks"
                message = f"{problem}; the lowest rank's are taken"
                self.warnings.append(Diagnostic("replicas-differ", message))
                return


def _stored_box(file: _RankFile, name: str, ref: TensorRef, box: Box, start: int) -> _StoredBox:
    record = file.archive.storage(ref.storage.key, ref.storage.nbytes, name)
    return _StoredBox(box, record, file.name, start, ref.strides_in_storage())


def _no_place(name: str, plain: _Plain) -> SourceError:
    forms = ", ".join(f"{list(ref.shape)} in {file.name}" for file, ref in plain[:4])
    missing = "the shape of the whole tensor and the place of each piece in it are missing"
    remedy = "save DTensors, a full state dict, or through torch.distributed.checkpoint"
    problem = f"{name!r} is a different plain tensor on each rank ({forms}), and {missing}"
    return SourceError("unsupported", f"{problem}; {remedy}", tensor=name, file=plain[0][0].name)
