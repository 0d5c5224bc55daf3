"""Rank files: one torch file a process, put together by what they record and never by the order of
their names.

A `DTensor` or `ShardedTensor` tells which box of which tensor it holds (verl, lmms-engine and
others write dictionaries of these to `model_world_size_W_rank_R.pt`), a list of names and shapes
tells it of flat pieces. Plain tensors under one name are replicas if their checksums say so;
anything else is refused with what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import OTHER, part_role
from ema_ckpt.core.text import shown
from ema_ckpt.formats.pickle.tensors import TensorRef
from ema_ckpt.formats.rank_files.flat import FlatPiece, Placed, find_flat, place_flat
from ema_ckpt.formats.rank_files.names import family_of, missing_ranks
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
_FLAT_NAMES = ("_flat_param", "flat_param")


@dataclass(frozen=True, slots=True)
class _RankFile:
    """One file read: its leaves by path, in stored order."""

    name: str
    archive: Archive
    leaves: Mapping[Path, object]
    nesting: Nesting


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's data of a box of a tensor: `start` is its first element in the storage, strides
    None if row-major.
    """

    box: Box
    record: Record
    file: str
    start: int
    strides: tuple[int, ...] | None


@dataclass(slots=True)
class _Merge:
    """What the files hold together, while it is being put together."""

    files: Sequence[_RankFile]
    tensors: list[Tensor] = field(default_factory=list)
    objects: list[Object] = field(default_factory=list)
    parts: dict[str, list[_Part]] = field(default_factory=dict)
    rank_private: list[RankPrivate] = field(default_factory=list)
    warnings: list[Diagnostic] = field(default_factory=list)


def open_rankfiles(source: Files, names: tuple[str, ...], path: str, resolved: str) -> Catalog:
    """Read the rank files `names` of the directory `source`; payloads are not read.

    Raises:
        SourceError: `incomplete` if ranks are missing, `unsupported` if the files do not say how
            their tensors belong together, and what reading a torch file may raise.
        UnsafeError: `unsafe-pickle` if unpickling a tensor would call anything unlisted.
    """
    world_size, missing = missing_ranks(names)
    if missing:
        raise _missing(missing, world_size, names, resolved)
    files = [_read(source, name) for name in names]
    merge = _Merge(files)
    model = model_file(names, source.listing())
    if model is not None:
        return _open_zero(source, merge, _read(source, model), path, resolved)
    flat = _flat_homes(files)
    consumed = {path for pieces in flat.values() for piece in pieces for path in piece.used}
    for place in dict.fromkeys(place for file in files for place in file.leaves):
        if place not in consumed:
            _merge(merge, place, resolved)
    for home, pieces in flat.items():
        _merge_flat(merge, home, pieces)
    nested = any(len(place) > 1 for file in files for place in file.leaves if place not in consumed)
    return _catalog(source, merge, names, path, resolved, nested=nested or any(flat))


def _catalog(
    source: Files, merge: _Merge, names: Sequence[str], path: str, resolved: str, *, nested: bool
) -> Catalog:
    return Catalog(
        path=path,
        resolved=resolved,
        format="rank-files",
        tensors=tuple(merge.tensors),
        objects=tuple(merge.objects),
        source=source,
        reader=_Reader(merge.parts),
        nested=nested,
        world_size=len(merge.files),
        files={name: source.size(name) for name in names},
        warnings=tuple(dict.fromkeys(merge.warnings)),
        nesting=merge.files[0].nesting,
        rank_private=tuple(merge.rank_private),
    )


def _open_zero(source: Files, merge: _Merge, model: _RankFile, path: str, resolved: str) -> Catalog:
    """DeepSpeed's optimizer files, with the model's file that tells names and shapes."""
    names = [file.name for file in merge.files]
    found = read_zero(names, [file.leaves for file in merge.files], model.leaves, model.name)
    for name, shape, boxes in found.placed:
        _add_placed(merge, merge.files, (TREE, name), shape, boxes, "float32")
    for name, ref in found.whole.items():
        full = f"{TREE}.{name}"
        part = _part(model, full, ref, whole(ref.shape), ref.start)
        _add(merge, full, (TREE, name), ref.shape, ref.dtype.name, [part])
    known = {tensor.name: tensor for tensor in merge.tensors}
    for name, other in found.shared.items():
        tensor = known.get(f"{TREE}.{other}")
        if tensor is not None and f"{TREE}.{name}" not in known:
            merge.parts[f"{TREE}.{name}"] = merge.parts[tensor.name]
            merge.tensors.append(replace(tensor, name=f"{TREE}.{name}", path=(TREE, name)))
    merge.rank_private.append(
        RankPrivate(
            ("optimizer_state_dict",),
            names[0],
            "the optimizer's state in ZeRO partitions is not read",
        )
    )
    merge.rank_private += [
        RankPrivate((name,), model.name, "not read from ZeRO's files") for name in found.left_out
    ]
    return _catalog(source, merge, [*names, model.name], path, resolved, nested=True)


def _missing(
    missing: Sequence[int], world_size: int, names: Sequence[str], where: str
) -> SourceError:
    ranks = ", ".join(map(str, missing[:10])) + (
        f" and {len(missing) - 10} more" if len(missing) > 10 else ""
    )
    message = (
        f"{where}: the files of rank {ranks} of {world_size} are missing (found {shown(names)})"
    )
    remedy = "runs on several nodes leave some ranks' files on each; bring all into one directory"
    return SourceError("incomplete", f"{message}; {remedy}", file=names[0] if names else None)


def _read(source: Files, name: str) -> _RankFile:
    archive = open_archive(source, name)
    tolerance = LenientGlobals(read_subclass)
    leaves, nesting = read_leaves(
        archive, tolerance, lambda value: isinstance(value, ShardRef) or is_tensor(value)
    )
    for path, value in leaves:
        check_supported(value, ".".join(map(str, path)), name)
    check_discarded(tolerance.unsafe, [value for _, value in leaves], name)
    return _RankFile(name, archive, dict(leaves), nesting)


# Sharded, whole and plain.


def _merge(merge: _Merge, place: Path, where: str) -> None:
    """Put together what the files hold at one path."""
    name = ".".join(map(str, place))
    held = [(file, file.leaves[place]) for file in merge.files if place in file.leaves]
    shards = [(file, value) for file, value in held if isinstance(value, ShardRef)]
    plain = [(file, value) for file, value in held if isinstance(value, TensorRef)]
    if len(shards) == len(held):
        _merge_shards(merge, name, place, shards, where)
    elif len(plain) == len(held):
        _merge_plain(merge, name, place, plain)
    elif shards or plain:
        message = f"{held[0][0].name}: {name!r} is a sharded tensor on some ranks only"
        raise SourceError("unsupported", message, tensor=name, file=held[0][0].name)
    else:
        _merge_objects(merge, name, place, held)


def _merge_shards(
    merge: _Merge, name: str, place: Path, shards: Sequence[tuple[_RankFile, ShardRef]], where: str
) -> None:
    first = shards[0][1]
    if place[-1] in _FLAT_NAMES or name.rpartition(".")[2] in _FLAT_NAMES:
        message = f"{shards[0][0].name}: {name!r} is a flat parameter of FSDP1: the names and shapes of the parameters"
        remedy = "are recorded nowhere; save with SHARDED_STATE_DICT or FULL_STATE_DICT"
        raise SourceError(
            "unsupported", f"{message} in it {remedy}", tensor=name, file=shards[0][0].name
        )
    if first.ranks > len(merge.files):
        ranks = list(range(len(merge.files), first.ranks))
        raise _missing(ranks, first.ranks, [file.name for file in merge.files], where)
    parts = []
    for file, shard in shards:
        if (shard.shape, shard.dtype) != (first.shape, first.dtype):
            message = f"{file.name}: {name!r} is {shard.dtype.name} {list(shard.shape)}, in {shards[0][0].name} it is"
            raise SourceError(
                "unreadable", f"{message} {first.dtype.name} {list(first.shape)}", tensor=name
            )
        parts += [_part(file, name, ref, box, ref.start) for box, ref in shard.pieces]
    check_geometry(name, first.shape, first.dtype, shards[0][0].name)
    _add(merge, name, place, first.shape, first.dtype.name, parts)
    _compare_replicas(merge, name, parts)


def _merge_plain(
    merge: _Merge, name: str, place: Path, plain: Sequence[tuple[_RankFile, TensorRef]]
) -> None:
    """Plain tensors: one rank's alone, replicas, or state that each rank has for itself."""
    file, first = plain[0]
    parts = [_part(at, name, ref, whole(ref.shape), ref.start) for at, ref in plain]
    forms = {(ref.dtype.name, ref.shape) for _, ref in plain}
    same = len(forms) == 1 and len({_content(part) for part in parts}) == 1
    described = any(
        isinstance(value, ShardRef) for other in merge.files for value in other.leaves.values()
    )
    if not same and _is_private(file.name):
        merge.rank_private.append(
            RankPrivate(
                place, file.name, f"private to each rank: {len(plain)} files hold different values"
            )
        )
        return
    if not same and (len(forms) > 1 or not described):
        raise _unplaced(name, plain)
    check_geometry(name, first.shape, first.dtype, file.name)
    _add(merge, name, place, first.shape, first.dtype.name, parts)
    _compare_replicas(merge, name, parts)


def _is_private(file: str) -> bool:
    """Whether a file is of a family that keeps a rank's own state."""
    family = family_of(file)
    return family is not None and part_role(family.name) == OTHER


def _unplaced(name: str, plain: Sequence[tuple[_RankFile, TensorRef]]) -> SourceError:
    found = ", ".join(f"{list(ref.shape)} in {file.name}" for file, ref in plain[:4])
    missing = "the shape of the whole tensor and the place of each piece in it are missing"
    remedy = "save DTensors, a full state dict, or through torch.distributed.checkpoint"
    message = (
        f"{name!r} is a different plain tensor on each rank ({found}), and {missing}; {remedy}"
    )
    return SourceError("unsupported", message, tensor=name, file=plain[0][0].name)


def _merge_objects(
    merge: _Merge, name: str, place: Path, held: Sequence[tuple[_RankFile, object]]
) -> None:
    file, value = next(((f, v) for f, v in held if unsafe_within(v) is not None), held[0])
    merge.warnings += object_warnings(name, value, file.name)
    if any(repr(other) != repr(value) for _, other in held):
        merge.rank_private.append(
            RankPrivate(
                place, file.name, f"private to each rank: {len(held)} files hold different values"
            )
        )
        return
    merge.objects.append(Object(name, place, file.name, inline=value, is_inline=True))


# Flat pieces.


def _flat_homes(files: Sequence[_RankFile]) -> dict[Path, list[FlatPiece]]:
    """Flattened tensors by the dictionary that they lie in, which must be there on every rank."""
    homes: dict[Path, list[FlatPiece]] = {}
    for file in files:
        for piece in find_flat(file.leaves, file.name):
            homes.setdefault(piece.home, []).append(piece)
    for home, pieces in homes.items():
        if len(pieces) != len(files):
            where = ".".join(map(str, home)) or "a flat piece"
            message = f"{where} is in {len(pieces)} of {len(files)} rank files only"
            raise SourceError("incomplete", message, file=files[0].name)
        told = next((piece.world_size for piece in pieces if piece.world_size), len(files))
        if told > len(files):
            ranks = sorted(
                set(range(told)) - {piece.rank for piece in pieces if piece.rank is not None}
            )
            raise _missing(ranks, told, [file.name for file in files], files[0].name)
    return homes


def _in_rank_order(
    files: Sequence[_RankFile], pieces: Sequence[FlatPiece]
) -> list[tuple[_RankFile, FlatPiece]]:
    """Files and pieces by the rank that each piece records; by that in the file's name where none
    does.
    """
    held = list(zip(files, pieces, strict=True))
    if all(piece.rank is None for piece in pieces):
        return held
    ranks = sorted(-1 if piece.rank is None else piece.rank for piece in pieces)
    if ranks != list(range(len(pieces))):
        message = f"{files[0].name}: the files say that they are those of ranks {ranks}"
        raise SourceError("incomplete", message, file=files[0].name)
    return sorted(held, key=lambda one: one[1].rank or 0)


def _merge_flat(merge: _Merge, home: Path, pieces: Sequence[FlatPiece]) -> None:
    ordered = _in_rank_order(merge.files, pieces)
    files, pieces = [file for file, _ in ordered], [piece for _, piece in ordered]
    shapes = {name: shape for piece in pieces for name, shape in piece.shapes.items()}
    for name, boxes in place_flat(pieces, [file.name for file in files]):
        _add_placed(merge, files, (*home, name), shapes[name], boxes, _any_ref(pieces).dtype.name)


def _add_placed(
    merge: _Merge,
    files: Sequence[_RankFile],
    place: Path,
    shape: tuple[int, ...],
    boxes: Sequence[Placed],
    otherwise: str,
) -> None:
    """Add a tensor that lies in runs of flat pieces; without elements it is of dtype
    `otherwise`.
    """
    name = ".".join(map(str, place))
    parts = [_part(files[at], name, ref, box, ref.start + start) for box, at, ref, start in boxes]
    kinds = {ref.dtype.name for _, _, ref, _ in boxes} or {otherwise}
    if len(kinds) > 1:
        raise SourceError(
            "unreadable", f"{name!r} has several dtypes: {shown(sorted(kinds))}", tensor=name
        )
    check_geometry(name, shape, by_name(next(iter(kinds))), files[0].name)
    _add(merge, name, place, shape, kinds.pop(), parts)


def _any_ref(pieces: Sequence[FlatPiece]) -> TensorRef:
    return next(
        ref
        for piece in pieces
        for ref in [piece.flat, *(run[3] for run in piece.runs)]
        if ref is not None
    )


# Parts.


def _part(file: _RankFile, name: str, ref: TensorRef, box: Box, start: int) -> _Part:
    stored = file.archive.record(f"data/{ref.storage.key}")
    if stored.nbytes != ref.storage.nbytes:
        found = f"its storage has {stored.nbytes} bytes, the pickle says {ref.storage.nbytes}"
        raise SourceError(
            "bad-header", f"{file.name}: tensor {name!r}: {found}", tensor=name, file=file.name
        )
    return _Part(box, stored, file.name, start, ref.strides_in_storage())


def _add(
    merge: _Merge,
    name: str,
    place: Path,
    shape: tuple[int, ...],
    dtype: str,
    parts: Sequence[_Part],
) -> None:
    chunks = [
        Chunk(p.box.offsets, p.box.sizes, p.file, p.record.offset, p.record.nbytes) for p in parts
    ]
    identity = tuple((p.file, p.record.name, p.start, p.strides) for p in parts)
    merge.parts[name] = list(parts)
    merge.tensors.append(Tensor(name, place, shape, by_name(dtype), tuple(chunks), identity))


def _content(part: _Part) -> object:
    """What tells two copies apart without reading them; copies without a checksum count as
    different.
    """
    return (
        part.record.crc if part.record.crc is not None else part.file,
        part.record.nbytes,
        part.start,
        part.strides,
    )


def _compare_replicas(merge: _Merge, name: str, parts: Iterable[_Part]) -> None:
    copies: dict[Box, set[object]] = {}
    for part in parts:
        if part.record.crc is not None and part.box.numel:
            copies.setdefault(part.box, set()).add(_content(part))
    if any(len(contents) > 1 for contents in copies.values()):
        message = f"{name!r}: copies of the same elements differ between ranks; the lowest rank's are taken"
        merge.warnings.append(Diagnostic("replicas-differ", message))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Finds payloads by name: they were located when the files were opened."""

    parts: Mapping[str, Sequence[_Part]]

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        """The storage behind each chunk, and how the chunk lies in it."""
        return tuple(self._payloads(tensor))

    def _payloads(self, tensor: Tensor) -> Iterator[Payload]:
        for part in self.parts[tensor.name]:
            record = part.record
            yield Payload(
                part.file, record.offset, record.nbytes, part.strides, part.start, record.crc
            )

    def load(self, item: Object) -> object:
        """A value that was read along with the files.

        Raises:
            UnsafeError: `unsafe-pickle` if unpickling it would run code.
        """
        return load_inline(item)
