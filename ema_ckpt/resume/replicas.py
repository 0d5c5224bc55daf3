"""What all ranks must agree on before a save: counters of averages, values that several hold."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ema_ckpt.comm.channel import Channel
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.core.errors import StateError
from ema_ckpt.core.text import format_ranks, shown
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.schedules import to_json
from ema_ckpt.resume.flatten import Leaf


def agree_on_averages(
    ema: ShardedEMA | Mapping[str, ShardedEMA] | None, ranks: Channel, call: str
) -> None:
    """Refuse averages that some ranks have updated more often than others, or by other settings.

    Raises:
        StateError: on every rank.
    """
    managers = ema if isinstance(ema, Mapping) else {} if ema is None else {"": ema}
    facts = {name: _facts(manager) for name, manager in managers.items()}
    everyone = ranks.exchange_if_different(facts)
    for name in sorted(set().union(*everyone)):
        label = f"ema.{name}" if name else "ema"
        for fact in ("num_updates", "samples_seen", "settings"):
            by_value: dict[str, list[int]] = defaultdict(list)
            for rank, found in enumerate(everyone):
                if name in found:
                    by_value[str(found[name][fact])].append(rank)
            if len(by_value) > 1:
                values = "; ".join(f"{format_ranks(r)}: {value}" for value, r in by_value.items())
                raise StateError(
                    "usage",
                    f"{call}: the ranks disagree on {fact} of {label}: {values}; make the manager"
                    " alike and call update() on every rank, after every step",
                )


def compare_replicas(
    leaves: Sequence[Leaf],
    unwrapped: Collection[str],
    held: Mapping[str, Any],
    ranks: Channel,
    call: str,
) -> None:
    """Compare the CRC-32s of what several ranks hold; on rank 0, warn of what differs, with ranks.

    Args:
        unwrapped: names of parameters that no wrapper keeps equal.
        held: the boxes of the model that this rank holds, by name: ranks that hold the same of it
            are replicas of each other, declared or not.

    Raises:
        StateError: on every rank: other ranks hold different values of a parameter.
    """
    mine = [[leaf.name, leaf.checksums()] for leaf in leaves]
    if not ranks.exchange_if_different(hashlib.sha256(json.dumps(mine).encode()).hexdigest()):
        return
    layout = hashlib.sha256(json.dumps(held).encode()).hexdigest()
    report = [layout, mine, sorted(set(unwrapped).intersection(leaf.name for leaf in leaves))]
    gathered = ranks.gather(json.dumps(report).encode())

    def compare() -> dict[str, list[int]]:
        reports = [json.loads(data) for data in gathered]
        differing = _differing([checksums for _, checksums, _ in reports])
        for name, holders in differing.items():
            layouts = {reports[rank][0] for rank in holders}
            if len(layouts) > 1 and any(name in reports[rank][2] for rank in holders):
                refused = {n: r for n, r in differing.items() if n in reports[r[0]][2]}
                raise StateError(
                    "name-collision",
                    f"different values under one name on ranks that are no replicas of each other:"
                    f" {_with_ranks(refused)}; give each rank's its own name, or make them equal",
                )
        return differing

    differing = run_on_all_ranks(ranks, call, compare)
    if differing:
        warnings.warn(
            f"replicas-differ: ranks hold different values of {_with_ranks(differing)}; those of"
            " the lowest rank are saved. What each has of its own goes into extra under names that"
            " tell the rank",
            stacklevel=3,
        )


def _facts(manager: ShardedEMA) -> dict[str, Any]:
    settings = manager.settings
    names = ("every", "dtype", "compensate", "rounding", "seed", "buffers", "nonfinite")
    shown_settings = {name: str(getattr(settings, name)) for name in names}
    return {
        "num_updates": manager.num_updates,
        "samples_seen": manager.samples_seen,
        "settings": {"decay": to_json(settings.schedule), **shown_settings},
    }


def _differing(reports: Sequence[Sequence[Any]]) -> dict[str, list[int]]:
    """Return the names whose values differ, with the ranks that hold them."""
    crcs: dict[tuple[str, tuple[int, ...]], int] = {}
    holders: dict[str, list[int]] = defaultdict(list)
    differing = set()
    for rank, checksums in enumerate(reports):
        for name, boxes in checksums:
            holders[name].append(rank)
            for offsets, crc in boxes:
                if crcs.setdefault((name, tuple(offsets)), crc) != crc:
                    differing.add(name)
    return {name: holders[name] for name in sorted(differing)}


def _with_ranks(names: Mapping[str, list[int]]) -> str:
    by_ranks: dict[str, list[str]] = defaultdict(list)
    for name, holders in names.items():
        by_ranks[format_ranks(holders)].append(name)
    return "; ".join(f"{shown(some)} ({ranks})" for ranks, some in by_ranks.items())
