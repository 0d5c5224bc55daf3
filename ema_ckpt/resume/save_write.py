"""Write one checkpoint, all or nothing: every rank its file, which rank 0 publishes together.

The files are those of `torch.distributed.checkpoint.FileSystemWriter`: per rank one row of
`torch.save` archives, objects first, and a `.metadata` pickle that names each. That class itself
keeps every tensor of a file in memory, records the absolute path of the stage, and syncs before it
flushes (torch 2.13, `filesystem.py`).
"""

from __future__ import annotations

import json
import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from ema_ckpt.comm.channel import Channel, is_told
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.crc import combine_crcs
from ema_ckpt.core.display import displayed
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import CollectiveError
from ema_ckpt.core.write_plan import OutputTensor
from ema_ckpt.ema.checkpoint.listing import GlobalListing
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.dcp.metadata_writer import MetadataPickle, StoredItem, StoredTensor
from ema_ckpt.formats.dcp.reader import METADATA_NAME
from ema_ckpt.resume.save_place import SavePlace, place_of
from ema_ckpt.resume.save_plan import Item, SavePlan

# Of a written item: name, CRC-32 of the payload, whether that is in row-major order, then the
# fields of its StoredItem.
Row = list[Any]


def write(
    target: Path | str, plan: SavePlan, ranks: Channel, call: str, *, overwrite: bool
) -> Path | str:
    """Write the items of all ranks' plans into `target`; collective.

    Returns:
        The published directory, on every rank and after it is in place.

    Raises:
        EmaCkptError: on every rank, with the failing rank's cause; `target` is as it was.
    """
    place = run_on_all_ranks(ranks, call, lambda: place_of(target, overwrite))
    is_writing, is_complete = True, False

    def begin() -> str | None:
        return None if ranks.rank else place.begin(plan.listing.nbytes, ranks.size)

    def publish() -> str | None:
        nonlocal is_complete
        if ranks.rank:
            return None
        rows = list(chain.from_iterable(map(json.loads, gathered)))
        _write_metadata(place, plan.listing, rows)
        ends: dict[str, int] = defaultdict(int)
        for *_, file, offset, nbytes in rows:
            ends[file] = max(ends[file], offset + nbytes)
        made = str(place.publish(dict(sorted(ends.items()))))
        is_complete = True
        return made

    try:
        begun = run_on_all_ranks(ranks, call, begin)
        place.join(ranks.broadcast_json(begun))
        written = run_on_all_ranks(ranks, call, lambda: _write_items(place, ranks.rank, plan.items))
        is_writing = False  # all ranks have written: rank 0 publishes their files, or removes them
        gathered = ranks.gather(json.dumps(written).encode())
        published = run_on_all_ranks(ranks, call, publish)
    except BaseException as error:
        if not is_told(error):
            ranks.close()  # the others hear of it where they wait for this rank
        if is_complete:
            what = f"{target}: is complete, though not every rank came to the end of {call}"
            logging.getLogger("ema_ckpt").warning(displayed(what))
        # Whether what is to be published can still be removed, rank 0 knows.
        try:
            if is_writing or not ranks.rank:
                place.give_up(ranks.rank, ranks.size, error)
        except OSError as left:  # what failed first is raised
            logging.getLogger("ema_ckpt").warning(displayed(f"{target}: not removed: {left}"))
        finally:  # the others wait here for rank 0 to have removed it
            with suppress(CollectiveError):  # unless a rank has died
                ranks.exchange(None)
        raise
    text = ranks.broadcast_json(published)
    return text if isinstance(target, str) else Path(text)


def _write_items(place: SavePlace, rank: int, items: Sequence[Item]) -> list[Row]:
    rows: list[Row] = []
    for item, *stored, crc, is_contiguous in place.write_items(rank, items):
        offsets, sizes = (None, ()) if item.box is None else (item.box.offsets, item.box.sizes)
        rows.append([item.name, crc, is_contiguous, offsets, sizes, *stored])
    return rows


def _write_metadata(place: SavePlace, listing: GlobalListing, rows: Iterable[Row]) -> None:
    """Write `.metadata`, and the sidecar with the CRC-32s of whole tensors."""
    items: dict[str, list[StoredItem]] = defaultdict(list)
    crcs: dict[str, list[int | None]] = defaultdict(list)
    chunks: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for fqn, crc, is_contiguous, offsets, sizes, *span in rows:
        corner = None if offsets is None else tuple(offsets)
        items[fqn].append(StoredItem(corner, tuple(sizes), *span))
        file, offset, _ = span
        if crc is not None:
            chunks[file].append((offset, crc))
        crcs[fqn].append(crc if is_contiguous else None)
    entries: dict[str, StoredTensor | None] = dict.fromkeys(listing.paths)
    outputs: list[OutputTensor] = []
    digests: dict[str, int] = {}
    for fqn, spec in listing.specs.items():
        if spec is None:
            continue
        path, shape, dtype = listing.paths[fqn], spec[0], by_name(spec[1])
        entries[fqn] = StoredTensor(dtype, shape)
        crc = _tensor_crc(shape, dtype.itemsize, items[fqn], crcs[fqn])
        if crc is not None:
            digests[fqn] = crc
            outputs.append(OutputTensor(fqn, path, Tensor(fqn, path, shape, dtype, ()), dtype))
    places = {fqn: tuple(written) for fqn, written in items.items()}
    metadata = MetadataPickle(entries, places, listing.paths, place.name, str(uuid.uuid4()))
    document = sidecar.make_document(
        outputs,
        digests,
        files=[METADATA_NAME],
        describes={METADATA_NAME: metadata.crc},
    )
    place.put(sidecar.SIDECAR, b"".join(sidecar.dump_file(document, sorted(chunks.items()))))
    place.put(METADATA_NAME, b"".join(metadata.pieces()))


def _tensor_crc(
    shape: tuple[int, ...], itemsize: int, items: list[StoredItem], crcs: list[int | None]
) -> int | None:
    """Join the CRC-32s of a tensor's chunks if all are whole rows."""
    total = 0
    by_row = sorted(zip(items, crcs, strict=True), key=lambda pair: pair[0].offsets or ())
    for item, crc in by_row:
        if crc is None or item.sizes[1:] != shape[1:]:
            return None
        total = combine_crcs(total, crc, prod(item.sizes) * itemsize)
    return total
