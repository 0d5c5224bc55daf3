"""Write one checkpoint, all or nothing: every rank into a stage, which rank 0 publishes.

The files are those of `torch.distributed.checkpoint.FileSystemWriter`: per rank one row of
`torch.save` archives, objects first, and a `.metadata` pickle that names each. That class itself
keeps every tensor of a file in memory, records the absolute path of the stage, and syncs before it
flushes (torch 2.13, `filesystem.py`).
"""

from __future__ import annotations

import json
import os
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch

from ema_ckpt.comm.channel import Channel
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.crc import combine_crcs, crc32
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import CollectiveError, EmaCkptError
from ema_ckpt.core.write_plan import OutputTensor
from ema_ckpt.ema.checkpoint.listing import GlobalListing
from ema_ckpt.ema.model.tensor_kinds import on_host
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.dcp.metadata_writer import StoredItem, StoredTensor, dump_metadata
from ema_ckpt.formats.torch_zip.reader import read_archive
from ema_ckpt.resume.save_plan import Item, SavePlan
from ema_ckpt.storage.files import LocalFiles
from ema_ckpt.writing.staging import Staged, stage
from ema_ckpt.writing.switch import fsync_path

_METADATA_NAME = ".metadata"
# Of a written item: name, CRC-32 of the payload, whether that is in row-major order, then the
# fields of its StoredItem.
Row = list[Any]


def write(target: Path, plan: SavePlan, ranks: Channel, call: str, *, overwrite: bool) -> Path:
    """Write the items of all ranks' plans into `target`; collective.

    Returns:
        The published directory, on every rank and after it is in place.

    Raises:
        EmaCkptError: on every rank, with the failing rank's cause; `target` is as it was.
    """

    def open_stage() -> Staged | None:
        if ranks.rank:
            return None
        nbytes = plan.listing.nbytes
        return stack.enter_context(
            stage(target, is_directory=True, overwrite=overwrite, nbytes=nbytes)
        )

    def publish() -> str | None:
        if staged is None:
            return None
        rows = chain.from_iterable(map(json.loads, gathered))
        _write_metadata(root, target.name, plan.listing, rows)
        staged.publish()
        stack.close()
        return str(staged.target)

    try:
        with ExitStack() as stack:  # until rank 0 publishes, an exception removes the stage
            staged = run_on_all_ranks(ranks, call, open_stage)
            root = Path(ranks.broadcast_json(None if staged is None else str(staged.path)))
            written = run_on_all_ranks(
                ranks, call, lambda: _write_items(root, ranks.rank, plan.items)
            )
            gathered = ranks.gather(json.dumps(written).encode())
            published = run_on_all_ranks(ranks, call, publish)
    except EmaCkptError:
        # Wait for rank 0 to remove the stage, unless a rank has died.
        with suppress(CollectiveError):
            ranks.exchange(None)
        raise
    return Path(ranks.broadcast_json(published))


def _write_items(root: Path, rank: int, items: Sequence[Item]) -> list[Row]:
    """Write this rank's file, if it has anything to write, and make it durable."""
    if not items:
        return []
    if not root.is_dir():
        message = f"{root}: not to be seen from here; all ranks must share the file system"
        raise FileNotFoundError(message)
    name = f"__{rank}_0.distcp"
    places = []
    with open(root / name, "wb") as stream:
        for item in sorted(items, key=lambda item: item.box is not None):
            offset = stream.tell()
            if isinstance(item.data, bytes):
                stream.write(item.data)
            else:
                host = on_host(item.data)
                if host.untyped_storage().nbytes() != host.numel() * host.element_size():
                    host = host.clone()  # torch.save writes whole storages
                torch.save(host, stream)
            places.append((item, offset, stream.tell() - offset))
        stream.flush()
        os.fsync(stream.fileno())
    fsync_path(root)
    rows: list[Row] = []
    with closing(LocalFiles(root)) as files:
        for item, offset, nbytes in places:
            crc, is_contiguous = _item_crc(files, name, offset, nbytes, item)
            offsets, sizes = (None, ()) if item.box is None else (item.box.offsets, item.box.sizes)
            rows.append([item.name, crc, is_contiguous, offsets, sizes, name, offset, nbytes])
    return rows


def _item_crc(
    files: LocalFiles, name: str, offset: int, nbytes: int, item: Item
) -> tuple[int | None, bool]:
    """Return the CRC-32 of an item's payload, and whether that is a tensor's in row-major order.

    torch put it into the archive's directory; no payload is read again.
    """
    records = read_archive(files, name, offset, nbytes).records
    if isinstance(item.data, bytes):
        return records["data.pkl"].crc, False
    if not item.data.numel():
        return 0, True
    return records["data/0"].crc, item.data.is_contiguous()


def _write_metadata(root: Path, name: str, listing: GlobalListing, rows: Iterable[Row]) -> None:
    """Write `.metadata`, and the sidecar with the CRC-32s of whole tensors."""
    items: dict[str, list[StoredItem]] = defaultdict(list)
    crcs: dict[str, list[int | None]] = defaultdict(list)
    chunks: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for fqn, crc, is_contiguous, offsets, sizes, *place in rows:
        corner = None if offsets is None else tuple(offsets)
        items[fqn].append(StoredItem(corner, tuple(sizes), *place))
        file, offset, _ = place
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
    metadata = dump_metadata(entries, places, listing.paths, name, str(uuid.uuid4()))
    document = sidecar.make_document(
        outputs,
        digests,
        files=[_METADATA_NAME],
        describes={_METADATA_NAME: crc32(metadata)},
        chunks=dict(sorted(chunks.items())),
    )
    (root / sidecar.SIDECAR).write_text(sidecar.dump(document), encoding="utf-8")
    (root / _METADATA_NAME).write_bytes(metadata)


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
