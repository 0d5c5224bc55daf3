"""What all ranks must agree on before a save: counters of averages, values that several hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ema_ckpt.comm.channel import Channel
from ema_ckpt.core.errors import StateError
from ema_ckpt.core.text import format_ranks
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.schedules import to_json


def agree_on_averages(managers: Mapping[str, ShardedEMA], ranks: Channel, call: str) -> None:
    """Refuse averages that some ranks have updated more often than others, or by other settings.

    Raises:
        StateError: on every rank.
    """
    names = ("every", "dtype", "compensate", "rounding", "seed", "buffers", "nonfinite")
    facts = {}
    for label, manager in managers.items():
        settings = {name: str(getattr(manager._settings, name)) for name in names}
        facts[label] = {
            "num_updates": manager.num_updates,
            "samples_seen": manager.samples_seen,
            "settings": {"decay": to_json(manager._settings.schedule), **settings},
        }
    everyone = ranks.exchange_if_different(facts)
    for label in sorted(set().union(*everyone)):
        for fact in ("num_updates", "samples_seen", "settings"):
            by_value: dict[str, list[int]] = defaultdict(list)
            for rank, found in enumerate(everyone):
                if label in found:
                    by_value[str(found[label][fact])].append(rank)
            if len(by_value) > 1:
                values = "; ".join(f"{format_ranks(r)}: {value}" for value, r in by_value.items())
                raise StateError(
                    "usage",
                    f"{call}: the ranks disagree on {fact} of {label}: {values}; make the manager"
                    " alike and call update() on every rank, after every step",
                )
