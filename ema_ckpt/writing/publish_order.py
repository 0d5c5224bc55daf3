"""In which order objects appear that together are one checkpoint, where nothing can be renamed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple


class PublishOrder(NamedTuple):
    """The objects of a target, and which of them appear last.

    Attributes:
        files: bytes of every file of the plan. names: the object of each.
        late: objects that appear at the end, in this order: those that replace one, which nobody
            shall see while the old checkpoint is the valid one, and last the marker.
        existing: objects that were there before; they are never deleted as this run's own.
    """

    files: Mapping[str, int]
    names: Mapping[str, str]
    late: Sequence[str]
    existing: Set[str]

    @property
    def marker(self) -> str:
        """The object that makes the target complete."""
        return self.late[-1]

    def removable(self, written: Iterable[str]) -> list[str]:
        """Of the objects that this run wrote, those it may delete again, the marker first.

        None if the marker was there before and has been written, or may have been: the new
        checkpoint could be the valid one.
        """
        names = list(written)
        if self.marker in names and self.marker in self.existing:
            return []
        return [name for name in reversed(names) if name not in self.existing]
