"""Which stored tensor goes where: names, shapes and dtypes compared before anything is read or
written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.names import canonical
from ema_ckpt.resume.flatten import Pieces


@dataclass(frozen=True, slots=True, eq=False)
class RestoreTarget:
    """A tensor to restore into: its names (several if it is tied), its tree, and what this rank
    holds of it.
    """

    names: tuple[str, ...]
    pieces: Pieces
    needed: bool = True  # whether a source without it is incomplete


@dataclass(slots=True, eq=False)
class Match:
    """Pairs of target and stored tensor of one tree, and what is left over or does not fit."""

    tree: str
    pairs: list[tuple[RestoreTarget, Tensor]] = field(default_factory=list)
    missing: list[RestoreTarget] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    casts: dict[str, list[str]] = field(default_factory=dict)  # what changes, and of which names

    def full(self, target: RestoreTarget) -> str:
        """The full name of a target."""
        return f"{self.tree}.{target.names[0]}"


def match(
    tree: str,
    targets: Iterable[RestoreTarget],
    sources: Mapping[str, Tensor],
    *,
    strict: bool,
    elsewhere: frozenset[str] = frozenset(),
) -> Match:
    """Pair targets with the stored tensors of one tree, by name or, failing that, by name without
    wrapper prefixes.

    Args:
        elsewhere: names that only other ranks have, which are not unexpected here.
    """
    found = Match(tree)
    plain = _canonical_names(sources)
    used: set[str] = set()
    theirs = elsewhere.union(plain[name] for name in elsewhere if name in plain)
    for target in targets:
        name = next((n for n in target.names if n in sources), None)
        if name is None:
            name = next((plain[n] for n in target.names if n in plain), None)
            if name is not None:
                found.renamed[sources[name].name] = found.full(target)
        used.update((*target.names, *(plain[n] for n in target.names if n in plain)))
        if name is None:
            if target.needed:
                found.missing.append(target)
            continue
        problem = _misfit(found, target, sources[name], strict=strict)
        if problem:
            found.misfits.append(problem)
        else:
            found.pairs.append((target, sources[name]))
    found.unexpected = [
        tensor.name for name, tensor in sources.items() if name not in used and name not in theirs
    ]
    return found


def _misfit(found: Match, target: RestoreTarget, source: Tensor, *, strict: bool) -> str | None:
    """Why a stored tensor cannot go into its target, or None; casts are noted."""
    name, shape, dtype = found.full(target), target.pieces.shape, target.pieces.dtype
    here, there = str(dtype).removeprefix("torch."), source.dtype.name
    if source.shape != shape:
        return f"{name!r} has shape {list(source.shape)} there and {list(shape)} here"
    if here == there:
        return None
    both_floating = dtype.is_floating_point and source.dtype.is_castable
    widens = both_floating and torch.promote_types(dtype, getattr(torch, there)) is dtype
    if not widens and (strict or not both_floating):
        return f"{name!r} is {there} there and {here} here, which would lose values; strict=False casts it"
    change = f"{there} there, cast to {here}" + ("" if widens else " with loss")
    found.casts.setdefault(change, []).append(target.names[0])
    return None


def _canonical_names(sources: Mapping[str, Tensor]) -> dict[str, str]:
    """Stored names by what they are without wrapper prefixes, where that is unambiguous and
    different.
    """
    found: dict[str, list[str]] = {}
    for name in sources:
        found.setdefault(canonical(name), []).append(name)
    return {
        plain: names[0] for plain, names in found.items() if len(names) == 1 and names[0] != plain
    }
