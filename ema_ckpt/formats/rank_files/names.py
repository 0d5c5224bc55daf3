"""Names of rank files, and the ranks that a family of them lacks.

A rank file is what one process wrote of a checkpoint: `model_world_size_4_rank_0.pt`,
`ema_rank0.pt`, `model.rank-3.bin`; `consolidated.00.pth` of Llama. Files whose names differ in the
number alone are a family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import TORCH_SUFFIXES
from ema_ckpt.core.text import shown

_SUFFIX = "|".join(re.escape(suffix) for suffix in TORCH_SUFFIXES)
_RANK_FILE = re.compile(
    rf"((?:.*?[-_.])??rank[-_.]?|consolidated\.)(\d+)((?!\d).*?)({_SUFFIX})",
    re.ASCII | re.DOTALL,
)
_RANK_WORD = re.compile(r"rank[-_.]?\Z")
_WORLD_SIZE = re.compile(r"(?:^|(?<=[-_.]))world[-_]?size[-_.]?(\d+)(?:[-_.]|\Z)", re.ASCII)
_SEPARATORS = "-_."

_MAX_ABSENT = 1000


class Family(NamedTuple):
    """What the file names of one checkpoint share: the text before and after the rank's number."""

    head: str
    tail: str
    suffix: str

    @property
    def pattern(self) -> str:
        """The names of all members as a glob: `model_world_size_4_rank_*.pt`."""
        return f"{self.head}*{self.tail}{self.suffix}"

    @property
    def world_size(self) -> int | None:
        """The number of ranks, if the names tell it."""
        match = _WORLD_SIZE.search(self.head) or _WORLD_SIZE.search(self.tail)
        return int(match[1]) if match else None

    @property
    def stem(self) -> str:
        """All of the name but the rank and the world size: `ep0-ba4` of `ep0-ba4-rank0.pt`."""
        texts = (_RANK_WORD.sub("", self.head), self.tail)
        kept = [_WORLD_SIZE.sub("", text).strip(_SEPARATORS) for text in texts]
        return "_".join(filter(None, kept))

    @property
    def name(self) -> str:
        """The name a person would give it: `model` of `model_world_size_4_rank_0.pt`."""
        before = _WORLD_SIZE.sub("", _RANK_WORD.sub("", self.head)).rstrip(_SEPARATORS)
        return before or self.stem


def _parse(name: str) -> tuple[Family, int] | None:
    match = _RANK_FILE.fullmatch(name)
    if match is None:
        return None
    head, rank, tail, suffix = match.groups()
    return Family(head, tail, suffix), int(rank)


def family_of(name: str) -> Family | None:
    """Return the family of a file of this name, or None if it names no rank."""
    parsed = _parse(name)
    return parsed[0] if parsed else None


def families(names: Iterable[str]) -> dict[Family, list[str]]:
    """Group the rank files among `names` by family, each in the order of ranks."""
    ranked: dict[Family, list[tuple[int, str]]] = {}
    for name in names:
        parsed = _parse(name)
        if parsed is not None:
            family, rank = parsed
            ranked.setdefault(family, []).append((rank, name))
    ordered = {}
    for family, files in ranked.items():
        ordered[family] = [name for _, name in sorted(files)]
    return ordered


def missing_ranks(names: Iterable[str]) -> tuple[int, list[int]]:
    """Return the world size of one family's files, and the ranks that are not there.

    Where the names do not tell the world size, it is one more than the highest rank; a single file
    is then taken for all there is.
    """
    parsed = list(filter(None, map(_parse, names)))
    ranks = [rank for _, rank in parsed]
    for family, _ in parsed:
        if family.world_size:
            return family.world_size, absent_ranks(ranks, family.world_size)
    if len(ranks) == 1:
        return 1, []
    world_size = max(ranks, default=-1) + 1
    return world_size, absent_ranks(ranks, world_size)


def absent_ranks(ranks: Iterable[int | None], world_size: int) -> list[int]:
    """Return the first thousand that are not there; names and files can tell any world size."""
    there = set(ranks)
    return list(islice((rank for rank in range(world_size) if rank not in there), _MAX_ABSENT))


def is_lone(names: Sequence[str]) -> bool:
    """Whether `names` is one rank's file, whose name does not tell of how many."""
    family = family_of(names[0])
    return len(names) == 1 and family is not None and family.world_size is None


def refuse_missing_ranks(names: Sequence[str], where: str) -> None:
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
        ranks += f" and {max(len(missing), world_size - len(names)) - 10} more"
    problem = f"the files of rank {ranks} of {world_size} are missing (found {shown(names)})"
    remedy = "runs on several nodes leave some ranks' files on each; bring all into one directory"
    file = names[0] if names else None
    return SourceError("incomplete", f"{where}: {problem}; {remedy}", file=file)
