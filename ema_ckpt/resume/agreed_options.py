"""Options of `save` and `restore` that must be the same on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ema_ckpt.comm.channel import Channel
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.text import format_ranks


def agree_on_options(options: Mapping[str, object], ranks: Channel, call: str) -> None:
    """Refuse options that differ between ranks: these would take different steps; collective.

    Raises:
        UsageError: on every rank.
    """
    everyone = ranks.exchange({name: str(value) for name, value in options.items()})
    for name in options:
        by_value: dict[str, list[int]] = defaultdict(list)
        for rank, given in enumerate(everyone):
            by_value[given[name]].append(rank)
        if len(by_value) > 1:
            values = "; ".join(f"{format_ranks(r)}: {value}" for value, r in by_value.items())
            raise UsageError("usage", f"{call}: the ranks give different {name}: {values}")
