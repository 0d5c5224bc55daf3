"""Find facts that a `.metadata` states twice and differently, and entries of unknown classes.

Torch writes three lists: entries with shapes and chunks, places of items in files, and paths in the
state dict (`state_dict_metadata`, `storage_data`, `planner_data`). Each is made from the others'
names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ema_ckpt.core.catalog import UnknownEntry
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.dcp.metadata import Metadata
from ema_ckpt.formats.dcp.metadata_values import ItemPlace, differ_by_one_bit

_METADATA = ".metadata"


def find_mismatches(
    parts: Sequence[Metadata], recorded: Iterable[str]
) -> tuple[tuple[str, str], ...]:
    """Return names, and the problem with each; digests are `recorded` of tensors written."""
    names: set[str] = set()
    for part in parts:
        names.update(part.entries, part.opaque)
    remedy = f"if another checkpoint was saved over this one, delete {sidecar.SIDECAR}"
    mismatches: dict[str, str] = {}
    for name in recorded:
        if name not in names:
            problem = f"a digest is recorded of {name!r}, which {_METADATA} does not list"
            mismatches[name] = f"{sidecar.SIDECAR}: {problem}; {remedy}"
    for part in parts:
        for name, problem in _place_mismatches(part):
            mismatches[name] = f"{_METADATA}: {problem}"
    return tuple(mismatches.items())


def path_mismatches(part: Metadata) -> Iterator[tuple[str, str]]:
    """Find names that differ between paths and entries by one bit.

    A planner of a user's own may store under other names than those of the state dict: names of the
    two lists that differ are damage only where it is one alone, by one bit, or several that all
    differ by the same bit, for a pickle holds the name of a tree once.
    """
    moved: list[tuple[str, str]] = []
    for name, path in part.paths.items():
        joined = ".".join(map(str, path))
        if joined != name:
            # One that is far longer, as many paths through one long key are, is no damage of a bit.
            moved.append((name, joined if len(joined) == len(name) else ""))
    lost = [name for name in part.entries if name not in part.paths] if part.spare else []
    if not lost and _differ_by_the_same_bit(moved):
        for name, joined in moved:
            yield name, f"planner_data places {name!r} at {joined!r}"
    if len(lost) == len(part.spare) == 1:
        name, spare = lost[0], part.spare[0]
        if differ_by_one_bit(name, spare):
            problem = f"planner_data has a path for {spare!r}, which is not stored"
            yield name, f"{problem}, and none for {name!r}"


def _differ_by_the_same_bit(pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether the two names of every pair differ by one bit, of the same letter in all."""
    letters: set[tuple[str, str]] = set()
    for a, b in pairs:
        if not differ_by_one_bit(a, b):
            return False
        letters.update((x, y) for x, y in zip(a, b, strict=True) if x != y)
        if len(letters) > 1:
            return False
    return True


def _place_mismatches(part: Metadata) -> Iterator[tuple[str, str]]:
    for (name, offsets), place in part.items.strays(part.entries):
        problem = f"storage_data has a place in {place.file} for {name!r}"
        if part.entries.get(name) is not None:
            yield name, f"{problem} at {list(offsets or ())}, where no chunk of it begins"
        elif name not in part.entries and name not in part.opaque:
            yield name, f"{problem}, which is no entry"


def unknown_entries(parts: Sequence[Metadata]) -> tuple[UnknownEntry, ...]:
    """List entries whose class is unknown, with all their places."""
    kinds: dict[str, str] = {}
    for part in parts:
        kinds |= part.opaque
    entries: list[UnknownEntry] = []
    places: dict[str, list[ItemPlace]] = {name: [] for name in kinds}
    for part in parts if kinds else ():
        part.items.add_places(places)
    for name, kind in kinds.items():
        spans = [UnknownEntry(name, kind, p.file, p.offset, p.nbytes) for p in places[name]]
        entries += spans or [UnknownEntry(name, kind)]
    return tuple(entries)
