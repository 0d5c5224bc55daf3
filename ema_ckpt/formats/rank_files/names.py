"""Rank files: what one process wrote of a checkpoint, told by name (`model_world_size_4_rank_0.pt`,
`ema_rank0.pt`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_RANK_FILE = re.compile(r"((?:.*?[-_.])??)(?:world_size_(\d+)_)?rank_?(\d+)(.*)\.pt", re.DOTALL)


class Family(NamedTuple):
    """What the files of one checkpoint share: the name before the rank, the world size in it, the
    name after.
    """

    stem: str
    world_size: int | None
    tail: str

    @property
    def name(self) -> str:
        """The name that a person would give it: `model` of `model_world_size_4_rank_0.pt`."""
        return self.stem.rstrip("-_.")


def _parse(name: str) -> tuple[Family, int] | None:
    match = _RANK_FILE.fullmatch(name)
    if match is None:
        return None
    stem, world_size, rank, tail = match.groups()
    return Family(stem, int(world_size) if world_size else None, tail), int(rank)


def family_of(name: str) -> Family | None:
    """The family that a file of this name belongs to, or None if it names no rank."""
    parsed = _parse(name)
    return parsed[0] if parsed else None


def families(names: Iterable[str]) -> dict[Family, list[str]]:
    """Rank files among `names` by family, each in the order of ranks."""
    ranked: dict[Family, list[tuple[int, str]]] = {}
    for name in names:
        if parsed := _parse(name):
            ranked.setdefault(parsed[0], []).append((parsed[1], name))
    return {family: [name for _, name in sorted(files)] for family, files in ranked.items()}


def missing_ranks(names: Iterable[str]) -> tuple[int, list[int]]:
    """The world size of one family's files, and the ranks that are not there.

    Where the names do not tell the world size, it is one more than the highest rank.
    """
    parsed = [one for one in map(_parse, names) if one]
    ranks = {rank for _, rank in parsed}
    world_size = next(
        (family.world_size for family, _ in parsed if family.world_size), max(ranks, default=-1) + 1
    )
    return world_size, sorted(set(range(world_size)) - ranks)
