"""Tensors flattened one after another and cut into equal pieces, one a rank, beside a list of names
and shapes.

So do trainers that divide an average over data-parallel ranks: every parameter flattened in order,
the row of them cut in `ceil(N / W)` elements a rank, the last piece shorter or padded. Others note
for each tensor which elements a rank holds (first and last, both included). A run of a flattened
tensor is at most `2 * dims - 1` boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ema_ckpt.core.box import Box, flat_range_boxes, linear
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.text import counted, shown
from ema_ckpt.formats.pickle.tensors import TensorRef

Ints = tuple[int, ...]
Path = tuple[str | int, ...]
Leaves = Mapping[Path, object]
Placed = tuple[Box, int, TensorRef, int]
"""A box, the index of the piece that holds it, the data, and the first element of the box in the data."""

_NAMES = ("names", "name_list", "param_names", "parameter_names", "fqns")
_SHAPES = ("shapes", "shape_list", "param_shapes", "parameter_shapes")
_RUNS = ("index_list", "indices", "ranges")


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """What one rank's file says of flattened tensors below `home`.

    `runs` holds (name, first element in the flattened tensor, elements, data, first element in the
    data) where the file notes them; otherwise `flat` is the rank's piece of all tensors in a row.
    `rank` is what the file says of itself, `used` are the paths read.
    """

    home: Path
    names: tuple[str, ...]
    shapes: Mapping[str, Ints]
    flat: TensorRef | None
    runs: tuple[tuple[str, int, int, TensorRef, int], ...]
    used: frozenset[Path]
    rank: int | None = None
    world_size: int | None = None


def find_flat(leaves: Leaves, file: str) -> list[FlatPiece]:
    """Every dictionary of a rank's file that holds flattened tensors and the list of their names.

    Raises:
        SourceError: `unsupported` if names are listed beside flat data but shapes are not.
    """
    found = []
    for path, value in leaves.items():
        if path[-1] in _NAMES and _is_names(value):
            piece = _piece(leaves, path[:-1], path, tuple(value), file)  # type: ignore[arg-type]
            if piece is not None:
                found.append(piece)
    return found


def _is_flat(ref: TensorRef) -> bool:
    return len(ref.shape) == 1 and (ref.strides == (1,) or ref.shape[0] < 2)


def _is_names(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(one, str) for one in value)
    )


def _piece(
    leaves: Leaves, home: Path, listed: Path, names: tuple[str, ...], file: str
) -> FlatPiece | None:
    beside = {
        path: value
        for path, value in leaves.items()
        if path[: len(home)] == home and path != listed
    }
    tensors = {
        path: value
        for path, value in beside.items()
        if isinstance(value, TensorRef) and _is_flat(value)
    }
    data = _data(home, tensors)
    if not data:
        return None
    shapes, used = _shapes(beside, home, names)
    noted = next((path for path in beside if path[:-1] == home and path[-1] in _RUNS), None)
    shapes = shapes or (_elsewhere(leaves, home, names) if noted else {})
    lost = [name for name in names if name not in shapes]
    if lost:
        where = ".".join(map(str, home)) or "the file"
        message = (
            f"{file}: {where} holds flattened tensors, but the shapes of {shown(lost)} are missing"
        )
        raise SourceError(
            "unsupported", f"{message}; store a list `shapes` beside `{listed[-1]}`", file=file
        )
    refs = list(data.values())
    if not noted and len(refs) != 1:
        return None
    told = {
        key: (*home, key) for key in ("rank", "world_size") if type(beside.get((*home, key))) is int
    }
    taken = frozenset([listed, *used, *data, *([noted] if noted else []), *told.values()])
    flat, runs = (None, _runs(names, beside[noted], refs, file)) if noted else (refs[0], ())
    numbers = [beside[told[key]] if key in told else None for key in ("rank", "world_size")]
    return FlatPiece(home, names, shapes, flat, runs, taken, *numbers)  # type: ignore[arg-type]


def _data(home: Path, tensors: Mapping[Path, TensorRef]) -> dict[Path, TensorRef]:
    """The one flat tensor of a dictionary, or the one list of them."""
    single = {path: ref for path, ref in tensors.items() if path[:-1] == home}
    if len(single) == 1:
        return single
    lists = {
        path[:-1] for path in tensors if len(path) == len(home) + 2 and isinstance(path[-1], int)
    }
    if single or len(lists) != 1:
        return {}
    (inside,) = lists
    return {path: ref for path, ref in tensors.items() if path[:-1] == inside}


def _shapes(beside: Leaves, home: Path, names: Sequence[str]) -> tuple[dict[str, Ints], list[Path]]:
    """Shapes by name, and the paths that told them: a list in the order of the names, or a
    dictionary.
    """
    depth = len(home)
    used = [path for path in beside if len(path) > depth and path[depth] in _SHAPES]
    if len(used) == 1 and len(used[0]) == depth + 1:
        value = beside[used[0]]
        if (
            isinstance(value, list | tuple)
            and len(value) == len(names)
            and all(map(_is_shape, value))
        ):
            return {name: tuple(shape) for name, shape in zip(names, value, strict=True)}, used
    found = {".".join(map(str, path[depth + 1 :])): beside[path] for path in used}
    return {name: tuple(shape) for name, shape in found.items() if _is_shape(shape)}, used  # type: ignore[arg-type]


def _is_shape(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        type(size) is int and size >= 0 for size in value
    )


def _elsewhere(leaves: Leaves, home: Path, names: Sequence[str]) -> dict[str, Ints]:
    """Shapes of the live weights of the same names in the same file."""
    wanted, found = set(names), dict[str, Ints]()
    for path, value in leaves.items():
        name = ".".join(map(str, path[1:]))
        if isinstance(value, TensorRef) and path[: len(home)] != (home or ("",)) and name in wanted:
            found[name] = value.shape
    return found


def _runs(
    names: Sequence[str], noted: object, refs: Sequence[TensorRef], file: str
) -> tuple[tuple[str, int, int, TensorRef, int], ...]:
    fits = isinstance(noted, list | tuple) and len(noted) == len(names)
    if not fits or not all(_is_shape(one) and len(one) == 2 and one[0] <= one[1] for one in noted):  # type: ignore[attr-defined]
        expected = f"the first and last element of each of {counted(len(names), 'name')}"
        raise SourceError("unreadable", f"{file}: expected {expected}")
    pairs: list[tuple[int, int]] = [tuple(pair) for pair in noted]  # type: ignore[attr-defined]
    counts = [last - first + 1 for first, last in pairs]
    places = list(zip(refs, [0] * len(refs), strict=True))
    if len(refs) == 1 and len(names) > 1:
        places = [(refs[0], sum(counts[:at])) for at in range(len(counts))]
    held = [ref.shape[0] for ref in refs]
    if len(places) != len(counts) or (held != counts and held != [sum(counts)]):
        raise SourceError(
            "unreadable", f"{file}: its flat pieces have {held} elements, its index says {counts}"
        )
    return tuple(
        (name, first, count, ref, start)
        for name, (first, _), count, (ref, start) in zip(names, pairs, counts, places, strict=True)
    )


def place_flat(pieces: Sequence[FlatPiece], files: Sequence[str]) -> list[tuple[str, list[Placed]]]:
    """Boxes of each tensor by name, and which piece holds them.

    `pieces` are those of all ranks, in the order of ranks, read from `files`.

    Raises:
        SourceError: `incomplete` if the sizes of the pieces fit no equal partition, `unreadable` if
            the ranks list different tensors.
    """
    if any(piece.runs for piece in pieces):
        return _by_runs(pieces)
    first = pieces[0]
    for piece, file in zip(pieces, files, strict=True):
        if piece.names != first.names or piece.shapes != first.shapes:
            raise SourceError(
                "unreadable", f"{file}: lists other tensors than {files[0]}", file=file
            )
    step = _step(pieces, sum(prod(first.shapes[name]) for name in first.names), files)
    placed: list[tuple[str, list[Placed]]] = []
    at = 0
    for name in first.names:
        shape, boxes = first.shapes[name], list[Placed]()
        numel = prod(shape)
        for rank in range(at // step, -(-(at + numel) // step)) if step else ():
            start, stop = max(rank * step, at), min((rank + 1) * step, at + numel)
            flat = pieces[rank].flat
            if flat is not None:
                boxes += [
                    (box, rank, flat, at + linear(box.offsets, shape) - rank * step)
                    for box in flat_range_boxes(shape, start - at, stop - at)
                ]
        placed.append((name, boxes))
        at += numel
    return placed


def _step(pieces: Sequence[FlatPiece], total: int, files: Sequence[str]) -> int:
    """Elements of a whole piece."""
    held = [piece.flat.shape[0] if piece.flat else 0 for piece in pieces]
    equal = held[0]
    if all(count == equal for count in held) and equal * len(held) >= total:
        return equal
    step = -(-total // len(held))
    for rank, (count, file) in enumerate(zip(held, files, strict=True)):
        expected = max(min(step, total - rank * step), 0)
        if count != expected:
            files = counted(len(held), "file")
            message = f"{file}: expected a piece of {expected} of {total} elements in {files}, found {count}"
            raise SourceError("incomplete", f"{message}: are files missing?", file=file)
    return step


def _by_runs(pieces: Sequence[FlatPiece]) -> list[tuple[str, list[Placed]]]:
    boxes: dict[str, list[Placed]] = {}
    for rank, piece in enumerate(pieces):
        for name, first, count, ref, start in piece.runs:
            shape = piece.shapes[name]
            for box in flat_range_boxes(shape, first, first + count):
                index = linear(box.offsets, shape)
                boxes.setdefault(name, []).append((box, rank, ref, start + index - first))
    return list(boxes.items())
