"""What has to be known, and is merged, where a file can only be written from its start to its end.

A header may hold the checksums of what follows it: of a tensor in a zip archive, of all tensors in
a safetensors file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.write_plan import HeaderBytes, WritePlan
from ema_ckpt.writing.output_files import HeaderTime
from ema_ckpt.writing.run_state import Outcome


class NoFiles:
    """Files that take everything and keep nothing: a run that only computes."""

    headers: HeaderTime = "last"

    def write(self, file: str, offset: int, data: memoryview | bytes | bytearray) -> None:
        """Keep nothing."""

    def write_items(
        self, file: str, offset: int, data: memoryview, extents: Iterable[tuple[int, int]]
    ) -> None:
        """Keep nothing."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Read nothing: no range is finished."""

    def start_writeback(self, file: str, offset: int, nbytes: int) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Nothing is open."""


def needs_checksums_first(plan: WritePlan) -> bool:
    """Whether checksums lie before bytes that they are computed from."""
    if not plan.items:
        return False
    if next(plan.item_bytes(0, 0), None) is not None:
        return True
    first = {item.file: item.offset for item in reversed(plan.items)}
    blank = plan.header_bytes([0] * len(plan.items), {})
    return any(header.offset < first.get(header.file, 0) for header in blank)


def recorded_outcome(catalog: Catalog, plan: WritePlan) -> Outcome | None:
    """Return the checksums that the source records, if it has all and nothing is cast or cut."""
    crcs: list[int] = []
    for item in plan.items:
        tensor = item.output.source
        recorded = catalog.digests.get(tensor.name)
        if recorded is None or item.output.casts or item.box.sizes != tensor.shape:
            return None
        crcs.append(recorded)
    digests = {item.output.name: crc for item, crc in zip(plan.items, crcs, strict=True)}
    return Outcome(crcs, digests, {})


def headers_in_order(plan: WritePlan, known: Outcome | None) -> Iterator[HeaderBytes]:
    """Iterate over the bytes around payloads, in the order in which they lie in the files.

    Without checksums these are only the ones that hold none.
    """
    order = {file: index for index, file in enumerate(plan.files)}

    def place(header: HeaderBytes) -> tuple[int, int]:
        return order[header.file], header.offset

    if known is None:
        return plan.fixed_bytes()

    def around_items() -> Iterator[HeaderBytes]:
        for index, crc in enumerate(known.crcs):
            yield from plan.item_bytes(index, crc)

    last = sorted(plan.header_bytes(known.crcs, known.digests), key=place)
    return merge(plan.fixed_bytes(), around_items(), last, key=place)
