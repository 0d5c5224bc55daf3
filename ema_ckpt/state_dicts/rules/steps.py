"""Steps of a rule: what is done to the tensors of one group, and how each step is undone.

The tensors are *columns*, one for each name pattern; a column has one member, or as many as the
stacked placeholder has numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd, prod
from typing import NamedTuple, Protocol

from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.text import counted
from ema_ckpt.state_dicts.rules.views import (
    View,
    concatenate,
    cut,
    flatten,
    insert_axis,
    permute,
    remove_axis,
    unflatten,
)

Column = Mapping[int | None, View]
"""The members of one pattern by number; the key of an only member is None."""


class Step(Protocol):
    """One operation on columns."""

    def apply(self, columns: Sequence[Column]) -> list[Column]:
        """Return the columns after the step.

        Raises:
            UsageError: `usage` if shapes or types do not allow it.
        """
        ...

    def inverse(self) -> Step | None:
        """Return the step that undoes it, or None if nothing does."""
        ...

    def width(self, columns: int) -> int:
        """Return how many columns it makes of so many.

        Raises:
            UsageError: `usage` if it does not take so many.
        """
        ...


class Stack(NamedTuple):
    """Join the members of each column along a new axis; so many of them, if that is given."""

    field: str
    dim: int = 0
    members: int | None = None

    def apply(self, columns: Sequence[Column]) -> list[Column]:
        result: list[Column] = []
        for column in columns:
            views = [column[member] for member in range(len(column))]
            _check_alike(views)
            dim = _axis(self.dim, len(views[0].shape) + 1, "stack")
            stacked = concatenate([insert_axis(view, dim) for view in views], dim)
            result.append({None: stacked})
        return result

    def inverse(self) -> Step:
        return Unstack(self.field, self.dim, self.members)

    def width(self, columns: int) -> int:
        return columns


class Unstack(NamedTuple):
    """Cut each tensor into one member for each index of an axis, which goes."""

    field: str
    dim: int = 0
    members: int | None = None

    def apply(self, columns: Sequence[Column]) -> list[Column]:
        result: list[Column] = []
        for column in columns:
            view = column[None]
            dim = _axis(self.dim, len(view.shape), "unstack")
            count = view.shape[dim]
            if count == 0 or self.members not in (None, count):
                expected = "at least 1" if self.members is None else str(self.members)
                message = f"unstack: expected {expected} on axis {dim}, found {list(view.shape)}"
                raise UsageError("usage", message)
            members: dict[int | None, View] = {}
            for member in range(count):
                members[member] = remove_axis(cut(view, dim, member, 1), dim)
            result.append(members)
        return result

    def inverse(self) -> Step:
        return Stack(self.field, self.dim, self.members)

    def width(self, columns: int) -> int:
        return columns


class Concatenate(NamedTuple):
    """Join the columns along an axis, in `groups` rounds: of each the first part, then the second.

    Attributes:
        sizes: how the lengths of the columns on that axis relate (1, 1 if not given), which tells
            the inverse where to cut.
    """

    dim: int
    sizes: tuple[int, ...]
    groups: int = 1

    def apply(self, columns: Sequence[Column]) -> list[Column]:
        joined: dict[int | None, View] = {}
        for member in columns[0]:
            views = [column[member] for column in columns]
            dim = _axis(self.dim, len(views[0].shape), "concatenate")
            _check_alike(views, dim)
            self._check_sizes([view.shape[dim] for view in views])
            if self.groups > 1:
                views = [_in_groups(view, dim, self.groups) for view in views]
                joined[member] = flatten(concatenate(views, dim + 1), dim, 2)
            else:
                joined[member] = concatenate(views, dim)
        return [joined]

    def _check_sizes(self, lengths: Sequence[int]) -> None:
        unit = sum(lengths) // (sum(self.sizes) * self.groups)
        expected = [unit * size * self.groups for size in self.sizes]
        if list(lengths) != expected:
            rule = f"sizes = {list(self.sizes)}"
            rule += f" in {self.groups} groups" if self.groups > 1 else ""
            message = f"concatenate: the lengths {list(lengths)} are not as {rule} says"
            raise UsageError("usage", f"{message}; give {self._ratio(lengths)}")

    def _ratio(self, lengths: Sequence[int]) -> str:
        """Return the `sizes` that fit `lengths`, or say in words what they are."""
        unit = gcd(*lengths)
        if unit == 0 or unit % self.groups:
            return "the sizes that they have to each other"
        return f"sizes = {[length // unit for length in lengths]}"

    def inverse(self) -> Step:
        return Split(self.dim, self.sizes, self.groups)

    def width(self, columns: int) -> int:
        if columns != len(self.sizes):
            takes = counted(len(self.sizes), "tensor")
            raise UsageError("usage", f"concatenate takes {takes} by its sizes; it gets {columns}")
        return 1


class Split(NamedTuple):
    """Cut the only column along an axis into several: what `Concatenate` undoes."""

    dim: int
    sizes: tuple[int, ...]
    groups: int = 1

    def apply(self, columns: Sequence[Column]) -> list[Column]:
        parts: list[dict[int | None, View]] = [{} for _ in self.sizes]
        for member, view in columns[0].items():
            dim = _axis(self.dim, len(view.shape), "split")
            unit, rest = divmod(view.shape[dim], sum(self.sizes) * self.groups)
            if rest:
                ways = f"{sum(self.sizes)} parts"
                ways += f" in {self.groups} groups" if self.groups > 1 else ""
                message = f"split: axis {dim} of {list(view.shape)} does not divide into {ways}"
                raise UsageError("usage", message)
            grouped = _in_groups(view, dim, self.groups) if self.groups > 1 else view
            start, axis = 0, dim + (self.groups > 1)
            for part, size in zip(parts, self.sizes, strict=True):
                piece = cut(grouped, axis, start, size * unit)
                part[member] = flatten(piece, dim, 2) if self.groups > 1 else piece
                start += size * unit
        return list(parts)

    def inverse(self) -> Step:
        return Concatenate(self.dim, self.sizes, self.groups)

    def width(self, columns: int) -> int:
        if columns != 1:
            raise UsageError("usage", f"split takes 1 tensor; it gets {columns}")
        return len(self.sizes)


class Order(NamedTuple):
    """Bring the columns into another order: the first is the one at `places[0]`."""

    places: tuple[int, ...]

    def apply(self, columns: Sequence[Column]) -> list[Column]:
        return [columns[place] for place in self.places]

    def inverse(self) -> Step:
        return Order(_inverse(self.places))

    def width(self, columns: int) -> int:
        if sorted(self.places) != list(range(columns)):
            message = f"order = {list(self.places)} does not name each of {columns} tensors once"
            raise UsageError("usage", message)
        return columns


class Permute(NamedTuple):
    """Reorder the axes of each tensor as `torch.permute` does."""

    axes: tuple[int, ...]

    def apply(self, columns: Sequence[Column]) -> list[Column]:
        return _each(columns, self._change)

    def _change(self, view: View) -> View:
        if sorted(self.axes) != list(range(len(view.shape))):
            message = f"permute = {list(self.axes)} does not name each axis of {list(view.shape)}"
            raise UsageError("usage", message)
        return permute(view, self.axes)

    def inverse(self) -> Step:
        return Permute(_inverse(self.axes))

    def width(self, columns: int) -> int:
        return columns


class Transpose(NamedTuple):
    """Exchange two axes of each tensor."""

    first: int
    second: int

    def apply(self, columns: Sequence[Column]) -> list[Column]:
        return _each(columns, self._change)

    def _change(self, view: View) -> View:
        ndim = len(view.shape)
        axes = list(range(ndim))
        a, b = _axis(self.first, ndim, "transpose"), _axis(self.second, ndim, "transpose")
        axes[a], axes[b] = axes[b], axes[a]
        return permute(view, axes)

    def inverse(self) -> Step:
        return self

    def width(self, columns: int) -> int:
        return columns


class Unflatten(NamedTuple):
    """Replace an axis of each tensor by several of those sizes, one of which may be -1."""

    dim: int
    sizes: tuple[int, ...]

    def apply(self, columns: Sequence[Column]) -> list[Column]:
        return _each(columns, self._change)

    def _change(self, view: View) -> View:
        dim = _axis(self.dim, len(view.shape), "unflatten")
        length = view.shape[dim]
        known = prod([size for size in self.sizes if size != -1])
        sizes = [length // max(known, 1) if size == -1 else size for size in self.sizes]
        if prod(sizes) != length:
            message = f"axis {dim} of {list(view.shape)} is not {list(self.sizes)}"
            raise UsageError("usage", f"unflatten: {message}")
        return unflatten(view, dim, sizes)

    def inverse(self) -> Step:
        last = len(self.sizes) - 1
        return Flatten(self.dim if self.dim >= 0 else self.dim - last, len(self.sizes), self.sizes)

    def width(self, columns: int) -> int:
        return columns


class Flatten(NamedTuple):
    """Replace some axes of each tensor from `dim` on by one; `sizes` are theirs, if given."""

    dim: int
    axes: int
    sizes: tuple[int, ...] | None = None

    def apply(self, columns: Sequence[Column]) -> list[Column]:
        return _each(columns, self._change)

    def _change(self, view: View) -> View:
        dim = _axis(self.dim, len(view.shape), "flatten")
        found = view.shape[dim : dim + self.axes]
        fits = len(found) == self.axes
        for size, wanted in zip(found, self.sizes or found, strict=False):
            fits = fits and wanted in (-1, size)
        if not fits:
            wanted_sizes = "" if self.sizes is None else f" of sizes {list(self.sizes)}"
            message = f"{list(view.shape)} has no {self.axes} axes from {dim} on{wanted_sizes}"
            raise UsageError("usage", f"flatten: {message}")
        return flatten(view, dim, self.axes)

    def inverse(self) -> Step | None:
        if self.sizes is None:
            return None
        return Unflatten(self.dim if self.dim >= 0 else self.dim + self.axes - 1, self.sizes)

    def width(self, columns: int) -> int:
        return columns


def _each(columns: Sequence[Column], change: Callable[[View], View]) -> list[Column]:
    return [{member: change(view) for member, view in column.items()} for column in columns]


def _in_groups(view: View, dim: int, groups: int) -> View:
    return unflatten(view, dim, (groups, view.shape[dim] // groups))


def _axis(dim: int, ndim: int, step: str) -> int:
    """Return an axis that may count from the end as one that counts from the first."""
    if not -ndim <= dim < ndim:
        raise UsageError("usage", f"{step}: there is no axis {dim} in a tensor of {ndim} axes")
    return dim % ndim


def _inverse(places: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(places)), key=lambda place: places[place]))


def _check_alike(views: Sequence[View], free: int | None = None) -> None:
    """Check that tensors to be joined have one type, and one shape apart from the axis `free`."""
    first = views[0]
    for view in views:
        if view.dtype != first.dtype:
            dtypes = f"{first.dtype.name} and {view.dtype.name}"
            raise UsageError("usage", f"tensors of different types are to be joined: {dtypes}")
        fits = len(first.shape) == len(view.shape)
        for axis, sizes in enumerate(zip(first.shape, view.shape, strict=False)):
            fits = fits and (axis == free or sizes[0] == sizes[1])
        if not fits:
            shown = f"{list(first.shape)} and {list(view.shape)}"
            raise UsageError("usage", f"tensors whose shapes do not fit are to be joined: {shown}")
