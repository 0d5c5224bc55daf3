"""The memo of a pickle: objects by the numbers under which opcodes store and fetch them."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable

UNBUILT = object()  # stands for an object that a shortcut has left out


class LeftOut:
    """Objects that a shortcut has left out, of which some can still be built."""

    __slots__ = ()

    def get(self, number: int) -> object:
        """Return one of them, counted from the first, or `UNBUILT`."""
        raise NotImplementedError


class Memo:
    """Objects in the order of their numbers, for real pickles number theirs in order.

    Attributes:
        count: numbers given so far.
        items: the objects that are built. Where a shortcut has left out some, `numbers` has those
            of the others, and of the first of those that are left out together.
    """

    __slots__ = ("_is_ahead", "_nbytes", "_sparse", "count", "items", "numbers")

    def __init__(self, nbytes: int) -> None:
        """Start the memo of a pickle of so many bytes."""
        self._nbytes = nbytes
        self._is_ahead = False
        self.count = 0
        self.items: list[object] = []
        self.numbers: array[int] | None = None
        self._sparse: dict[int, object] = {}  # far ahead: a huge number costs no memory

    def put(self, number: int, value: object) -> bool:
        """Store an object; False if there is one of that number, which stays."""
        if number < self.count:
            return False
        if number > self.count:
            self._sparse[number] = value
            # A number that so short a pickle cannot count to takes Python gigabytes: it names
            # nothing that others follow.
            self._is_ahead = self._is_ahead or number < self._nbytes
        else:
            self._add(value)
        return True

    def append(self, value: object) -> None:
        """Store an object under the next number.

        Raises ValueError where some were stored ahead: the number is how many there are, and no
        pickler that counts them leaves any out.
        """
        if self._is_ahead:
            raise ValueError("numbers of the memo are left out before one that is counted")
        self._add(value)

    def _add(self, value: object) -> None:
        self.items.append(value)
        if self.numbers is not None:
            self.numbers.append(self.count)
        self.count += 1

    def replace(self, number: int, value: object) -> None:
        """Store an object in the place of another; not where a shortcut has left out some."""
        self.items[number] = value

    def get(self, number: int) -> object:
        """Return an object, or `UNBUILT`. Raises KeyError if there is none of that number."""
        if number >= self.count:
            return self._sparse[number]
        if self.numbers is None:
            return self.items[number]
        place = bisect_right(self.numbers, number) - 1
        if place < 0:
            return UNBUILT
        item, first = self.items[place], self.numbers[place]
        if isinstance(item, LeftOut):
            return item.get(number - first)
        return item if number == first else UNBUILT

    def skip(self) -> array[int]:
        """Return `numbers`, which are needed from now on."""
        if self.numbers is None:
            self.numbers = array("q", range(len(self.items)))
        return self.numbers

    def skip_to(self, count: int, kept: Iterable[tuple[int, object]]) -> None:
        """Give `count` numbers at once, of which only those of `kept` have an object."""
        numbers = self.skip()
        for number, value in kept:
            numbers.append(self.count + number)
            self.items.append(value)
        self.count += count

    def leave_out(self, objects: LeftOut, count: int) -> None:
        """Give `count` numbers to objects that are built when they are needed."""
        self.skip().append(self.count)
        self.items.append(objects)
        self.count += count

    def state(self) -> tuple[int, int]:
        """Return what `go_back` needs to forget what is stored from here on."""
        self.skip()
        return self.count, len(self.items)

    def go_back(self, state: tuple[int, int]) -> None:
        """Forget what was stored since `state`."""
        self.count, built = state
        del self.items[built:]
        del self.skip()[built:]
