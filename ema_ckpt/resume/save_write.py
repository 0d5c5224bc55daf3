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
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from ema_ckpt.comm.channel import Channel
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.crc import combine_crcs
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import CollectiveError, EmaCkptError
from ema_ckpt.core.write_plan import OutputTensor
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.dcp.metadata_writer import StoredItem, StoredTensor, dump_metadata
from ema_ckpt.formats.torch_zip.reader import read_archive
from ema_ckpt.resume.save_plan import GlobalListing, Item, SavePlan
from ema_ckpt.storage.files import LocalFiles
from ema_ckpt.writing.publish import fsync_path
from ema_ckpt.writing.staging import Staged, stage

Ints = tuple[int, ...]


class WrittenItem(NamedTuple):
    """One archive in a rank's file: its chunk (offsets None: an object), bytes, payload CRC-32."""

    name: str
    offsets: Ints | None
    sizes: Ints
    file: str
    offset: int
    nbytes: int
    crc: int | None


def write(target: Path, plan: SavePlan, ranks: Channel, call: str, *, overwrite: bool) -> Path:
    """Write the items of all ranks' plans into `target`; collective.

    Returns:
        The published directory, on every rank and after it is in place.

    Raises:
        EmaCkptError: on every rank, with the failing rank's cause; `target` is as it was.
    """
    try:
        with ExitStack() as stack:
            published = _write_staged(stack, target, plan, ranks, call, overwrite=overwrite)
    except EmaCkptError:
        # Wait for rank 0 to remove the stage, unless a rank has died.
        with suppress(CollectiveError):
            ranks.exchange(None)
        raise
    return Path(ranks.broadcast_json(published))


def _write_staged(
    stack: ExitStack, target: Path, plan: SavePlan, ranks: Channel, call: str, *, overwrite: bool
) -> str | None:
    """Write and publish; until rank 0 closes `stack`, an exception removes the stage."""

    def open_stage() -> Staged | None:
        if ranks.rank:
            return None
        nbytes = plan.listing.nbytes
        staging = stage(target, is_directory=True, overwrite=overwrite, nbytes=nbytes)
        return stack.enter_context(staging)

    staged = run_on_all_ranks(ranks, call, open_stage)
    root = Path(ranks.broadcast_json(None if staged is None else str(staged.path)))
    written = run_on_all_ranks(ranks, call, lambda: _write_items(root, ranks.rank, plan.items))
    gathered = ranks.gather(json.dumps(written).encode())

    def publish() -> str | None:
        if staged is None:
            return None
        rows = [row for data in gathered for row in _decode(data)]
        _write_metadata(root, target.name, plan.listing, rows)
        staged.publish()
        stack.close()
        return str(staged.target)

    return run_on_all_ranks(ranks, call, publish)


def _decode(data: bytes) -> list[WrittenItem]:
    rows = [WrittenItem(*row) for row in json.loads(data)]
    return [
        row._replace(
            offsets=None if row.offsets is None else tuple(row.offsets), sizes=tuple(row.sizes)
        )
        for row in rows
    ]


def _write_items(root: Path, rank: int, items: Sequence[Item]) -> list[WrittenItem]:
    """Write this rank's file, if it has anything to write, and make it durable."""
    if not items:
        return []
    if not root.is_dir():
        message = f"{root}: not to be seen from here; all ranks must share the file system"
        raise FileNotFoundError(message)
    name = f"__{rank}_0.distcp"
    written = []
    with open(root / name, "wb") as stream:
        for item in sorted(items, key=lambda item: item.box is not None):
            offset = stream.tell()
            if isinstance(item.data, bytes):
                stream.write(item.data)
            else:
                host = item.data.detach().cpu()
                if host.untyped_storage().nbytes() != host.numel() * host.element_size():
                    host = host.clone()  # torch.save writes whole storages
                torch.save(host, stream)
            offsets, sizes = (None, ()) if item.box is None else (item.box.offsets, item.box.sizes)
            nbytes = stream.tell() - offset
            written.append(
                (item, WrittenItem(item.name, offsets, sizes, name, offset, nbytes, None))
            )
        stream.flush()
        os.fsync(stream.fileno())
    fsync_path(root)
    with closing(LocalFiles(root)) as files:
        return [row._replace(crc=_payload_crc(files, item, row)) for item, row in written]


def _payload_crc(files: LocalFiles, item: Item, row: WrittenItem) -> int | None:
    """Take the CRC-32 that torch put into the archive's directory; no payload is read again."""
    if isinstance(item.data, bytes) or not item.data.is_contiguous():
        return None
    if not item.data.numel():
        return 0
    return read_archive(files, row.file, row.offset, row.nbytes).records["data/0"].crc


def _write_metadata(root: Path, name: str, listing: GlobalListing, rows: list[WrittenItem]) -> None:
    """Write `.metadata`, and the sidecar with the CRC-32s of whole tensors."""
    written: dict[str, list[WrittenItem]] = {fqn: [] for fqn in listing.paths}
    for row in rows:
        written[row.name].append(row)
    entries: dict[str, StoredTensor | None] = dict.fromkeys(listing.paths)
    outputs: list[OutputTensor] = []
    digests: dict[str, int] = {}
    for fqn, spec in listing.specs.items():
        if spec is None:
            continue
        path, shape, dtype = listing.paths[fqn], spec[0], by_name(spec[1])
        entries[fqn] = StoredTensor(dtype, shape)
        crc = _tensor_crc(shape, dtype.itemsize, written[fqn])
        if crc is not None:
            digests[fqn] = crc
            outputs.append(OutputTensor(fqn, path, Tensor(fqn, path, shape, dtype, ()), dtype))
    files = sorted({row.file for row in rows})
    text = sidecar.dump(outputs, digests, files=files)
    (root / sidecar.SIDECAR).write_text(text, encoding="utf-8")
    items = {fqn: tuple(StoredItem(*row[1:6]) for row in written[fqn]) for fqn in written}
    metadata = dump_metadata(entries, items, listing.paths, name, str(uuid.uuid4()))
    (root / ".metadata").write_bytes(metadata)


def _tensor_crc(shape: Ints, itemsize: int, rows: list[WrittenItem]) -> int | None:
    """Join the CRC-32s of a tensor's chunks if all are whole rows."""
    total = 0
    for row in sorted(rows, key=lambda row: row.offsets or ()):
        if row.crc is None or row.sizes[1:] != shape[1:]:
            return None
        total = combine_crcs(total, row.crc, prod(row.sizes) * itemsize)
    return total
