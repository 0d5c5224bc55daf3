"""What a `.metadata` says twice and differently, and what in it is of no known class.

Torch writes three lists: entries with shapes and chunks, places of items in files, and paths in the state dict
(`state_dict_metadata`, `storage_data`, `planner_data`). Each is made from the others' names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ema_ckpt.errors import shown
from ema_ckpt.formats import record
from ema_ckpt.formats.dcp_metadata import Metadata, TensorEntry

__all__ = ["Unread", "contradictions", "unread"]

_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Unread:
    """An entry of a class that is not known here, and one place of its bytes; `file` is empty if it has none."""

    name: str
    kind: str
    file: str = ""
    offset: int = 0
    nbytes: int = 0


def contradictions(parts: Sequence[Metadata], recorded: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Names, and what is wrong with each. Digests are `recorded` of tensors that were written.

    A planner of a user's own may store under other names than those of the state dict: names of the two lists
    that merely differ are no damage, names that are one character apart are.
    """
    names = {name for part in parts for name in (*part.entries, *part.opaque)}
    found = {
        name: f"{record.SIDECAR}: a digest is recorded of {name!r}, which {_METADATA} does not list; if another "
        f"checkpoint was saved over this one, delete {record.SIDECAR}"
        for name in recorded
        if name not in names
    }
    for part in parts:
        found.update(_paths(part))
        found.update(_places(part))
    return tuple(found.items())


def _paths(part: Metadata) -> Iterator[tuple[str, str]]:
    for name, path in part.paths.items():
        if _near(".".join(map(str, path)), name):
            yield name, f"{_METADATA}: planner_data places {name!r} at the path {path!r}"
    lost = [name for name in part.entries if name not in part.paths] if part.spare else []
    for name in lost:
        if any(_near(name, other) for other in part.spare):
            others = f"{_METADATA}: planner_data has a path for {shown(part.spare)}, which is not stored"
            yield name, f"{others}, and none for {name!r}"


def _near(a: str, b: str) -> bool:
    """Whether two names are one character apart, as one flipped bit makes them."""
    return len(a) == len(b) and sum(x != y for x, y in zip(a, b, strict=True)) == 1


def _places(part: Metadata) -> Iterator[tuple[str, str]]:
    begins = {
        name: {offsets for offsets, _ in entry.chunks}
        for name, entry in part.entries.items()
        if isinstance(entry, TensorEntry)
    }
    for (name, offsets), place in part.items.items():
        where = f"{_METADATA}: storage_data has a place in {place.file} for {name!r}"
        if name in begins:
            if offsets not in begins[name]:
                yield name, f"{where} at {list(offsets or ())}, where no chunk of it begins"
        elif name not in part.entries and name not in part.opaque:
            yield name, f"{where}, which is no entry"


def unread(parts: Sequence[Metadata]) -> tuple[Unread, ...]:
    """Entries whose class is unknown, with all their places."""
    places: dict[str, list[Unread]] = {}
    kinds: Mapping[str, str] = {name: kind for part in parts for name, kind in part.opaque.items()}
    for part in parts:
        for (name, _), place in part.items.items():
            if name in kinds:
                held = Unread(name, kinds[name], place.file, place.offset, place.nbytes)
                places.setdefault(name, []).append(held)
    return tuple(one for name, kind in kinds.items() for one in places.get(name, [Unread(name, kind)]))
