"""What was found of items in one process, and how it travels to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any, NamedTuple

from ema_ckpt.analysis.records import StoredRecord
from ema_ckpt.core.errors import EmaCkptError, SourceError
from ema_ckpt.reading.checksum_verifier import Interval


class CheckedRecord(NamedTuple):
    """A record with the CRC-32 of its bytes, or with the error of reading them.

    `number` and `place` give the order: of the chunk, and of the record in its item.
    """

    number: int
    place: int
    record: StoredRecord
    crc: int | None
    error: EmaCkptError | None = None


class Failure(NamedTuple):
    """An item of which nothing, or not all, could be located, and its bytes."""

    number: int
    error: EmaCkptError
    nbytes: int


class ItemFindings:
    """What was found of items.

    Attributes:
        checked_nbytes: of payloads that match the checksums of their archives.
        bare: CRC-32s of payloads without a stored one, by number of the chunk.
        parts: CRC-32s of parts of large payloads, by number.
        records: those of items that were read record by record. failures: see `Failure`.
        followers: chunks with the payload of another one, by number, with that one's.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.checked_nbytes = 0
        self.bare: dict[int, int] = {}
        self.parts: dict[int, list[Interval]] = {}
        self.records: list[CheckedRecord] = []
        self.failures: list[Failure] = []
        self.followers: dict[int, int] = {}

    def tell_followers(self, name_of: Callable[[int], str]) -> None:
        """Say of each follower what was found of the payload that it shares."""
        records: dict[int, list[CheckedRecord]] = {}
        for checked in self.records:
            records.setdefault(checked.number, []).append(checked)
        for number, leader in self.followers.items():
            for checked in records.get(leader, ()):
                record = replace(checked.record, owner=name_of(number))
                self.records.append(checked._replace(number=number, record=record))

    def dump(self) -> list[object]:
        """Return everything as plain data."""
        records = []
        for number, place, record, crc, error in self.records:
            records.append([number, place, astuple(record), crc, dump_error(error)])
        failures = [[number, dump_error(error), size] for number, error, size in self.failures]
        bare, parts = list(self.bare.items()), list(self.parts.items())
        followers = list(self.followers.items())
        return [self.checked_nbytes, bare, parts, records, failures, followers]

    def merge(self, dumped: Sequence[Any]) -> None:
        """Add what another process dumped, after JSON."""
        checked_nbytes, bare, parts, records, failures, followers = dumped
        self.followers.update(followers)
        self.checked_nbytes += checked_nbytes
        self.bare.update(bare)
        for number, intervals in parts:
            own = self.parts.setdefault(number, [])
            own += [(start, nbytes, crc) for start, nbytes, crc in intervals]
        for number, place, record, crc, error in records:
            found = error and load_error(error)
            self.records.append(CheckedRecord(number, place, StoredRecord(*record), crc, found))
        for number, error, nbytes in failures:
            self.failures.append(Failure(number, load_error(error), nbytes))


def dump_error(error: EmaCkptError | None) -> list[str | None] | None:
    """Return an error as plain data."""
    return None if error is None else [error.code, str(error), error.tensor, error.file]


def load_error(fields: Sequence[Any]) -> SourceError:
    """Return the error that was dumped."""
    code, message, tensor, file = fields
    return SourceError(code, message, tensor=tensor, file=file)
