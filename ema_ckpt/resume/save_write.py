"""One checkpoint, all or nothing: every rank writes into a stage, rank 0 publishes it by a rename.

The files are those of `torch.distributed.checkpoint.FileSystemWriter`: per rank one row of
`torch.save` archives, objects first, and a `.metadata` pickle that names each. Written here and not
through that class because it keeps every tensor of a file in memory, records the absolute path of
the stage, and syncs before it flushes (torch 2.13, `filesystem.py`).
"""

from __future__ import annotations

import json
import os
import pickle
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ema_ckpt.comm.channel import Channel
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.crc import combine_crcs
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import CollectiveError, EmaCkptError
from ema_ckpt.core.write_plan import OutputTensor
from ema_ckpt.formats import sidecar as record
from ema_ckpt.formats.torch_zip.archive import read_archive
from ema_ckpt.resume.save_plan import Item, Listing, Plan
from ema_ckpt.storage.files import LocalFiles
from ema_ckpt.writing.publish import fsync_path
from ema_ckpt.writing.staging import Staged, stage

_METADATA_VERSION = "1.0.0"  # torch's CURRENT_DCP_VERSION since 2.9; older readers ignore it


@dataclass(frozen=True, slots=True)
class _Written:
    """Where an item went: bytes [offset, offset + nbytes) of a file; the CRC-32 of its payload if
    it is known.
    """

    name: str
    box: Box | None
    file: str
    offset: int
    nbytes: int
    crc: int | None


def write(target: Path, plan: Plan, ours: Channel, call: str, *, overwrite: bool) -> Path:
    """Write the items of all ranks' plans into `target`; collective.

    Returns:
        The published directory, on every rank and after it is in place.

    Raises:
        EmaCkptError: on every rank, with the failing rank's cause; `target` is as it was.
    """
    try:
        place = _written(target, plan, ours, call, overwrite=overwrite)
    except EmaCkptError:
        # Nobody goes on while rank 0 may still be removing the stage, unless a rank is dead anyway.
        with suppress(CollectiveError):
            ours.exchange(None)
        raise
    return Path(ours.broadcast_json(place))


def _written(target: Path, plan: Plan, ours: Channel, call: str, *, overwrite: bool) -> str | None:
    """The transaction itself: on rank 0 an exception unwinds the stage, and only `published` ends
    it well.
    """
    with ExitStack() as stack:
        return _staged(stack, target, plan, ours, call, overwrite=overwrite)


def _staged(
    stack: ExitStack, target: Path, plan: Plan, ours: Channel, call: str, *, overwrite: bool
) -> str | None:
    def opened() -> Staged | None:
        if ours.rank:
            return None
        return stack.enter_context(
            stage(target, is_directory=True, overwrite=overwrite, nbytes=plan.listing.nbytes)
        )

    staged = run_on_all_ranks(ours, call, opened)
    root = Path(ours.broadcast_json(str(staged.path) if staged is not None else None))
    written = run_on_all_ranks(ours, call, lambda: _write_items(root, ours.rank, plan.items))
    gathered = ours.gather(_encoded(written))

    def published() -> str | None:
        if staged is None:
            return None
        _finish(root, target.name, plan.listing, [_decoded(data) for data in gathered])
        staged.publish()
        stack.close()
        return str(staged.target)

    return run_on_all_ranks(ours, call, published)


def _write_items(root: Path, rank: int, items: Sequence[Item]) -> list[_Written]:
    """Write this rank's file, if it has anything to write, and make it durable."""
    if not items:
        return []
    if not root.is_dir():
        raise FileNotFoundError(
            f"{root}: not to be seen from here; all ranks must share the file system"
        )
    name = f"__{rank}_0.distcp"
    places: list[tuple[Item, int, int]] = []
    with open(root / name, "wb") as stream:
        for item in sorted(items, key=lambda item: item.box is not None):
            offset = stream.tell()
            if isinstance(item.data, bytes):
                stream.write(item.data)
            else:
                torch.save(_storable(item.data), stream)
            places.append((item, offset, stream.tell() - offset))
        stream.flush()
        os.fsync(stream.fileno())
    fsync_path(root)
    return _with_crcs(root, name, places)


def _storable(view: torch.Tensor) -> torch.Tensor:
    """A host tensor whose storage holds nothing but its own elements: torch.save writes whole
    storages.
    """
    host = view.detach().cpu()
    return (
        host
        if host.untyped_storage().nbytes() == host.numel() * host.element_size()
        else host.clone()
    )


def _with_crcs(root: Path, name: str, places: Sequence[tuple[Item, int, int]]) -> list[_Written]:
    """Take from each archive's directory the CRC-32 that torch put there; no payload is read
    again.
    """
    files = LocalFiles(root)
    try:
        return [
            _Written(
                item.name,
                item.box,
                name,
                offset,
                nbytes,
                _payload_crc(files, item, name, offset, nbytes),
            )
            for item, offset, nbytes in places
        ]
    finally:
        files.close()


def _payload_crc(files: LocalFiles, item: Item, name: str, offset: int, nbytes: int) -> int | None:
    if isinstance(item.data, bytes) or not item.data.is_contiguous():
        return None
    if not item.data.numel():
        return 0
    return read_archive(files, name, offset, nbytes).records["data/0"].crc


def _encoded(written: Sequence[_Written]) -> bytes:
    rows = [
        [
            w.name,
            None if w.box is None else [w.box.offsets, w.box.sizes],
            w.file,
            w.offset,
            w.nbytes,
            w.crc,
        ]
        for w in written
    ]
    return json.dumps(rows).encode()


def _decoded(data: bytes) -> list[_Written]:
    return [
        _Written(
            name,
            None if box is None else Box(tuple(box[0]), tuple(box[1])),
            file,
            offset,
            nbytes,
            crc,
        )
        for name, box, file, offset, nbytes, crc in json.loads(data)
    ]


def _finish(root: Path, name: str, listing: Listing, written: Sequence[Sequence[_Written]]) -> None:
    """Write `.metadata` and our digests beside the ranks' files."""
    rows = [row for rank in written for row in rank]
    files = sorted({row.file for row in rows})
    by_tensor: dict[str, list[_Written]] = {fqn: [] for fqn in listing.tensors}
    for row in rows:
        if row.box is not None:
            by_tensor[row.name].append(row)
    (root / record.SIDECAR).write_text(_digests(listing, by_tensor, files), encoding="utf-8")
    with open(root / ".metadata", "wb") as stream:
        pickle.dump(_metadata(name, listing, rows, by_tensor), stream, protocol=4)


def _metadata(
    name: str, listing: Listing, rows: Sequence[_Written], by_tensor: Mapping[str, list[_Written]]
) -> Any:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
    )

    entries: dict[str, Any] = {}
    for fqn in listing.paths:
        entries[fqn] = (
            _tensor_entry(listing, fqn, by_tensor[fqn])
            if fqn in by_tensor
            else BytesStorageMetadata()
        )
    places = [(MetadataIndex(row.name), row) for row in rows if row.box is None]
    for fqn, pieces in by_tensor.items():
        places += [
            (MetadataIndex(fqn, row.box.offsets, n), row)
            for n, row in enumerate(pieces)
            if row.box is not None
        ]
    return Metadata(
        entries,
        planner_data=dict(listing.paths),
        storage_data={
            index: _StorageInfo(row.file, row.offset, row.nbytes) for index, row in places
        },
        storage_meta=StorageMeta(checkpoint_id=name, save_id=str(uuid.uuid4())),
        version=_METADATA_VERSION,
    )


def _tensor_entry(listing: Listing, fqn: str, rows: Sequence[_Written]) -> Any:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    shape, dtype = listing.tensors[fqn]
    chunks = [
        ChunkStorageMetadata(torch.Size(row.box.offsets), torch.Size(row.box.sizes))
        for row in rows
        if row.box is not None
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape), chunks
    )


def _digests(
    listing: Listing, by_tensor: Mapping[str, list[_Written]], files: Sequence[str]
) -> str:
    """CRC-32s of whole tensors, where all pieces are runs of whole rows."""
    digests: dict[str, int] = {}
    for fqn, rows in by_tensor.items():
        shape, dtype = listing.tensors[fqn]
        crc = _joined(shape, by_name(dtype).itemsize, rows)
        if crc is not None:
            digests[fqn] = crc
    return record.dump([_entry(listing, fqn) for fqn in digests], digests, files=files)


def _joined(shape: tuple[int, ...], itemsize: int, rows: Sequence[_Written]) -> int | None:
    total = 0
    for row in sorted(rows, key=lambda row: row.box.offsets if row.box is not None else ()):
        box = row.box or whole(shape)
        if row.crc is None or box.sizes[1:] != shape[1:]:
            return None
        total = combine_crcs(total, row.crc, box.numel * itemsize)
    return total


def _entry(listing: Listing, fqn: str) -> OutputTensor:
    shape, dtype = listing.tensors[fqn]
    path = listing.paths[fqn]
    return OutputTensor(fqn, path, Tensor(fqn, path, shape, by_name(dtype), ()), by_name(dtype))
