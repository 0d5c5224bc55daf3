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
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import NamedTuple, TypeGuard

from ema_ckpt.core.box import Box, are_sizes, flat_range_boxes, linear
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.text import counted, shown
from ema_ckpt.formats.pickle.tensors import TensorRef

Ints = tuple[int, ...]
Path = tuple[str | int, ...]
Leaves = Mapping[Path, object]
Shapes = Mapping[str, Ints]

_NAMES = ("names", "name_list", "param_names", "parameter_names", "fqns")
_SHAPES = ("shapes", "shape_list", "param_shapes", "parameter_shapes")
_RANGES = (("index_list",), ("indices",), ("ranges",))


class FlatBox(NamedTuple):
    """A box of a tensor: the number of the file that has it, its data, its first element there."""

    box: Box
    file: int
    data: TensorRef
    start: int


Placed = list[tuple[str, list[FlatBox]]]  # the boxes of each tensor, by name


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

    `data` is the rank's piece of the row of all tensors, None where the file records `ranges`;
    `gaps` are elements of that row after a tensor that belong to none. `rank` and `world_size` are
    those that the file records, `used` are the paths read.
    """

    home: Path
    names: tuple[str, ...]
    shapes: Shapes
    data: TensorRef | None
    ranges: tuple[FlatRange, ...] = ()
    used: frozenset[Path] = frozenset()
    rank: int | None = None
    world_size: int | None = None
    gaps: Mapping[str, int] = field(default_factory=dict)

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
        if path[-1] not in _NAMES or not isinstance(names, list | tuple):
            continue
        if set(map(type, names)) != {str}:
            continue
        piece = _read_piece(leaves, path, tuple(names), file)
        if piece is not None:
            pieces.append(piece)
    return pieces


def _read_piece(
    leaves: Leaves, names_path: Path, names: tuple[str, ...], file: str
) -> FlatPiece | None:
    home, depth = names_path[:-1], len(names_path) - 1
    below = {path[depth:]: value for path, value in leaves.items() if path[:depth] == home}
    del below[names_path[depth:]]
    data = _flat_tensors(below)
    if not data:
        return None
    used = [names_path[depth:], *data]
    ranges_path = next((path for path in below if path in _RANGES), None)
    shapes = _read_shapes(below, names, used)
    if not shapes and ranges_path:
        shapes = _live_shapes(leaves, home)
    _check_shapes(names, shapes, names_path, file)
    flat, ranges = None, tuple[FlatRange, ...]()
    if ranges_path:
        used.append(ranges_path)
        ranges = tuple(_read_ranges(names, below[ranges_path], list(data.values()), file))
    elif len(data) == 1:
        flat = next(iter(data.values()))
    else:
        return None
    rank, world_size = _number(below, "rank", used), _number(below, "world_size", used)
    paths = frozenset([(*home, *path) for path in used])
    return FlatPiece(home, names, shapes, flat, ranges, paths, rank, world_size)


def _check_shapes(names: Sequence[str], shapes: Shapes, names_path: Path, file: str) -> None:
    lost = [name for name in names if name not in shapes]
    if lost:
        where = ".".join(map(str, names_path[:-1])) or "the file"
        problem = f"holds flattened tensors, but the shapes of {shown(lost)} are missing"
        remedy = f"store a list `shapes` beside `{names_path[-1]}`"
        raise SourceError("unsupported", f"{file}: {where} {problem}; {remedy}", file=file)


def _number(below: Leaves, key: str, used: list[Path]) -> int | None:
    value = below.get((key,))
    if type(value) is not int:
        return None
    used.append((key,))
    return value


def _flat_tensors(below: Leaves) -> dict[Path, TensorRef]:
    """Find the one flat tensor of a dictionary, or the one list of them."""
    single: dict[Path, TensorRef] = {}
    lists: dict[str | int, dict[Path, TensorRef]] = {}
    for path, ref in below.items():
        if not isinstance(ref, TensorRef) or len(ref.shape) != 1:
            continue
        if ref.strides != (1,) and ref.shape[0] > 1:
            continue
        match path:
            case (_,):
                single[path] = ref
            case (key, int()):
                lists.setdefault(key, {})[path] = ref
    candidates = [single] if single else list(lists.values())
    if len(candidates) != 1 or len(single) > 1:
        return {}
    return candidates[0]


def _read_shapes(below: Leaves, names: Sequence[str], used: list[Path]) -> dict[str, Ints]:
    """Read shapes by name, from a list in the order of `names` or from a dictionary."""
    paths = [path for path in below if path[0] in _SHAPES]
    used += paths
    if len(paths) == 1 and len(paths[0]) == 1:
        listed = below[paths[0]]
        if _are_shapes(listed) and len(listed) == len(names):
            return dict(zip(names, map(tuple, listed), strict=True))
    shapes = {}
    for path in paths:
        shape = below[path]
        if _is_shape(shape):
            shapes[".".join(map(str, path[1:]))] = tuple(shape)
    return shapes


def _is_shape(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, list | tuple) and are_sizes(value)


def _are_shapes(value: object) -> TypeGuard[Sequence[Sequence[int]]]:
    return isinstance(value, list | tuple) and all(map(_is_shape, value))


def _live_shapes(leaves: Leaves, home: Path) -> dict[str, Ints]:
    """Return the shapes of the tensors of other trees in the same file, by name in their tree."""
    shapes = {}
    for path, ref in leaves.items():
        is_beside = not home or path[: len(home)] != home
        if is_beside and isinstance(ref, TensorRef):
            shapes[".".join(map(str, path[1:]))] = ref.shape
    return shapes


def _read_ranges(
    names: Sequence[str], recorded: object, data: Sequence[TensorRef], file: str
) -> list[FlatRange]:
    firsts, counts = [], []
    for pair in recorded if _are_shapes(recorded) else ():
        if len(pair) == 2 and pair[0] <= pair[1]:
            firsts.append(pair[0])
            counts.append(pair[1] - pair[0] + 1)
    if not isinstance(recorded, list | tuple) or not len(recorded) == len(counts) == len(names):
        expected = f"the first and last element of each of {counted(len(names), 'name')}"
        raise SourceError("unreadable", f"{file}: expected {expected}")
    lengths = [ref.shape[0] for ref in data]
    if lengths == counts:
        starts, refs = [0] * len(counts), list(data)
    elif lengths == [sum(counts)]:
        starts, refs = [0, *accumulate(counts[:-1])], list(data) * len(counts)
    else:
        problem = f"its flat pieces have {lengths} elements, its index says {counts}"
        raise SourceError("unreadable", f"{file}: {problem}")
    return list(map(FlatRange, names, firsts, counts, refs, starts))


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


def place_flat(pieces: Sequence[FlatPiece], files: Sequence[str]) -> Placed:
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


def _place_equal(pieces: Sequence[FlatPiece], files: Sequence[str]) -> Placed:
    names, shapes, gaps = pieces[0].names, pieces[0].shapes, pieces[0].gaps
    for piece, file in zip(pieces, files, strict=True):
        if piece.names != names or piece.shapes != shapes:
            message = f"{file}: lists other tensors than {files[0]}"
            raise SourceError("unreadable", message, file=file)
    total = sum(prod(shapes[name]) for name in names) + sum(gaps.values())
    step = _piece_numel(pieces, total, files)
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
        begin = end + gaps.get(name, 0)
    return placed


def _piece_numel(pieces: Sequence[FlatPiece], total: int, files: Sequence[str]) -> int:
    """Return the number of elements of a whole piece; only after the last element may one end."""
    numels = [piece.data.shape[0] if piece.data else 0 for piece in pieces]
    step = numels[0]
    least = [max(min(step, total - rank * step), 0) for rank in range(len(numels))]
    is_cut = all(low <= numel <= step for low, numel in zip(least, numels, strict=True))
    if is_cut and sum(numels) >= total:
        return step
    step = -(-total // len(numels))
    for rank, (numel, file) in enumerate(zip(numels, files, strict=True)):
        expected = max(min(step, total - rank * step), 0)
        if numel != expected:
            problem = f"expected a piece of {expected} of {total} elements"
            message = f"{file}: {problem} in {counted(len(numels), 'file')}, found {numel}"
            raise SourceError("incomplete", f"{message}: are files missing?", file=file)
    return step
