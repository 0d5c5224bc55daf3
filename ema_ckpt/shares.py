"""What one of several processes that share a write has done, for the first one to put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ema_ckpt.checks import Interval, Pending

__all__ = ["Begun", "Crew", "Part"]


class Begun(NamedTuple):
    """A piece of which this process wrote `jobs` parts and others the rest; CRC-32s by place in the piece."""

    piece: int
    jobs: int
    intervals: Sequence[Interval]
    source_intervals: Sequence[Interval]


class Part(NamedTuple):
    """One process' share: CRC-32s of whole pieces, intervals of entries, overflows, and what others complete."""

    crcs: Mapping[int, int]
    intervals: Mapping[str, Sequence[Interval]]
    overflow: Mapping[str, int]
    begun: Sequence[Begun]
    pending: Pending


class Crew(Protocol):
    """Processes that write one target together; all of them have laid it out alike."""

    @property
    def rank(self) -> int:
        """Which of them this is; the first one stages and publishes."""
        ...

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    def pool(self, part: Part) -> list[Part]:
        """Everybody's share, in order; waits for all.

        Raises:
            CollectiveError: `rank-failed` if one of them failed, with its cause.
        """
        ...
