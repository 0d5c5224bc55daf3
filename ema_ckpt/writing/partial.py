"""What one of several processes that share a write has done, for the first one to put together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ema_ckpt.core.catalog import Payload
from ema_ckpt.reading.checksums import Interval, Pending


class PartialItem(NamedTuple):
    """A piece of which this process wrote `jobs` parts and others the rest; CRC-32s by place in the
    piece.

    `place` is the piece's in the target.
    """

    place: int
    jobs: int
    intervals: Sequence[Interval]
    source_intervals: Sequence[Interval]


class PartialResult(NamedTuple):
    """One process' share: CRC-32s of whole pieces, intervals of entries, overflows, and what others
    complete.
    """

    crcs: Mapping[int, int]
    intervals: Mapping[str, Sequence[Interval]]
    overflow: Mapping[str, int]
    begun: Sequence[PartialItem]
    pending: Pending

    def dump(self) -> bytes:
        """As JSON, for `load`."""
        pending = [(*key, *rest) for key, rest in self.pending.items()]
        rows = (
            list(self.crcs.items()),
            list(self.intervals.items()),
            dict(self.overflow),
            self.begun,
            pending,
        )
        return json.dumps(rows, separators=(",", ":")).encode()

    @classmethod
    def load(cls, data: bytes) -> PartialResult:
        """What `dump` gave."""
        crcs, intervals, overflow, begun, pending = json.loads(data)
        return cls(
            dict(crcs),
            {name: _intervals(found) for name, found in intervals},
            overflow,
            [
                PartialItem(place, jobs, _intervals(own), _intervals(read))
                for place, jobs, own, read in begun
            ],
            {
                (file, offset): (tensor, _payload(payload), _intervals(found), nbytes)
                for file, offset, tensor, payload, found, nbytes in pending
            },
        )


def _intervals(found: Sequence[Sequence[int]]) -> list[Interval]:
    return [(start, nbytes, crc) for start, nbytes, crc in found]


def _payload(found: Sequence[Any]) -> Payload:
    payload = Payload(*found)
    return payload if payload.strides is None else payload._replace(strides=tuple(payload.strides))


class WriterGroup(Protocol):
    """Processes that write one target together; all of them have laid it out alike."""

    @property
    def rank(self) -> int:
        """Which of them this is; the first one stages and publishes."""
        ...

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    def pool(self, part: PartialResult) -> list[PartialResult]:
        """Everybody's share, in order; waits for all.

        Raises:
            CollectiveError: `rank-failed` if one of them failed, with its cause.
        """
        ...
