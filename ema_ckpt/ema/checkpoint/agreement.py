"""Whether ranks that hold the same elements of a parameter have equal values of them.

A wrapper or a device mesh keeps some of them equal: DDP its group, HSDP, hybrid FSDP and
`Replicate()` the ranks along those axes. All others are compared, by a checksum that is taken where
the values lie.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate

from ema_ckpt.comm.channel import Channel
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import StateError
from ema_ckpt.core.text import format_ranks, shown
from ema_ckpt.ema.checkpoint.listing import GlobalListing
from ema_ckpt.ema.model.shards import Shard, TrackedShard
from ema_ckpt.ema.model.tensor_kinds import on_host

_BLOCK_NUMEL = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16}  # by element size; larger elements are int32
_ODD = 0x1E3779B97F4A7C15
_RanksOfNames = Sequence[tuple[Sequence[int], Sequence[str]]]
# By name: of each rank that has it, the first element of each box and its checksum.
Checksums = list[tuple[str, list[tuple[tuple[int, ...], int]]]]


@dataclass(frozen=True, slots=True, eq=False)
class Unproven:
    """Names of parameters that several ranks hold and nothing keeps equal; the same on all ranks.

    `replicas`, on rank 0 only, are the groups of ranks that wrappers declare to be replicas.
    """

    names: frozenset[str] = frozenset()
    replicas: Collection[frozenset[int]] = field(default_factory=tuple)

    def may_differ(self, ranks: Collection[int]) -> bool:
        """Whether these ranks are declared replicas, whatever one parameter of theirs is."""
        return _are_joined(ranks, self.replicas)


def find_unproven(
    listing: GlobalListing, tree: str, parameters: Iterable[TrackedShard], ranks: Channel
) -> Unproven:
    """Find the parameters whose values are to be compared; collective.

    Args:
        listing: of all ranks; names of parameters follow `tree` in it.
        parameters: of this rank.
    """
    if ranks.size == 1:
        return Unproven()
    gathered = ranks.gather(json.dumps(_declared(parameters)).encode())
    if ranks.rank:
        return Unproven(frozenset(ranks.broadcast_json(None)))
    equal: dict[str, set[frozenset[int]]] = defaultdict(set)
    replicas: set[frozenset[int]] = set()
    for data in gathered:
        by_ranks, groups = json.loads(data)
        replicas.update(map(frozenset, groups))
        for members, names in by_ranks:
            for name in names:
                equal[name].add(frozenset(members))
    names = set()
    for (full_name, _), holders in listing.holders.items():
        name = full_name.removeprefix(tree)
        is_parameter = full_name.startswith(tree) and name in equal
        if is_parameter and not _are_joined({rank for rank, _ in holders}, equal[name]):
            names.add(name)
    return Unproven(frozenset(ranks.broadcast_json(sorted(names))), replicas)


def compare_values(
    checksums: Checksums, unproven: Unproven, full_names: Collection[str], ranks: Channel, call: str
) -> None:
    """Compare checksums of what several ranks hold, gathered once; collective.

    On rank 0 a warning names what differs, with the ranks.

    Args:
        full_names: those of the unproven parameters, as `checksums` has them.

    Raises:
        StateError: `name-collision`, on every rank: ranks that are no declared replicas hold
            different values of an unproven parameter.
    """
    digest = hashlib.sha256(json.dumps(checksums).encode()).hexdigest()
    if len(set(ranks.exchange(digest))) == 1:
        return
    gathered = ranks.gather(json.dumps(checksums).encode())

    def compare() -> dict[str, list[int]]:
        differing = _differing([json.loads(data) for data in gathered])
        refused = {
            name: holders
            for name, holders in differing.items()
            if name in full_names and not unproven.may_differ(holders)
        }
        if refused:
            raise StateError(
                "name-collision",
                f"different values under one name on ranks that no wrapper declares replicas:"
                f" {_with_ranks(refused)}; give each rank's (experts) its own name, make them"
                " equal, or wrap the model (DistributedDataParallel, fully_shard)",
            )
        return differing

    differing = run_on_all_ranks(ranks, call, compare)
    if differing:
        warnings.warn(
            f"replicas-differ: ranks hold different values of {_with_ranks(differing)}; those of"
            " the lowest rank are taken. What each has of its own goes into extra under names that"
            " tell the rank",
            stacklevel=3,
        )


def checksum(values: Tensor) -> int:
    """Return a checksum of a tensor's bits in row-major order: CRC-32 on the host, else words."""
    if values.device.type != "cpu":
        return sum_of_words(values)
    data: Any = on_host(values).contiguous().view(-1).view(torch.uint8).numpy()
    return crc32(data)


def sum_of_words(values: Tensor) -> int:
    """Return the sum of a tensor's words with odd weights by position, modulo 2^64, on its device.

    One changed word changes it for sure, since an odd weight has an inverse.
    """
    values = values.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    words = values.view(_WORDS.get(values.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for block in torch.split(words, _BLOCK_NUMEL):
        weights = torch.arange(block.numel(), device=words.device).mul_(_ODD).bitwise_or_(1)
        total = total * _ODD + weights.mul_(block).sum()
    return int(total)


def _declared(parameters: Iterable[TrackedShard]) -> tuple[_RanksOfNames, list[list[int]]]:
    """Return the ranks that are kept equal with names, and the groups of declared replicas."""
    names: dict[tuple[int, ...], list[str]] = defaultdict(list)
    groups: dict[tuple[int, ...], None] = {}
    for tracked in parameters:
        shard = tracked.shard
        replicas: tuple[int, ...] = ()
        if shard.replica is not None:
            replicas = tuple(dist.get_process_group_ranks(shard.replica.group))
            groups.setdefault(replicas)
        together = {dist.get_rank(), *replicas, *_along_replicate_axes(shard)}
        names[tuple(sorted(together))] += shard.names
    return list(names.items()), list(map(list, groups))


def _along_replicate_axes(shard: Shard) -> list[int]:
    """Return the ranks that differ from this one only in axes along which a mesh replicates."""
    if shard.mesh is None or shard.placements is None:
        return []
    coordinate = shard.mesh.get_coordinate()
    if coordinate is None:
        return []
    index = [
        slice(None) if isinstance(placement, Replicate) else at
        for placement, at in zip(shard.placements, coordinate, strict=True)
    ]
    ranks: list[int] = shard.mesh.mesh[tuple(index)].reshape(-1).tolist()
    return ranks


def _are_joined(ranks: Collection[int], groups: Collection[frozenset[int]]) -> bool:
    """Return whether groups, through common members, join all of these ranks."""
    wanted = frozenset(ranks)
    if len(wanted) <= 1 or any(wanted <= group for group in groups):
        return True
    reached = frozenset([min(wanted)])
    while not wanted <= reached:
        near = [group for group in groups if group & reached]
        grown = reached.union(*near)
        if grown == reached:
            return False
        reached = grown
    return True


def _differing(reports: Sequence[Checksums]) -> dict[str, list[int]]:
    """Return the names whose values differ, with the ranks that hold them."""
    sums: dict[tuple[str, tuple[int, ...]], int] = {}
    holders: dict[str, list[int]] = defaultdict(list)
    differing = set()
    for rank, checksums in enumerate(reports):
        for name, boxes in checksums:
            holders[name].append(rank)
            for offsets, value in boxes:
                if sums.setdefault((name, tuple(offsets)), value) != value:
                    differing.add(name)
    return {name: holders[name] for name in sorted(differing)}


def _with_ranks(names: Mapping[str, list[int]]) -> str:
    by_ranks: dict[str, list[str]] = defaultdict(list)
    for name, holders in names.items():
        by_ranks[format_ranks(holders)].append(name)
    return "; ".join(f"{shown(some)} ({ranks})" for ranks, some in by_ranks.items())
