"""Lay out one safetensors file, or a Hugging Face directory with its index.

Within a file tensors are ordered by element size, largest first, then by name, so that each is
aligned to its element size; shards are filled in the order in which the tensors are given, as
Hugging Face does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ema_ckpt.core.box import whole
from ema_ckpt.core.catalog import Diagnostic, Ints, Nesting, Object, Path
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import TargetError
from ema_ckpt.core.text import shown
from ema_ckpt.core.write_plan import HeaderBytes, OutputTensor, WriteItem
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.safetensors import header
from ema_ckpt.formats.safetensors.compact_record import Entry, compact, crc_of
from ema_ckpt.formats.safetensors.header import FIELDS, LENGTH_NBYTES, METADATA, stored_shape

_ALIGNMENT = 8
# How the record of one file is written, and what it lacks then: the first that fits is taken.
PLAIN, COMPACT, NO_DIGESTS, NAMES_ONLY, BARE = "plain", "compact", "no-digests", "names", "bare"
_LOST = {
    PLAIN: "",
    COMPACT: "",
    NO_DIGESTS: "digests",
    NAMES_ONLY: "digests, nesting, plain objects and the order of names",
    BARE: "digests, nesting, plain objects, the order of names and the mark of the format",
}
# Keys of __metadata__ that mean something else than "this name is tied to that one".
_RESERVED = ("format", sidecar.KEY)
# Bytes of a tensor in a header beside its name, dtype and shape, with the longest offsets possible.
_ENTRY_NBYTES = len('"":{"dtype":"","shape":[],"data_offsets":[,]},') + 2 * 20


class _Shard(NamedTuple):
    """One file of the output: its tensors in the order in which they lie, and its own metadata."""

    file: str
    tensors: tuple[OutputTensor, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def entries(self) -> list[Entry]:
        """What a record is about: the tensors in the order of the header."""
        return [Entry(t.name, t.dtype.name, t.source.shape) for t in self.tensors]

    def header(self, own: Mapping[str, str]) -> bytes:
        """Encode length, JSON and padding: all that comes before the buffer."""
        metadata = {**self.metadata, **own}
        entries: dict[str, object] = {METADATA: metadata} if metadata else {}
        end = 0
        for tensor in self.tensors:
            begin, end = end, end + tensor.nbytes
            shape = stored_shape(tensor.source.shape, tensor.dtype)
            values = tensor.dtype.safetensors, shape, [begin, end]
            entries[tensor.name] = dict(zip(FIELDS, values, strict=True))
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(LENGTH_NBYTES, "little") + text


@dataclass(frozen=True)
class SafetensorsWritePlan:
    """One file that holds its own sidecar (named ""), or the shards of a directory with one beside.

    `tensors` are in the order given, which the sidecar keeps; shards have an order of their own.
    """

    tensors: tuple[OutputTensor, ...]
    shards: tuple[_Shard, ...]
    index: str | None
    nesting: Nesting | None
    objects: tuple[Object, ...]
    ties: Mapping[str, str]
    tied_paths: Mapping[str, Path]
    order: Sequence[str]
    form: str = PLAIN

    @property
    def warnings(self) -> Sequence[Diagnostic]:
        """What does not fit into the header beside the names."""
        lost = _LOST[self.form]
        if not lost:
            return ()
        limit = f"the limit of the format is {header.MAX_HEADER_NBYTES} bytes"
        message = f"the header of {len(self.tensors)} names has no room for {lost} ({limit})"
        return (Diagnostic("unchecked", f"{message}; write a directory to keep them"),)

    @property
    def marker(self) -> str:
        """The index, or the only file."""
        return self.index or self.shards[0].file

    @cached_property
    def _described(self) -> Mapping[str, int]:
        """What the sidecar says of the one file, which has no name ("") if it holds the sidecar."""
        return {shard.file: crc_of(sorted(shard.entries())) for shard in self.shards}

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Bytes before each shard's buffer. Digests have a fixed width, so zeros show the size."""
        return tuple(len(self._header(shard, {})) for shard in self.shards)

    @cached_property
    def files(self) -> Mapping[str, int]:
        shards = zip(self.shards, self.starts, strict=True)
        sizes = {shard.file: start + shard.nbytes for shard, start in shards}
        return sizes | {header.file: len(header.data) for header in self._beside({})}

    @cached_property
    def items(self) -> Sequence[WriteItem]:
        items: list[WriteItem] = []
        for shard, start in zip(self.shards, self.starts, strict=True):
            offset = start
            for tensor in shard.tensors:
                items.append(WriteItem(tensor, whole(tensor.source.shape), shard.file, offset))
                offset += tensor.nbytes
        return items

    def fixed_bytes(self) -> Iterator[HeaderBytes]:
        """Yield the headers of shards, which hold no digests: those lie beside them."""
        for shard in self.shards:
            if shard.file:
                yield HeaderBytes(shard.file, 0, self._header(shard, {}))

    def item_bytes(self, index: int, crc: int) -> Iterator[HeaderBytes]:
        """Yield nothing: payloads follow one another."""
        _ = index, crc
        return iter(())

    def header_bytes(
        self, crcs: Sequence[int], digests: Mapping[str, int]
    ) -> Iterator[HeaderBytes]:
        _ = crcs
        for shard in self.shards:
            if not shard.file:
                yield HeaderBytes("", 0, self._header(shard, digests))
        yield from self._beside(digests)

    def _header(self, shard: _Shard, digests: Mapping[str, int]) -> bytes:
        if self.form == BARE:
            metadata = {key: text for key, text in shard.metadata.items() if key != "format"}
            return shard._replace(metadata=metadata).header({})
        if shard.file or self.form == NAMES_ONLY:
            return shard.header({})
        document = self._document(digests, (), self._described)
        if self.form == PLAIN:
            return shard.header({sidecar.KEY: sidecar.dump(document)})
        text = compact(document, shard.entries(), has_digests=self.form == COMPACT)
        return shard.header({sidecar.KEY: text})

    def _beside(self, digests: Mapping[str, int]) -> Iterator[HeaderBytes]:
        """Yield the sidecar and then the index, which makes the directory complete."""
        files = [shard.file for shard in self.shards]
        if files == [""]:
            return
        index, describes = b"", self._described
        if self.index:
            places: dict[str, str] = {}
            for shard in self.shards:
                places |= dict.fromkeys((item.name for item in shard.tensors), shard.file)
            document = {
                "metadata": {"total_size": sum(shard.nbytes for shard in self.shards)},
                "weight_map": dict(sorted(places.items())),
            }
            text = json.dumps(document, ensure_ascii=False, indent=2)
            index = f"{text}\n".encode()
            describes = {self.index: crc32(index)}
        text = sidecar.dump(self._document(digests, files, describes))
        yield HeaderBytes(sidecar.SIDECAR, 0, text.encode("utf-8"))
        if self.index:
            yield HeaderBytes(self.index, 0, index)

    def _document(
        self,
        digests: Mapping[str, int],
        files: Sequence[str],
        describes: Mapping[str, int] | None = None,
    ) -> dict[str, object]:
        return sidecar.make_document(
            self.tensors,
            digests,
            files=files,
            nesting=self.nesting,
            objects=self.objects,
            ties=self.ties,
            tied_paths=self.tied_paths,
            order=self.order,
            describes=describes,
        )


def refusal(dtype: DType, shape: Ints) -> str | None:
    """Say why a tensor of `dtype` and `shape` cannot be stored, or return None."""
    lack = _lack(dtype, shape)
    return f"safetensors has no {lack}" if lack else None


def _lack(dtype: DType, shape: Ints) -> str | None:
    if dtype.safetensors is None:
        return f"type for {dtype.name}"
    if not shape and stored_shape((1,), dtype) != [1]:
        return f"scalar of {dtype.name}"
    return None


def lay_out(
    tensors: Sequence[OutputTensor],
    metadata: Mapping[str, str] | None = None,
    *,
    max_shard_nbytes: int | None = None,
    basename: str = "model",
    nesting: Nesting | None = None,
    objects: Sequence[Object] = (),
    ties: Mapping[str, str] | None = None,
    tied_paths: Mapping[str, Path] | None = None,
    order: Sequence[str] = (),
    generation: int = 0,
    has_index: bool | None = None,
) -> SafetensorsWritePlan:
    """Lay out one file, or a Hugging Face directory of one file or of shards with an index.

    Args:
        metadata: text that is carried along in `__metadata__`.
        max_shard_nbytes: None for one file with the digests in its `__metadata__`; else the largest
            shard of a directory (a tensor above that gets a file of its own).
        nesting: None for flat names; else the tensors' paths are recorded, to restore the nesting.
        objects: inline plain objects to record.
        ties: dropped name → kept name, recorded as `safetensors.torch.save_model` does.
        tied_paths: with nesting, the paths of dropped names, which this package then lists again
            when it reads.
        order: names of tensors and objects together, in the order of the state dict.
        generation: number in the names of shards, by which they differ from those of another
            checkpoint in the same directory.
        has_index: whether a directory has an index; None: if it has several shards.

    Raises:
        TargetError: `unsupported` for a dtype or name that the format lacks, or a header above its
            limit.
    """
    _check_supported(tensors)
    metadata, ties, index = metadata or {}, dict(ties or {}), None
    if max_shard_nbytes is None:
        files: dict[str, Sequence[OutputTensor]] = {"": tensors}
    else:
        overhead = len(json.dumps([dict(metadata), ties], ensure_ascii=False).encode())
        max_header_nbytes = header.MAX_HEADER_NBYTES - overhead - 64
        groups = list(_split(tensors, max_shard_nbytes, max_header_nbytes)) or [[]]
        files = {f"{basename}.safetensors": tensors}
        if has_index or (has_index is None and len(groups) > 1):
            index = f"{basename}.safetensors.index.json"
            files = _numbered(groups, f"{basename}-v{generation}" if generation else basename)
    shards = tuple(_shard(file, group, metadata, ties) for file, group in files.items())
    plan = SafetensorsWritePlan(
        tuple(tensors),
        shards,
        index,
        nesting,
        tuple(objects),
        ties,
        tied_paths or {},
        order,
    )
    return _fitted(plan) if max_shard_nbytes is None else plan


def _fitted(plan: SafetensorsWritePlan) -> SafetensorsWritePlan:
    """Choose the first form of the record with which the header of the one file is not too long.

    Raises:
        TargetError: `unsupported` if the names alone are.
    """
    header_nbytes = 0
    for form in _LOST:
        plan = replace(plan, form=form)
        header_nbytes = plan.starts[0] - LENGTH_NBYTES
        if header_nbytes <= header.MAX_HEADER_NBYTES:
            return plan
    limit = f"above the limit of {header.MAX_HEADER_NBYTES} of the format"
    message = f"the header of one file would take {header_nbytes} bytes, {limit}"
    remedy = "write a directory, which is split into shards"
    raise TargetError("unsupported", f"{message}; {remedy}")


def _shard(
    file: str,
    tensors: Iterable[OutputTensor],
    metadata: Mapping[str, str],
    ties: Mapping[str, str],
) -> _Shard:
    ordered = tuple(sorted(tensors, key=lambda item: (-item.dtype.itemsize, item.name)))
    names = {tensor.name for tensor in ordered}
    tied = {
        dropped: kept
        for dropped, kept in ties.items()
        if kept in names and dropped not in _RESERVED
    }
    return _Shard(file, ordered, {"format": "pt", **metadata, **tied})


def _numbered(
    groups: Sequence[Sequence[OutputTensor]], stem: str
) -> dict[str, Sequence[OutputTensor]]:
    """Name shards as Hugging Face does."""
    last = f"{len(groups):05d}.safetensors"
    return {f"{stem}-{i:05d}-of-{last}": group for i, group in enumerate(groups, 1)}


def _split(
    tensors: Iterable[OutputTensor], max_nbytes: int, max_header_nbytes: int
) -> Iterator[list[OutputTensor]]:
    """Fill shards in the order given until the next tensor, or its header entry, does not fit."""
    group: list[OutputTensor] = []
    nbytes = header_nbytes = 0
    for tensor in tensors:
        fields = (tensor.name, tensor.dtype.safetensors, list(tensor.source.shape))
        entry_nbytes = len(json.dumps(fields, ensure_ascii=False).encode()) + _ENTRY_NBYTES
        nbytes += tensor.nbytes
        header_nbytes += entry_nbytes
        if group and (nbytes > max_nbytes or header_nbytes > max_header_nbytes):
            yield group
            group, nbytes, header_nbytes = [], tensor.nbytes, entry_nbytes
        group.append(tensor)
    if group:
        yield group


def _check_supported(tensors: Sequence[OutputTensor]) -> None:
    lacks = {tensor.name: _lack(tensor.dtype, tensor.source.shape) for tensor in tensors}
    unfit = {name: lack for name, lack in lacks.items() if lack}
    if unfit:
        kinds, names = ", no ".join(sorted(set(unfit.values()))), list(unfit)
        message = f"safetensors has no {kinds}, which {shown(names)} would need"
        remedy = "leave them out with --exclude, or write DCP or a torch file"
        raise TargetError("unsupported", f"{message}; {remedy}", tensor=names[0])
    for tensor in tensors:
        if tensor.name == METADATA or not sidecar.is_unicode(tensor.name):
            message = f"safetensors cannot store a tensor of the name {tensor.name!r}"
            remedy = "rename it with --rename"
            raise TargetError("unsupported", f"{message}; {remedy}", tensor=tensor.name)
