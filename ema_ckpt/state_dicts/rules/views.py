"""Views: tensors put together from parts of others by integer arithmetic, before a byte is read.

A view lists its pieces, and each piece is a box of it that lies in one stored chunk of a source
tensor with a stride for each axis. Joining, cutting, reordering and reshaping change these numbers
alone. `StoredView` makes a tensor of a view that is read, proven and written like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ema_ckpt.core.box import Ints, flat_range_boxes, row_major_strides
from ema_ckpt.core.catalog import Chunk, Diagnostic, Payload, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import SourceError

_MAX_PIECES = 1 << 16


class Piece(NamedTuple):
    """A box of a view that one chunk of `source` holds.

    Attributes:
        chunk: index of the chunk. start: its element at which the box begins.
        strides: from one element to the next on each axis of the box. They and `start` count
            elements of the chunk in row-major order, however it is stored.
    """

    offsets: Ints
    sizes: Ints
    strides: Ints
    start: int
    source: Tensor
    chunk: int


@dataclass(frozen=True, slots=True)
class View:
    """A tensor made of pieces; `refusal` says why none can be read, if so."""

    shape: Ints
    dtype: DType
    pieces: tuple[Piece, ...]
    refusal: Diagnostic | None = None

    def with_pieces(self, shape: Sequence[int], pieces: Iterable[Piece]) -> View:
        """Return a view of that shape and those pieces, empty ones left out.

        Raises:
            SourceError: `unsupported` for so many pieces that listing them takes too long.
        """
        kept: list[Piece] = []
        for piece in pieces:
            if 0 not in piece.sizes:
                kept.append(piece)
            if len(kept) > _MAX_PIECES:
                message = f"it would be put together from more than {_MAX_PIECES} pieces"
                raise SourceError("unsupported", message)
        return View(tuple(shape), self.dtype, tuple(kept), self.refusal)


def view_of(tensor: Tensor) -> View:
    """Return a tensor as a view of itself; one with a hole, say, as a view that is refused."""
    try:
        chunks = prove(tensor)
    except SourceError as error:
        return View(tensor.shape, tensor.dtype, (), Diagnostic(error.code, str(error)))
    pieces = []
    for index in chunks:
        offsets, sizes = tensor.chunks[index].box
        pieces.append(Piece(offsets, sizes, row_major_strides(sizes), 0, tensor, index))
    return View(tensor.shape, tensor.dtype, tuple(pieces))


def permute(view: View, order: Sequence[int]) -> View:
    """Reorder the axes as `torch.permute` does."""

    def pick(values: Ints) -> Ints:
        return tuple([values[axis] for axis in order])

    pieces = []
    for piece in view.pieces:
        offsets, sizes, strides = pick(piece.offsets), pick(piece.sizes), pick(piece.strides)
        pieces.append(piece._replace(offsets=offsets, sizes=sizes, strides=strides))
    return view.with_pieces(pick(view.shape), pieces)


def concatenate(views: Sequence[View], dim: int) -> View:
    """Join views along an axis; shapes agree elsewhere."""
    pieces: list[Piece] = []
    start, refusal = 0, None
    for view in views:
        for piece in view.pieces:
            moved = _put(piece.offsets, dim, piece.offsets[dim] + start)
            pieces.append(piece._replace(offsets=moved))
        start += view.shape[dim]
        refusal = refusal or view.refusal
    first = views[0]
    joined = View(first.shape, first.dtype, (), refusal)
    return joined.with_pieces(_put(first.shape, dim, start), pieces)


def cut(view: View, dim: int, start: int, length: int) -> View:
    """Take the indices [start, start + length) of an axis."""
    pieces = []
    for piece in view.pieces:
        first = max(piece.offsets[dim], start)
        stop = min(piece.offsets[dim] + piece.sizes[dim], start + length)
        if first >= stop:
            continue
        skipped = (first - piece.offsets[dim]) * piece.strides[dim]
        pieces.append(
            piece._replace(
                offsets=_put(piece.offsets, dim, first - start),
                sizes=_put(piece.sizes, dim, stop - first),
                start=piece.start + skipped,
            )
        )
    return view.with_pieces(_put(view.shape, dim, length), pieces)


def unflatten(view: View, dim: int, sizes: Sequence[int]) -> View:
    """Replace an axis by several, of those sizes, as `torch.unflatten` does."""
    steps = row_major_strides(sizes)
    pieces = []
    for piece in view.pieces:
        first, stride = piece.offsets[dim], piece.strides[dim]
        for box in flat_range_boxes(sizes, first, first + piece.sizes[dim]):
            flat = sum([o * step for o, step in zip(box.offsets, steps, strict=True)])
            pieces.append(
                piece._replace(
                    offsets=_spliced(piece.offsets, dim, box.offsets),
                    sizes=_spliced(piece.sizes, dim, box.sizes),
                    strides=_spliced(piece.strides, dim, [stride * step for step in steps]),
                    start=piece.start + (flat - first) * stride,
                )
            )
    return view.with_pieces(_spliced(view.shape, dim, sizes), pieces)


def flatten(view: View, dim: int, count: int) -> View:
    """Replace `count` axes from `dim` on by one, as `torch.flatten` does."""
    for _ in range(count - 1):
        inner = view.shape[dim + 1]
        pieces: list[Piece] = []
        for piece in view.pieces:
            pieces += _merged(piece, dim, inner)
        merged = view.shape[dim] * inner
        view = view.with_pieces((*view.shape[:dim], merged, *view.shape[dim + 2 :]), pieces)
    return view


def _merged(piece: Piece, dim: int, inner: int) -> Iterator[Piece]:
    """Merge two axes of a piece: into one piece if steps on both are alike, else row by row."""
    first, second = piece.offsets[dim : dim + 2]
    rows, columns = piece.sizes[dim : dim + 2]
    outer_stride, stride = piece.strides[dim : dim + 2]
    if columns == 1:
        stride = outer_stride
    is_even = rows == 1 or (columns == inner and outer_stride == columns * stride)
    count = rows if is_even else 1
    for row in range(0, rows, count):
        flat = (first + row) * inner + second
        yield piece._replace(
            offsets=(*piece.offsets[:dim], flat, *piece.offsets[dim + 2 :]),
            sizes=(*piece.sizes[:dim], count * columns, *piece.sizes[dim + 2 :]),
            strides=(*piece.strides[:dim], stride, *piece.strides[dim + 2 :]),
            start=piece.start + row * outer_stride,
        )


def insert_axis(view: View, dim: int) -> View:
    """Add an axis of size 1, as `torch.unsqueeze` does."""

    def widened(values: Ints, value: int) -> Ints:
        return (*values[:dim], value, *values[dim:])

    pieces = []
    for piece in view.pieces:
        offsets, sizes = widened(piece.offsets, 0), widened(piece.sizes, 1)
        strides = widened(piece.strides, 1)
        pieces.append(piece._replace(offsets=offsets, sizes=sizes, strides=strides))
    return view.with_pieces(widened(view.shape, 1), pieces)


def remove_axis(view: View, dim: int) -> View:
    """Drop an axis of size 1, as `torch.squeeze` does."""

    def without(values: Ints) -> Ints:
        return (*values[:dim], *values[dim + 1 :])

    pieces = []
    for piece in view.pieces:
        offsets, sizes, strides = map(without, (piece.offsets, piece.sizes, piece.strides))
        pieces.append(piece._replace(offsets=offsets, sizes=sizes, strides=strides))
    return view.with_pieces(without(view.shape), pieces)


def _put(values: Ints, dim: int, value: int) -> Ints:
    return (*values[:dim], value, *values[dim + 1 :])


def _spliced(values: Ints, dim: int, several: Sequence[int]) -> Ints:
    return (*values[:dim], *several, *values[dim + 1 :])


# A view as a stored tensor.


def stored(view: View, name: str, path: tuple[str | int, ...]) -> Tensor:
    """Return the tensor of that name whose chunks are the pieces of a view."""
    chunks = []
    for piece in view.pieces:
        held = piece.source.chunks[piece.chunk]
        chunks.append(Chunk(piece.offsets, piece.sizes, held.file, held.offset, held.nbytes))
    refusal = view.refusal
    return Tensor(name, path, view.shape, view.dtype, tuple(chunks), refusal=refusal)


def payload_of(piece: Piece, held: Payload) -> Payload:
    """Return where the bytes of a piece are, inside the payload of its chunk.

    Raises:
        SourceError: `unsupported` for a piece that is reshaped out of a chunk with strides.
    """
    if held.strides is None:
        dense = _is_row_major(piece.sizes, piece.strides)
        strides = None if dense else piece.strides
        return held._replace(strides=strides, start=held.start + piece.start)
    if not any(held.strides):  # one element for all
        return held._replace(strides=(0,) * len(piece.sizes))
    sizes = piece.source.chunks[piece.chunk].sizes
    steps = row_major_strides(sizes)
    corner = _index_of(piece.start, steps)
    start, ends = held.start, list(corner)
    for position, stride in zip(corner, held.strides, strict=True):
        start += position * stride
    moved: list[int] = []
    for size, step in zip(piece.sizes, piece.strides, strict=True):
        if size == 1:
            moved.append(0)
            continue
        axis = _axis_of(step, steps, sizes)
        rows = step // steps[axis]
        ends[axis] += (size - 1) * rows
        moved.append(rows * held.strides[axis])
    if any(end >= size for end, size in zip(ends, sizes, strict=True)):
        message = f"{held.file}: tensor {piece.source.name!r} is stored with strides, as a view"
        message += " that no rule reshapes; convert it without rules first"
        raise SourceError("unsupported", message, tensor=piece.source.name, file=held.file)
    return held._replace(strides=tuple(moved), start=start)


def _is_row_major(sizes: Ints, strides: Ints) -> bool:
    wanted = row_major_strides(sizes)
    for size, stride, step in zip(sizes, strides, wanted, strict=True):
        if size > 1 and stride != step:
            return False
    return True


def _index_of(element: int, steps: Ints) -> list[int]:
    """Return the index of an element in row-major order."""
    index = []
    for step in steps:
        position, element = divmod(element, step)
        index.append(position)
    return index


def _axis_of(step: int, steps: Ints, sizes: Ints) -> int:
    """Return the axis along which one walks by `step` elements."""
    for axis in range(len(steps)):
        if sizes[axis] > 1 and step >= steps[axis] and step % steps[axis] == 0:
            return axis
    return max(len(steps) - 1, 0)


class StoredViews:
    """The tensors that rules made of views, and where their bytes are.

    Args:
        payloads: locates the payloads of a source tensor's chunks.
    """

    def __init__(self, payloads: Callable[[Tensor], tuple[Payload, ...]]) -> None:
        self._payloads = payloads
        self._views: dict[int, tuple[Tensor, View]] = {}

    def add(self, view: View, name: str, path: tuple[str | int, ...]) -> Tensor:
        """Return a view as a tensor of that name."""
        tensor = stored(view, name, path)
        self._views[id(tensor)] = (tensor, view)
        return tensor

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        """Locate the payload of each of `tensor.chunks`. Reads headers only."""
        found = self._views.get(id(tensor))
        if found is None:
            return self._payloads(tensor)
        located: dict[int, tuple[Payload, ...]] = {}
        result = []
        for piece in found[1].pieces:
            held = located.get(id(piece.source))
            if held is None:
                held = located[id(piece.source)] = self._payloads(piece.source)
            result.append(payload_of(piece, held[piece.chunk]))
        return tuple(result)
