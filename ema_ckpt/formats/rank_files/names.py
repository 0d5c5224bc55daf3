"""Names of rank files, and the ranks that a family of them lacks.

A rank file is what one process wrote of a checkpoint: `model_world_size_4_rank_0.pt`,
`ema_rank0.pt`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.text import shown

_RANK_FILE = re.compile(r"((?:.*?[-_.])??)(?:world_size_(\d+)_)?rank_?(\d+)(.*)\.pt", re.DOTALL)


class Family(NamedTuple):
    """What the file names of one checkpoint share: text before the rank, world size, text after."""

    stem: str
    world_size: int | None
    tail: str

    @property
    def name(self) -> str:
        """The name a person would give it: `model` of `model_world_size_4_rank_0.pt`."""
        return self.stem.rstrip("-_.")


def _parse(name: str) -> tuple[Family, int] | None:
    match = _RANK_FILE.fullmatch(name)
    if match is None:
        return None
    stem, world_size, rank, tail = match.groups()
    return Family(stem, int(world_size) if world_size else None, tail), int(rank)


def family_of(name: str) -> Family | None:
    """Return the family of a file of this name, or None if it names no rank."""
    parsed = _parse(name)
    return parsed[0] if parsed else None


def families(names: Iterable[str]) -> dict[Family, list[str]]:
    """Group the rank files among `names` by family, each in the order of ranks."""
    ranked: dict[Family, list[tuple[int, str]]] = {}
    for name in names:
        if parsed := _parse(name):
            ranked.setdefault(parsed[0], []).append((parsed[1], name))
    return {family: [name for _, name in sorted(files)] for family, files in ranked.items()}


def missing_ranks(names: Iterable[str]) -> tuple[int, list[int]]:
    """Return the world size of one family's files, and the ranks that are not there.

    Where the names do not tell the world size, it is one more than the highest rank.
    """
    parsed = [one for one in map(_parse, names) if one]
    ranks = {rank for _, rank in parsed}
    world_size = max(ranks, default=-1) + 1
    for family, _ in parsed:
        if family.world_size:
            world_size = family.world_size
            break
    return world_size, sorted(set(range(world_size)) - ranks)


def check_ranks(names: Sequence[str], where: str) -> None:
    """Check that no rank is missing among one family's files. Raises SourceError `incomplete`."""
    world_size, missing = missing_ranks(names)
    if missing:
        raise missing_error(missing, world_size, names, where)


def missing_error(
    missing: Sequence[int], world_size: int, names: Sequence[str], where: str
) -> SourceError:
    """Return the error for the files of ranks `missing` beside the files `names`."""
    ranks = ", ".join(map(str, missing[:10]))
    if len(missing) > 10:
        ranks += f" and {len(missing) - 10} more"
    problem = f"the files of rank {ranks} of {world_size} are missing (found {shown(names)})"
    remedy = "runs on several nodes leave some ranks' files on each; bring all into one directory"
    file = names[0] if names else None
    return SourceError("incomplete", f"{where}: {problem}; {remedy}", file=file)
