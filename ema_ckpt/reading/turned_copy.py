"""Copy arrays whose axes lie in another order in memory than in the result, as transposed ones do.

Element by element such a copy waits for memory: each is on another cache line than the last. So it
is done in squares that the second-level cache holds, in three steps of which one alone has strides:
the square is copied as it lies, turned, and copied to its place.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A square: so much of so many rows. Its own rows are longer by a little, so that rows at a power of
# two do not push each other out of the cache.
_ROWS, _ROW_NBYTES, _PAD_NBYTES = 448, 512, 64
# What a walk along an axis passes over and the first-level cache holds is copied as it is; so are
# planes so small that calls would take longer.
_CACHED_NBYTES, _LEAST_NUMEL = 32 << 10, 2048


class TurnedCopy:
    """Copies of one worker; its squares are kept, half a megabyte for each element size."""

    def __init__(self) -> None:
        self._squares: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}

    def copy(self, target: NDArray[Any], values: NDArray[Any]) -> None:
        """Copy `values` into `target`, of the same shape, whose last axis lies together."""
        axis = _nearest_axis(values)
        if axis is None:
            target[...] = values
            return
        target, values = target.swapaxes(axis, -2), values.swapaxes(axis, -2)
        upright, turned = self._buffers(values.dtype)
        width = len(turned)
        corners = [range(size) for size in values.shape[:-2]]
        corners += [range(0, values.shape[-2], width), range(0, values.shape[-1], _ROWS)]
        for corner in product(*corners):
            column, row = corner[-2:]
            square: tuple[int | slice, ...] = corner[:-2]
            square += (slice(column, column + width), slice(row, row + _ROWS))
            part = values[square]
            before = upright[: part.shape[1], : part.shape[0]]
            after = turned[: part.shape[0], : part.shape[1]]
            before[...] = part.T
            after[...] = before.T
            target[square] = after

    def _buffers(self, dtype: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return a square as it lies in memory, and one as it lies in the result."""
        import numpy as np

        if dtype.itemsize not in self._squares:
            width, pad = _ROW_NBYTES // dtype.itemsize, _PAD_NBYTES // dtype.itemsize
            upright = np.empty((_ROWS, width + pad), dtype)
            self._squares[dtype.itemsize] = upright, np.empty((width, _ROWS + pad), dtype)
        return self._squares[dtype.itemsize]


def _nearest_axis(values: NDArray[Any]) -> int | None:
    """Return the axis along which elements lie together; None if the copy needs no turning."""
    if values.ndim < 2 or values.shape[-1] * values.strides[-1] <= _CACHED_NBYTES:
        return None
    steps = [(stride, axis) for axis, stride in enumerate(values.strides) if values.shape[axis] > 1]
    near, axis = min(steps, default=(0, 0))
    if near == values.strides[-1] or values.shape[axis] * values.shape[-1] < _LEAST_NUMEL:
        return None
    return axis
