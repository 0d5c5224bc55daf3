"""safetensors: laying out one file, or a Hugging Face directory with its index.

Within a file tensors are ordered by element size, largest first, then by name, so that each is
aligned to its element size; shards are filled in the order in which the tensors are given, as
Hugging Face does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ema_ckpt.core.box import whole
from ema_ckpt.core.catalog import Nesting, Object
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import TargetError
from ema_ckpt.core.text import shown
from ema_ckpt.core.write_plan import HeaderBytes, OutputTensor, WriteItem
from ema_ckpt.formats import sidecar as record
from ema_ckpt.formats.safetensors import reader as safetensors
from ema_ckpt.formats.safetensors.reader import LENGTH_NBYTES, METADATA

_ALIGNMENT = 8
# Keys of __metadata__ that mean something else than "this name is tied to that one".
_RESERVED = ("format", record.KEY)
# What a tensor adds to a header beside its name, dtype and shape, with the longest offsets there
# are.
_ITEM_NBYTES = len('"":{"dtype":"","shape":[],"data_offsets":[,]},') + 2 * 20


class _Part(NamedTuple):
    """One file of the output: its entries in the order in which they lie, and its own metadata."""

    file: str
    entries: tuple[OutputTensor, ...]
    metadata: Mapping[str, str]

    def header(self, own: Mapping[str, str]) -> bytes:
        """Length, JSON and padding: all that comes before the buffer."""
        items: dict[str, object] = {METADATA: {**self.metadata, **own}}
        for entry, end in zip(
            self.entries, accumulate(e.nbytes for e in self.entries), strict=True
        ):
            items[entry.name] = {
                "dtype": entry.dtype.safetensors,
                "shape": list(entry.source.shape),
                "data_offsets": [end - entry.nbytes, end],
            }
        text = json.dumps(items, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(LENGTH_NBYTES, "little") + text


@dataclass(frozen=True)
class SafetensorsWritePlan:
    """Files laid out. `sidecar` False: one file that carries its own record; else a directory with
    a sidecar.

    `entries` are in the order in which they were given, which the record keeps; files have an order
    of their own.
    """

    entries: tuple[OutputTensor, ...]
    parts: tuple[_Part, ...]
    index: str | None
    sidecar: bool
    nesting: Nesting | None
    objects: tuple[Object, ...]
    ties: Mapping[str, str]
    tied_paths: Mapping[str, tuple[str | int, ...]]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Bytes before each part's buffer. Digests have a fixed width, so zeros show the size."""
        return tuple(len(self._header(part, {})) for part in self.parts)

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Every file and its bytes."""
        sizes = {
            part.file: start + sum(entry.nbytes for entry in part.entries)
            for part, start in zip(self.parts, self.starts, strict=True)
        }
        return sizes | {frame.file: len(frame.data) for frame in self._beside({})}

    @cached_property
    def items(self) -> Sequence[WriteItem]:
        """One piece a tensor, in file order."""
        return tuple(self._pieces())

    def _pieces(self) -> Iterator[WriteItem]:
        for part, start in zip(self.parts, self.starts, strict=True):
            position = start
            for entry in part.entries:
                yield WriteItem(entry, whole(entry.source.shape), part.file, position)
                position += entry.nbytes

    def header_bytes(self, crcs: Sequence[int], digests: Mapping[str, int]) -> Iterator[HeaderBytes]:
        """Headers, then the record and the index: what makes the directory complete comes last."""
        _ = crcs
        for part in self.parts:
            yield HeaderBytes(part.file, 0, self._header(part, digests))
        yield from self._beside(digests)

    def _header(self, part: _Part, digests: Mapping[str, int]) -> bytes:
        own = {} if self.sidecar else {record.KEY: self._record(digests, ())}
        return part.header(own)

    def _record(self, digests: Mapping[str, int], files: Sequence[str]) -> str:
        return record.dump(
            self.entries,
            digests,
            files=files,
            nesting=self.nesting,
            objects=self.objects,
            ties=self.ties,
            tied_paths=self.tied_paths,
        )

    def _beside(self, digests: Mapping[str, int]) -> Iterator[HeaderBytes]:
        if not self.sidecar:
            return
        text = self._record(digests, [part.file for part in self.parts])
        yield HeaderBytes(record.SIDECAR, 0, text.encode("utf-8"))
        if self.index:
            yield HeaderBytes(self.index, 0, self._index().encode("utf-8"))

    def _index(self) -> str:
        weight_map = {entry.name: part.file for part in self.parts for entry in part.entries}
        total = sum(entry.nbytes for part in self.parts for entry in part.entries)
        document = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def refusal(dtype: DType) -> str | None:
    """Why a tensor of `dtype` cannot be stored, or None."""
    return None if dtype.safetensors else f"safetensors has no type for {dtype.name}"


def lay_out_file(
    entries: Sequence[OutputTensor],
    metadata: Mapping[str, str] | None = None,
    *,
    nesting: Nesting | None = None,
    objects: Sequence[Object] = (),
    ties: Mapping[str, str] | None = None,
    tied_paths: Mapping[str, tuple[str | int, ...]] | None = None,
) -> SafetensorsWritePlan:
    """One `.safetensors` file, with digests in its `__metadata__`.

    Args:
        metadata: text that is carried along in `__metadata__`.
        nesting: None for a flat file; else each entry's path is recorded with it, to restore the
            nesting from.
        objects: inline plain objects to record.
        ties: dropped name → kept name, recorded as `safetensors.torch.save_model` does.
        tied_paths: with nesting, the paths of dropped names, which this package then lists again
            when it reads.

    Raises:
        TargetError: `unsupported` for a dtype or name that the format lacks, or a header above its
            limit.
    """
    ties = dict(ties or {})
    _refuse_unfit(entries)
    part = _part("", entries, metadata, ties)
    target = SafetensorsWritePlan(
        tuple(entries), (part,), None, False, nesting, tuple(objects), ties, tied_paths or {}
    )
    header_nbytes = target.starts[0] - LENGTH_NBYTES
    if header_nbytes > safetensors.MAX_HEADER_NBYTES:
        message = (
            f"the header of one file would take {header_nbytes} bytes, above the limit of "
            f"{safetensors.MAX_HEADER_NBYTES} of the format; write a directory, which is split into shards"
        )
        raise TargetError("unsupported", message)
    return target


def lay_out_directory(
    entries: Sequence[OutputTensor],
    max_shard_nbytes: int,
    basename: str = "model",
    metadata: Mapping[str, str] | None = None,
    *,
    nesting: Nesting | None = None,
    objects: Sequence[Object] = (),
    ties: Mapping[str, str] | None = None,
    tied_paths: Mapping[str, tuple[str | int, ...]] | None = None,
) -> SafetensorsWritePlan:
    """A Hugging Face directory: one file, or shards of at most `max_shard_nbytes` with an index,
    and digests.

    A tensor above the limit gets a file of its own. Arguments and errors otherwise as for
    `lay_out_file`.
    """
    ties = dict(ties or {})
    _refuse_unfit(entries)
    overhead = len(json.dumps([dict(metadata or {}), ties], ensure_ascii=False).encode())
    groups = list(
        _shards(entries, max_shard_nbytes, safetensors.MAX_HEADER_NBYTES - overhead - 64)
    ) or [[]]
    if len(groups) == 1:
        names, index = [f"{basename}.safetensors"], None
    else:
        names = [
            f"{basename}-{i:05d}-of-{len(groups):05d}.safetensors"
            for i in range(1, len(groups) + 1)
        ]
        index = f"{basename}.safetensors.index.json"
    parts = tuple(
        _part(name, group, metadata, ties) for name, group in zip(names, groups, strict=True)
    )
    return SafetensorsWritePlan(
        tuple(entries), parts, index, True, nesting, tuple(objects), ties, tied_paths or {}
    )


def _part(
    file: str,
    entries: Iterable[OutputTensor],
    metadata: Mapping[str, str] | None,
    ties: Mapping[str, str],
) -> _Part:
    ordered = tuple(sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name)))
    held = {entry.name for entry in ordered}
    tied = {
        dropped: kept for dropped, kept in ties.items() if kept in held and dropped not in _RESERVED
    }
    return _Part(file, ordered, {"format": "pt", **(metadata or {}), **tied})


def _shards(
    entries: Iterable[OutputTensor], max_nbytes: int, max_header_nbytes: int
) -> Iterator[list[OutputTensor]]:
    """Fill shards in the given order until the next tensor, or its place in the header, no longer
    fits.
    """
    group: list[OutputTensor] = []
    nbytes = header = 0
    for entry in entries:
        item = _item_nbytes(entry)
        if group and (nbytes + entry.nbytes > max_nbytes or header + item > max_header_nbytes):
            yield group
            group, nbytes, header = [], 0, 0
        group.append(entry)
        nbytes += entry.nbytes
        header += item
    if group:
        yield group


def _item_nbytes(entry: OutputTensor) -> int:
    """Bytes that an entry takes in a header, at most: its offsets are not known yet."""
    known = (entry.name, entry.dtype.safetensors, list(entry.source.shape))
    return len(json.dumps(known, ensure_ascii=False).encode()) + _ITEM_NBYTES


def _refuse_unfit(entries: Sequence[OutputTensor]) -> None:
    unfit = [entry for entry in entries if refusal(entry.dtype)]
    if unfit:
        kinds = ", ".join(sorted({entry.dtype.name for entry in unfit}))
        message = (
            f"safetensors has no type for {kinds}, which {shown([entry.name for entry in unfit])} would need; "
            "leave them out with --exclude, or write DCP or a torch file"
        )
        raise TargetError("unsupported", message, tensor=unfit[0].name)
    for entry in entries:
        if entry.name == METADATA or not record.is_unicode(entry.name):
            raise TargetError(
                "unsupported",
                f"safetensors cannot store a tensor of the name {entry.name!r}; rename it with --rename",
                tensor=entry.name,
            )
