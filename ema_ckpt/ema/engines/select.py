"""Which engine moves which lists."""

from __future__ import annotations

from ema_ckpt.ema.engines import blocked, foreach
from ema_ckpt.ema.engines.lists import Lists, Step

__all__ = ["prepare"]


def prepare(lists: Lists) -> Step:
    """The step of the fastest engine for the device that holds `lists`."""
    return blocked.prepare(lists) if lists.shadows[0].device.type == "cpu" else foreach.prepare(lists)
