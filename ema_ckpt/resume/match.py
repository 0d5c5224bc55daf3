"""Pair live tensors with stored ones by name, shape and dtype, before any is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import canonical
from ema_ckpt.core.text import shown
from ema_ckpt.resume.flatten import LocalShards


@dataclass(frozen=True, slots=True, eq=False)
class RestoreTarget:
    """A live tensor to restore into: its names (several if it is tied) and this rank's shards."""

    names: tuple[str, ...]
    value: LocalShards


@dataclass(slots=True, eq=False)
class Match:
    """Pairs of target and stored tensor of one tree, and what is left over or does not fit."""

    tree: str
    pairs: list[tuple[RestoreTarget, Tensor]] = field(default_factory=list)
    missing: list[RestoreTarget] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    casts: dict[str, list[str]] = field(default_factory=dict)  # names by kind of cast

    def full_name(self, target: RestoreTarget) -> str:
        """Name of a target with its tree's."""
        return f"{self.tree}.{target.names[0]}"

    def refuse(self, path: str, *, strict: bool, allowed: Iterable[str] = ()) -> None:
        """Refuse misfits, and under `strict` missing and unexpected names.

        Args:
            path: the checkpoint, for messages.
            allowed: names of targets that may be missing.

        Raises:
            SourceError: `index-mismatch` or `incomplete`.
        """
        if self.misfits:
            more = f" and {len(self.misfits) - 10} more" if len(self.misfits) > 10 else ""
            message = f"{path}: nothing was restored: {'; '.join(self.misfits[:10])}{more}"
            raise SourceError("index-mismatch", message)
        if not strict:
            return
        missing = [
            self.full_name(target) for target in self.missing if target.names[0] not in allowed
        ]
        reasons = []
        if missing:
            reasons.append(f"it lacks {shown(missing)}")
        if self.unexpected:
            reasons.append(f"it has {shown(self.unexpected)}, which this state has not")
        if reasons:
            message = f"{path}: nothing was restored: {' and '.join(reasons)}"
            raise SourceError("incomplete", f"{message}; strict=False restores the rest")


def match(
    tree: str,
    targets: Iterable[RestoreTarget],
    stored: Mapping[str, Tensor],
    *,
    strict: bool,
    remote_names: frozenset[str] = frozenset(),
) -> Match:
    """Pair targets with the stored tensors of one tree, by name or else without wrapper prefixes.

    Args:
        remote_names: names that only other ranks have, which are not unexpected here.
    """
    result = Match(tree)
    unwrapped = _unwrapped_names(stored)
    used = set(remote_names)
    used.update(unwrapped[name] for name in remote_names if name in unwrapped)
    for target in targets:
        exact = [name for name in target.names if name in stored]
        wrapped = [unwrapped[name] for name in target.names if name in unwrapped]
        used.update(exact, wrapped)
        if not exact and not wrapped:
            result.missing.append(target)
            continue
        source = stored[exact[0] if exact else wrapped[0]]
        if not exact:
            result.renamed[source.name] = result.full_name(target)
        misfit = _compare(result, target, source, strict=strict)
        if misfit is None:
            result.pairs.append((target, source))
        else:
            result.misfits.append(misfit)
    result.unexpected = [tensor.name for name, tensor in stored.items() if name not in used]
    return result


def _compare(result: Match, target: RestoreTarget, source: Tensor, *, strict: bool) -> str | None:
    """Why a stored tensor cannot go into its target, or None; a cast is noted in `result`."""
    name, shape, dtype = result.full_name(target), target.value.shape, target.value.dtype
    here, there = str(dtype).removeprefix("torch."), source.dtype.name
    if source.shape != shape:
        return f"{name!r} has shape {list(source.shape)} there and {list(shape)} here"
    if here == there:
        return None
    both_floating = dtype.is_floating_point and source.dtype.is_castable
    widens = both_floating and torch.promote_types(dtype, getattr(torch, there)) is dtype
    if not widens and (strict or not both_floating):
        loss = "which would lose values; strict=False casts it"
        return f"{name!r} is {there} there and {here} here, {loss}"
    cast = f"{there} there, cast to {here}" + ("" if widens else " with loss")
    result.casts.setdefault(cast, []).append(target.names[0])
    return None


def _unwrapped_names(stored: Mapping[str, Tensor]) -> dict[str, str]:
    """Stored names by their form without wrapper prefixes, where unambiguous and different."""
    names: dict[str, list[str]] = {}
    for name in stored:
        names.setdefault(canonical(name), []).append(name)
    return {bare: group[0] for bare, group in names.items() if len(group) == 1 and group[0] != bare}
