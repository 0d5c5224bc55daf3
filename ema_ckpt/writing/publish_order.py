"""In which order objects appear that together are one checkpoint, where nothing can be renamed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from ema_ckpt.core.crc import crc32
from ema_ckpt.core.display import displayed
from ema_ckpt.core.errors import AccessError
from ema_ckpt.core.text import shown
from ema_ckpt.storage.object_store import ObjectStore


class PublishOrder(NamedTuple):
    """The objects of a target, and which of them appear last.

    Attributes:
        files: bytes of every file of the plan. names: the object of each.
        late: objects that appear at the end, in this order: those that replace one, which nobody
            shall see while the old checkpoint is the valid one, and last the marker.
        existing: objects that were there before; they are never deleted as this run's own.
        before: CRC-32 of a directory's marker as it was before, if it was.
    """

    files: Mapping[str, int]
    names: Mapping[str, str]
    late: Sequence[str]
    existing: Set[str]
    before: int | None = None

    @property
    def marker(self) -> str:
        """The object that makes the target complete."""
        return self.late[-1]

    def removable(self, written: Iterable[str]) -> list[str]:
        """Of the objects that this run wrote, those that were not there before, the last first."""
        return [name for name in reversed(list(written)) if name not in self.existing]

    def delete_written(
        self, store: ObjectStore, written: Iterable[str], *, is_open: bool = False
    ) -> None:
        """Delete what a run wrote that has failed.

        All of it stays, and is told, if the marker may be another one by now: of this run, where it
        replaces one, or of another run that wrote objects of the same names.

        Args:
            is_open: the store may yet write the marker of this run, so that what is there tells
                nothing.
        """
        names = list(written)
        own = self.removable(names)
        is_fresh = self.marker in names and self.marker not in self.existing
        is_open = is_open and own != [self.marker]  # alone it is complete whenever it appears
        if own and (is_open or (not is_fresh and not self._is_old(store))):
            message = f"{self.marker} may be another one by now, so {shown(own)} were left there"
            remedy = "look with verify, and write again to replace what is there"
            text = displayed(f"{store.url}: {message}; {remedy}")
            logging.getLogger("ema_ckpt").warning(text)
            return
        store.delete(own)

    def _is_old(self, store: ObjectStore) -> bool:
        """Whether the marker is known to be the one that was there before, or still missing."""
        try:
            return marker_crc(store, self.marker) == self.before
        except AccessError:
            return False


def marker_crc(store: ObjectStore, marker: str) -> int | None:
    """CRC-32 of the object that completes a directory; None if it is not there."""
    data = store.read(marker)
    return None if data is None else crc32(data)
