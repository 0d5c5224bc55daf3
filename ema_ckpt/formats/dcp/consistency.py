"""What a `.metadata` says twice and differently, and what in it is of no known class.

Torch writes three lists: entries with shapes and chunks, places of items in files, and paths in the
state dict (`state_dict_metadata`, `storage_data`, `planner_data`). Each is made from the others'
names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ema_ckpt.core.catalog import UnknownEntry
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.dcp.metadata import Metadata, TensorEntry

_METADATA = ".metadata"


def find_mismatches(
    parts: Sequence[Metadata], recorded: Iterable[str]
) -> tuple[tuple[str, str], ...]:
    """Names, and what is wrong with each. Digests are `recorded` of tensors that were written.

    A planner of a user's own may store under other names than those of the state dict: names of the
    two lists that differ are damage only where it is one alone, by one bit.
    """
    names = {name for part in parts for name in (*part.entries, *part.opaque)}
    found = {
        name: f"{sidecar.SIDECAR}: a digest is recorded of {name!r}, which {_METADATA} does not list; if another "
        f"checkpoint was saved over this one, delete {sidecar.SIDECAR}"
        for name in recorded
        if name not in names
    }
    for part in parts:
        found.update(_paths(part))
        found.update(_places(part))
    return tuple(found.items())


def _paths(part: Metadata) -> Iterator[tuple[str, str]]:
    """The one name that paths and entries have differently, if it is but one and a bit apart."""
    moved = [(name, ".".join(map(str, path))) for name, path in part.paths.items()]
    moved = [(name, joined) for name, joined in moved if joined != name]
    lost = [name for name in part.entries if name not in part.paths] if part.spare else []
    if len(moved) == 1 and not lost and _near(*moved[0]):
        name, joined = moved[0]
        yield name, f"{_METADATA}: planner_data places {name!r} at {joined!r}"
    if len(lost) == len(part.spare) == 1 and _near(lost[0], part.spare[0]):
        message = f"planner_data has a path for {part.spare[0]!r}, which is not stored, and none for {lost[0]!r}"
        yield lost[0], f"{_METADATA}: {message}"


def _near(a: str, b: str) -> bool:
    """Whether two names differ in one bit of one character, as damage makes them."""
    odd = [ord(x) ^ ord(y) for x, y in zip(a, b, strict=False) if x != y]
    return len(a) == len(b) and len(odd) == 1 and odd[0].bit_count() == 1


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


def unknown_entries(parts: Sequence[Metadata]) -> tuple[UnknownEntry, ...]:
    """Entries whose class is unknown, with all their places."""
    places: dict[str, list[UnknownEntry]] = {}
    kinds: Mapping[str, str] = {name: kind for part in parts for name, kind in part.opaque.items()}
    for part in parts:
        for (name, _), place in part.items.items():
            if name in kinds:
                held = UnknownEntry(name, kinds[name], place.file, place.offset, place.nbytes)
                places.setdefault(name, []).append(held)
    return tuple(
        one for name, kind in kinds.items() for one in places.get(name, [UnknownEntry(name, kind)])
    )
