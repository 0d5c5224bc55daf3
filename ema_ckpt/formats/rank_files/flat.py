"""Place tensors that were flattened one after another and divided over ranks.

The file of a rank lists the names and shapes of the tensors beside its flat piece. The row of all
is cut in `ceil(N / W)` elements a rank, the last piece shorter or padded; or the file records which
elements of each tensor the rank has. The keys that are recognised, and whose they are:

    names         shapes          ranges        written by
    `name_list`   `shapes`        `index_list`  DistEMA, which has its data in `ema_param_list`;
                                                `shapes` is added to its state by hand
    `names`       `shapes`        none          any trainer (docs/how_to/migration.md)

`param_shapes` is DeepSpeed's word. The other keys are variants of these words, of no known trainer.
A range is the first and the last element of a flattened tensor, both included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeGuard

from ema_ckpt.core.box import Box, flat_range_boxes, linear
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.text import counted, shown
from ema_ckpt.formats.pickle.tensors import TensorRef

Ints = tuple[int, ...]
Path = tuple[str | int, ...]
Leaves = Mapping[Path, object]

_NAMES = ("names", "name_list", "param_names", "parameter_names", "fqns")
_SHAPES = ("shapes", "shape_list", "param_shapes", "parameter_shapes")
_SHAPE_KEYS = {(key,) for key in _SHAPES}
_RANGES = ("index_list", "indices", "ranges")


class FlatBox(NamedTuple):
    """A box of a tensor: the number of the file that has it, its data, its first element there."""

    box: Box
    file: int
    data: TensorRef
    start: int


class FlatRange(NamedTuple):
    """`numel` elements from `first` of a flattened tensor, which begin at `start` of `data`."""

    name: str
    first: int
    numel: int
    data: TensorRef
    start: int


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """One rank's elements of the flattened tensors of the dictionary `home`.

    `data` is the rank's piece of the row of all tensors, None where the file records `ranges`.
    `rank` and `world_size` are those that the file records, `used` are the paths read.
    """

    home: Path
    names: tuple[str, ...]
    shapes: Mapping[str, Ints]
    data: TensorRef | None
    ranges: tuple[FlatRange, ...] = ()
    used: frozenset[Path] = frozenset()
    rank: int | None = None
    world_size: int | None = None

    @property
    def dtype(self) -> DType:
        """The element type of its data."""
        return (self.data or self.ranges[0].data).dtype


def find_flat(leaves: Leaves, file: str) -> list[FlatPiece]:
    """Find every dictionary of a rank's file that holds flattened tensors and their names.

    Raises:
        SourceError: `unsupported` if names are listed beside flat data but shapes are not.
    """
    pieces = []
    for path, names in leaves.items():
        if path[-1] in _NAMES and _are_names(names):
            piece = _read_piece(leaves, path, tuple(names), file)
            if piece is not None:
                pieces.append(piece)
    return pieces


def _are_names(value: object) -> TypeGuard[Sequence[str]]:
    if not isinstance(value, list | tuple):
        return False
    return len(value) > 0 and {type(name) for name in value} == {str}


def _read_piece(
    leaves: Leaves, names_path: Path, names: tuple[str, ...], file: str
) -> FlatPiece | None:
    home = names_path[:-1]
    beside = {path: leaves[path] for path in leaves if path[: len(home)] == home}
    del beside[names_path]
    data = _flat_tensors(home, beside)
    if not data:
        return None
    ranges_path = _key_in(_RANGES, home, beside)
    shapes, shape_paths = _read_shapes(beside, home, names)
    if not shapes and ranges_path:
        shapes = _live_shapes(leaves, home, names)
    lost = [name for name in names if name not in shapes]
    if lost:
        where = ".".join(map(str, home)) or "the file"
        problem = f"holds flattened tensors, but the shapes of {shown(lost)} are missing"
        remedy = f"store a list `shapes` beside `{names_path[-1]}`"
        raise SourceError("unsupported", f"{file}: {where} {problem}; {remedy}", file=file)
    used = {names_path, *shape_paths, *data}
    rank, world_size = (
        _number("rank", home, beside, used),
        _number("world_size", home, beside, used),
    )
    refs = list(data.values())
    if ranges_path:
        used.add(ranges_path)
        ranges = tuple(_read_ranges(names, beside[ranges_path], refs, file))
        return FlatPiece(home, names, shapes, None, ranges, frozenset(used), rank, world_size)
    if len(refs) > 1:
        return None
    return FlatPiece(home, names, shapes, refs[0], (), frozenset(used), rank, world_size)


def _key_in(keys: Sequence[str], home: Path, beside: Leaves) -> Path | None:
    for path in beside:
        if path[:-1] == home and path[-1] in keys:
            return path
    return None


def _number(key: str, home: Path, beside: Leaves, used: set[Path]) -> int | None:
    value = beside.get((*home, key))
    if type(value) is not int:
        return None
    used.add((*home, key))
    return value


def _flat_tensors(home: Path, beside: Leaves) -> dict[Path, TensorRef]:
    """Find the one flat tensor of a dictionary, or the one list of them."""
    groups: dict[Path, dict[Path, TensorRef]] = {}
    for path, value in beside.items():
        if isinstance(value, TensorRef) and _is_flat(value):
            groups.setdefault(path[:-1], {})[path] = value
    single = groups.pop(home, {})
    if single:
        return single if len(single) == 1 else {}
    lists = []
    for inside, tensors in groups.items():
        is_list = any(isinstance(path[-1], int) for path in tensors)
        if is_list and len(inside) == len(home) + 1:
            lists.append(tensors)
    return lists[0] if len(lists) == 1 else {}


def _is_flat(ref: TensorRef) -> bool:
    return len(ref.shape) == 1 and (ref.strides == (1,) or ref.shape[0] < 2)


def _read_shapes(
    beside: Leaves, home: Path, names: Sequence[str]
) -> tuple[dict[str, Ints], list[Path]]:
    """Read shapes by name, from a list in the order of `names` or a dictionary; and their paths."""
    depth = len(home)
    paths = [path for path in beside if path[depth : depth + 1] in _SHAPE_KEYS]
    if len(paths) == 1 and len(paths[0]) == depth + 1:
        listed = beside[paths[0]]
        if _are_shapes(listed) and len(listed) == len(names):
            return dict(zip(names, map(tuple, listed), strict=True)), paths
    shapes = {}
    for path in paths:
        shape = beside[path]
        if _is_shape(shape):
            shapes[".".join(map(str, path[depth + 1 :]))] = tuple(shape)
    return shapes, paths


def _is_shape(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, list | tuple) and all(type(n) is int and n >= 0 for n in value)


def _are_shapes(value: object) -> TypeGuard[Sequence[Sequence[int]]]:
    return isinstance(value, list | tuple) and all(map(_is_shape, value))


def _live_shapes(leaves: Leaves, home: Path, names: Sequence[str]) -> dict[str, Ints]:
    """Return the shapes of live weights of the same names in the same file."""
    wanted, shapes = set(names), {}
    for path, value in leaves.items():
        name = ".".join(map(str, path[1:]))
        is_inside = bool(home) and path[: len(home)] == home
        if isinstance(value, TensorRef) and not is_inside and name in wanted:
            shapes[name] = value.shape
    return shapes


def _read_ranges(
    names: Sequence[str], recorded: object, data: Sequence[TensorRef], file: str
) -> Iterator[FlatRange]:
    if (
        not _are_shapes(recorded)
        or len(recorded) != len(names)
        or not all(map(_is_range, recorded))
    ):
        expected = f"the first and last element of each of {counted(len(names), 'name')}"
        raise SourceError("unreadable", f"{file}: expected {expected}")
    counts = [last - first + 1 for first, last in recorded]
    lengths = [ref.shape[0] for ref in data]
    if lengths not in (counts, [sum(counts)]):
        problem = f"its flat pieces have {lengths} elements, its index says {counts}"
        raise SourceError("unreadable", f"{file}: {problem}")
    start = 0
    for number, (name, (first, _), count) in enumerate(zip(names, recorded, counts, strict=True)):
        if lengths == counts:
            yield FlatRange(name, first, count, data[number], 0)
        else:
            yield FlatRange(name, first, count, data[0], start)
            start += count


def _is_range(pair: Sequence[int]) -> bool:
    return len(pair) == 2 and pair[0] <= pair[1]


def range_boxes(
    shape: Ints, start: int, stop: int, file: int, data: TensorRef, data_start: int
) -> Iterator[FlatBox]:
    """Cut elements [start, stop) of a tensor, which begin at `data_start` of `data`, into boxes."""
    if shape and stop > prod(shape):
        # A box beyond the tensor: coverage reports it as out of bounds.
        rest = [max(size, 1) for size in shape[1:]]
        shape = (max(shape[0], -(-stop // prod(rest))), *rest)
    for box in flat_range_boxes(shape, start, stop):
        yield FlatBox(box, file, data, data_start + linear(box.offsets, shape) - start)


def place_flat(
    pieces: Sequence[FlatPiece], files: Sequence[str]
) -> list[tuple[str, list[FlatBox]]]:
    """Place the boxes of each tensor, by name.

    `pieces` are those of all ranks, in the order of ranks, read from `files`.

    Raises:
        SourceError: `incomplete` if the sizes of the pieces fit no equal partition, `unreadable` if
            the ranks list different tensors.
    """
    if not any(piece.ranges for piece in pieces):
        return _place_equal(pieces, files)
    boxes: dict[str, list[FlatBox]] = {}
    for number, piece in enumerate(pieces):
        for name, first, numel, data, start in piece.ranges:
            placed = range_boxes(piece.shapes[name], first, first + numel, number, data, start)
            boxes.setdefault(name, []).extend(placed)
    return list(boxes.items())


def _place_equal(
    pieces: Sequence[FlatPiece], files: Sequence[str]
) -> list[tuple[str, list[FlatBox]]]:
    names, shapes = pieces[0].names, pieces[0].shapes
    for piece, file in zip(pieces, files, strict=True):
        if piece.names != names or piece.shapes != shapes:
            message = f"{file}: lists other tensors than {files[0]}"
            raise SourceError("unreadable", message, file=file)
    step = _piece_numel(pieces, sum(prod(shapes[name]) for name in names), files)
    placed = []
    begin = 0  # of a tensor, in the row of all
    for name in names:
        boxes: list[FlatBox] = []
        end = begin + prod(shapes[name])
        for rank in range(begin // step, -(-end // step)) if step else ():
            start, stop = max(rank * step, begin), min((rank + 1) * step, end)
            data = pieces[rank].data
            if data is not None:
                inside = start - begin, stop - begin
                boxes += range_boxes(shapes[name], *inside, rank, data, start - rank * step)
        placed.append((name, boxes))
        begin = end
    return placed


def _piece_numel(pieces: Sequence[FlatPiece], total: int, files: Sequence[str]) -> int:
    """Return the number of elements of a whole piece."""
    numels = [piece.data.shape[0] if piece.data else 0 for piece in pieces]
    if len(set(numels)) == 1 and sum(numels) >= total:
        return numels[0]
    step = -(-total // len(numels))
    for rank, (numel, file) in enumerate(zip(numels, files, strict=True)):
        expected = max(min(step, total - rank * step), 0)
        if numel != expected:
            problem = f"expected a piece of {expected} of {total} elements"
            message = f"{file}: {problem} in {counted(len(numels), 'file')}, found {numel}"
            raise SourceError("incomplete", f"{message}: are files missing?", file=file)
    return step
