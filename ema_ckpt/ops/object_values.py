"""Values of the objects of a checkpoint, for people: read by the safe reader, small ones only."""

from __future__ import annotations

from typing import NamedTuple

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.storage.files import is_url

_MAX_NBYTES = 64 << 10


class Unread(NamedTuple):
    """Stands for a value that was not read, and says why."""

    reason: str

    def __repr__(self) -> str:
        return f"({self.reason})"


def object_values(catalog: Catalog, most: int) -> dict[str, object]:
    """Return the values of the first `most` objects by name, `Unread` for those not read.

    Behind a URL, where each would be a request of its own, only those that the metadata holds.
    """
    values: dict[str, object] = {}
    is_remote = is_url(catalog.source.root)
    for item in catalog.objects[:most]:
        if is_remote and not item.is_inline:
            continue
        if not item.is_inline and item.nbytes > _MAX_NBYTES:
            values[item.name] = Unread(f"{item.nbytes:,} bytes")
            continue
        try:
            values[item.name] = catalog.reader.load(item)
        except EmaCkptError as error:
            values[item.name] = Unread(f"not read: {error.code}")
    return values
