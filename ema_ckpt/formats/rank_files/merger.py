"""Put together what the files of all ranks hold, by what they record.

Plain tensors under one name are replicas if their checksums say so; anything else is rejected with
what is missing. The order of file names means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.catalog import (
    Catalog,
    Chunk,
    Diagnostic,
    Files,
    Nesting,
    Object,
    Payload,
    Problem,
    RankPrivate,
    Tensor,
    check_geometry,
    collected,
)
from ema_ckpt.core.dtypes import DType, by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import OTHER, is_flat_parameter, part_role, role_of
from ema_ckpt.core.text import shown
from ema_ckpt.formats.pickle.tensors import TensorRef
from ema_ckpt.formats.rank_files.flat import FlatBox, FlatPiece, find_flat, place_flat
from ema_ckpt.formats.rank_files.names import absent_ranks, family_of, missing_error
from ema_ckpt.formats.rank_files.zero import TREE, read_zero
from ema_ckpt.formats.torch_file.lenient import (
    big_endian_refused,
    is_unread,
    load_inline,
    object_warnings,
    refused,
    refused_tensor,
    unsafe_within,
)
from ema_ckpt.formats.torch_file.reader import Content
from ema_ckpt.formats.torch_file.sharded_tensors import ShardRef
from ema_ckpt.formats.torch_zip.reader import Record

Path = tuple[str | int, ...]
Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file: its leaves by path, in stored order, and whether shards are among them."""

    name: str
    content: Content
    leaves: Mapping[Path, object]
    nesting: Nesting
    has_shards: bool

    @classmethod
    def of(
        cls, name: str, content: Content, leaves: Mapping[Path, object], nesting: Nesting
    ) -> RankFile:
        """Look for shards among the leaves of a file."""
        has_shards = any(isinstance(value, ShardRef) for value in leaves.values())
        return cls(name, content, leaves, nesting, has_shards)


_Sharded = Sequence[tuple[RankFile, ShardRef]]
_Plain = Sequence[tuple[RankFile, TensorRef]]


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


@dataclass(slots=True)
class Merger:
    """Puts together what the files of all ranks hold."""

    files: Sequence[RankFile]
    where: str
    world_size: int
    problems: list[Problem]
    is_swapped: bool
    nested: bool = True
    model: RankFile | None = None
    beside: list[RankFile] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    objects: list[Object] = field(default_factory=list)
    boxes: dict[str, list[_StoredBox]] = field(default_factory=dict)
    rank_private: list[RankPrivate] = field(default_factory=list)
    warnings: list[Diagnostic] = field(default_factory=list)

    def add_all(self) -> None:
        """Add all that the files hold, flat pieces too."""
        flat = self.find_flat_pieces()
        self.add_leaves(
            {path for pieces in flat.values() for piece in pieces for path in piece.used}
        )
        for home, pieces in flat.items():
            with collected(self.problems):
                self.check_flat(home, pieces)
                self.add_flat(home, pieces)
        self.nested = self.nested or any(flat)

    def add_leaves(self, used: Set[Path] = frozenset()) -> None:
        """Add what lies at every path but those that are `used` already."""
        paths: dict[Path, None] = {}
        for file in self.files:
            paths.update(dict.fromkeys(file.leaves))
        leaf_paths = [path for path in paths if path not in used]
        for path in leaf_paths:
            self.add_leaf(path)
        self.nested = any(len(path) > 1 for path in leaf_paths)

    def catalog(
        self, source: Files, path: str, files: Mapping[str, int], nesting: Nesting
    ) -> Catalog:
        """The catalog of all that was added; `files` are those it consists of, with their sizes."""
        return Catalog(
            path=path,
            resolved=self.where,
            format="rank-files",
            tensors=tuple(self.tensors),
            objects=tuple(self.objects),
            source=source,
            reader=_Reader(self.boxes),
            nested=self.nested,
            world_size=self.world_size,
            files=files,
            warnings=tuple(dict.fromkeys(self.warnings)),
            problems=tuple(self.problems),
            archives=frozenset(file.name for file in self.read if file.content.is_zip),
            nesting=nesting,
            rank_private=tuple(self.rank_private),
        )

    def find_flat_pieces(self) -> dict[Path, list[FlatPiece]]:
        """Find flattened tensors by the dictionary they lie in."""
        homes: dict[Path, list[FlatPiece]] = {}
        for file in self.files:
            for piece in find_flat(file.leaves, file.name):
                homes.setdefault(piece.home, []).append(piece)
        return homes

    def check_flat(self, home: Path, pieces: Sequence[FlatPiece]) -> None:
        """Refuse pieces of some ranks: without the others nothing tells where they lie."""
        if len(pieces) != self.world_size:
            where = ".".join(map(str, home)) or "a flat piece"
            message = f"{where} is in {len(pieces)} of {self.world_size} rank files only"
            raise SourceError("incomplete", message, file=self.files[0].name)
        recorded = next((piece.world_size for piece in pieces if piece.world_size), 0)
        if recorded > len(pieces):
            missing = absent_ranks([piece.rank for piece in pieces], recorded)
            raise missing_error(missing, recorded, self.names, self.names[0])

    @property
    def read(self) -> list[RankFile]:
        """The files that were read: of all ranks, and those of the model of ZeRO."""
        return [*self.files, *([] if self.model is None else [self.model]), *self.beside]

    @property
    def names(self) -> list[str]:
        """Names of the files of ranks that were read."""
        return [file.name for file in self.files]

    def add_leaf(self, path: Path) -> None:
        """Put together what the files hold at one path; list it if they do not say how."""
        name = ".".join(map(str, path))
        values = [(file, file.leaves[path]) for file in self.files if path in file.leaves]
        for file, value in values:
            if is_unread(value):
                self.tensors.append(refused_tensor(path, value, file.name))
                return
        kinds = {type(value) for _, value in values}
        if kinds & {ShardRef, TensorRef}:
            self.add_tensor(name, path, values, kinds)
        else:
            self.add_object(name, path, values)

    def add_tensor(
        self, name: str, path: Path, values: Sequence[tuple[RankFile, Any]], kinds: set[type]
    ) -> None:
        """Put a tensor together; one that the files do not say how to is listed and refused."""
        try:
            if kinds == {ShardRef}:
                self.add_shards(name, path, values)
            elif kinds == {TensorRef}:
                self.add_plain(name, path, values)
            else:
                raise SourceError("unsupported", "it is a sharded tensor on some ranks only")
        except SourceError as error:
            if error.code != "unsupported":
                raise
            file, first = next(pair for pair in values if isinstance(pair[1], ShardRef | TensorRef))
            refusal = Diagnostic(error.code, str(error))
            self.tensors.append(refused(path, first.shape, first.dtype, file.name, refusal))

    def add_shards(self, name: str, path: Path, sharded: _Sharded) -> None:
        """Add a tensor of which every file that has it says which boxes it has."""
        file, first = sharded[0][0].name, sharded[0][1]
        if first.ranks > self.world_size:
            missing = range(self.world_size, first.ranks)
            self.problems.append(
                Problem.of(missing_error(missing, first.ranks, self.names, self.where))
            )
            self.world_size = first.ranks
        if is_flat_parameter(name):
            problem = f"{name!r} is a flat parameter of FSDP1: the names and shapes of the"
            remedy = "save with SHARDED_STATE_DICT or FULL_STATE_DICT"
            message = f"{file}: {problem} parameters in it are recorded nowhere; {remedy}"
            raise SourceError("unsupported", message, tensor=name, file=file)
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
            if _is_state_of_ranks(file.name, path):
                self.add_rank_private(path, file.name, len(plain))
                return
            if len(forms) > 1 or not any(f.has_shards for f, _ in plain):
                raise _no_place(name, plain)
        self.add(path, first.shape, first.dtype, boxes)
        self.compare_replicas(name, boxes)

    def add_object(self, name: str, path: Path, values: Sequence[tuple[RankFile, object]]) -> None:
        """Add a value; one that differs between the files is private to each rank."""
        file, value = values[0]
        for other_file, other in values:
            if unsafe_within(other) is not None:
                file, value = other_file, other
                break
        self.warnings += object_warnings(name, value, file.name)
        if any(repr(other) != repr(value) for _, other in values):
            self.add_rank_private(path, file.name, len(values))
        else:
            is_bare = not file.content.is_zip
            self.objects.append(
                Object(name, path, file.name, inline=value, is_inline=True, is_bare=is_bare)
            )

    def add_rank_private(self, path: Path, file: str, count: int) -> None:
        """List state that each rank has for itself."""
        reason = f"private to each rank: {count} files hold different values"
        self.rank_private.append(RankPrivate(path, file, reason))

    def add_flat(self, home: Path, pieces: Sequence[FlatPiece]) -> None:
        """Add the tensors of one dictionary that lie in flat pieces, one of each rank."""
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

    def add_zero(self, model: RankFile) -> None:
        """Add DeepSpeed's partitions by the model's file, which has names and shapes."""
        self.model = model
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
        self.warnings.append(Diagnostic("left-out", f"{names[0]} and its like: {reason}"))
        if weights.unread:
            problem = f"{shown(weights.unread)} of its {TREE!r} are no whole tensors and not read"
            message = f"{model.name}: {problem}; of a weight in no optimizer stage 3 leaves none"
            self.warnings.append(Diagnostic("left-out", message))
        for name in weights.unread:
            self.rank_private.append(RankPrivate((TREE, name), model.name, "no whole tensor"))
        for name in weights.left_out:
            self.rank_private.append(RankPrivate((name,), model.name, "not read from ZeRO's files"))

    def add_flat_boxes(
        self,
        files: Sequence[RankFile],
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
        """Add a tensor whose boxes are known."""
        name = ".".join(map(str, path))
        check_geometry(name, shape, dtype, boxes[0].file if boxes else self.files[0].name)
        chunks, identity = [], []
        for box, record, file, start, strides in boxes:
            chunks.append(Chunk(box.offsets, box.sizes, file, record.offset, record.nbytes))
            identity.append((file, record.name, start, strides))
        self.boxes[name] = boxes
        tensor = Tensor(name, path, shape, dtype, tuple(chunks), tuple(identity))
        self.tensors.append(big_endian_refused(tensor) if self.is_swapped else tensor)

    def compare_replicas(self, name: str, boxes: Sequence[_StoredBox]) -> None:
        """Warn of copies of one box that differ."""
        copies: dict[Box, object] = {}
        for stored in boxes:
            if stored.record.crc is None or not stored.box.numel:
                continue
            if copies.setdefault(stored.box, stored.identity()) != stored.identity():
                problem = f"{name!r}: copies of the same elements differ between ranks"
                message = f"{problem}; the lowest rank's are taken"
                self.warnings.append(Diagnostic("replicas-differ", message))
                return


def _stored_box(file: RankFile, name: str, ref: TensorRef, box: Box, start: int) -> _StoredBox:
    record = file.content.archive.storage(ref.storage.key, ref.storage.nbytes, name)
    return _StoredBox(box, record, file.name, start, ref.strides_in_storage())


def _is_state_of_ranks(file: str, path: Path) -> bool:
    """Whether each rank has such a tensor for itself: by the name of its family, or of its tree."""
    family = family_of(file)
    if family is not None:
        return part_role(family.name) == OTHER
    tree = str(path[0])
    return OTHER in (part_role(tree), role_of(tree))


def _no_place(name: str, plain: _Plain) -> SourceError:
    forms = ", ".join(
        f"{ref.dtype.name} {list(ref.shape)} in {file.name}" for file, ref in plain[:4]
    )
    missing = "the shape of the whole tensor and the place of each piece in it are missing"
    remedy = "save DTensors, a full state dict, or through torch.distributed.checkpoint"
    problem = f"{name!r} is a different plain tensor on each rank ({forms}), and {missing}"
    return SourceError("unsupported", f"{problem}; {remedy}", tensor=name, file=plain[0][0].name)
