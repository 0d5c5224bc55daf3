"""Read safetensors: one file, the shards of a Hugging Face index, or the files of torch's ranks.

torch's HuggingFaceStorageWriter leaves `shard-R-model-i-of-n.safetensors` where each rank saves its
own: every file says at which offsets its chunks begin in the whole tensors, and none how large
these are or how many ranks there were
(torch/distributed/checkpoint/hf_storage.py, `_hf_utils.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ema_ckpt.core.catalog import (
    Catalog,
    Chunk,
    Diagnostic,
    Files,
    Nesting,
    Object,
    Payload,
    Problem,
    Tensor,
    check_geometry,
    refuse_problems,
)
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import RefusedError, SourceError
from ema_ckpt.core.text import shown
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.safetensors.compact_record import Entry, crc_of, expand, is_compact
from ema_ckpt.formats.safetensors.header import Shard, open_shard
from ema_ckpt.formats.safetensors.index import (
    check_names,
    lacking_shards,
    names_by_file,
    open_indexed,
    read_index,
)
from ema_ckpt.formats.sidecar import Sidecar

_RANK_SHARD = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class SafetensorsReader:
    """Payloads lie bare at the chunk's span; digests are CRCs of just these bytes.

    `crcs` goes by chunk and not by name, as tensors may get other names where several files make
    one checkpoint.
    """

    crcs: Mapping[Chunk, int]

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        return tuple(
            Payload(chunk.file, chunk.offset, chunk.nbytes, crc=self.crcs.get(chunk))
            for chunk in tensor.chunks
        )

    def load(self, item: Object) -> object:
        return item.inline


def open_safetensors(
    source: Files, names: tuple[str, ...], path: str, resolved: str, *, lenient: bool = False
) -> Catalog:
    """Read the headers of one `.safetensors` file, of all shards of an index, or of torch's ranks.

    Args:
        names: the file, or the `*.index.json` file, or the files of all ranks.
        lenient: list what is wrong with files and index entries in `Catalog.problems`, and go on.

    Raises:
        SourceError: `bad-header`, `index-mismatch`, `missing-file`, `truncated-file`, `checksum`,
            `unsupported`.
        UnsafeError: `unsafe-path`.
    """
    problems: list[Problem] = []
    warnings: list[Diagnostic] = []
    left_out: list[str] = []
    is_index = names[0].endswith(".json")
    if is_index:
        shards, files = _open_index(source, names[0], problems, warnings, lenient=lenient)
        left_out, found = lacking_shards(names[0], files)
        warnings += found
    else:
        shards, files = _open_files(source, names, problems, lenient=lenient)
        warnings += _unseen_ranks(shards, resolved)
    content = _read_sidecar(source, shards, files, warnings, problems)
    if not lenient:
        refuse_problems(problems)
    if is_index:
        content = _unless_stale(content, source, names[0], warnings)
    if content.version > sidecar.VERSION:
        message = f"{resolved}: digests of version {content.version} are not known here"
        warnings.append(Diagnostic("unchecked", message))
    stored, metadata = _merge(shards)
    is_whole = is_index or files.keys() >= set(content.files)
    if is_whole and len(shards) == len(files):
        _check_none_lost(content, stored, resolved)
    ties = dict(content.ties) or _saved_ties(metadata, stored)
    tensors = _as_recorded(stored, content)
    digests = sidecar.digests_of(content, tensors, resolved)
    return Catalog(
        path=path,
        resolved=resolved,
        format="safetensors",
        tensors=tuple(tensors),
        objects=content.objects,
        source=source,
        reader=SafetensorsReader(_chunk_crcs(tensors, digests)),
        nested=content.nesting is not None,
        world_size=max(_ranks(shards), default=None),
        files=files,
        digests=digests,
        warnings=tuple(warnings),
        problems=tuple(problems),
        nesting=content.nesting or Nesting(),
        ties=ties,
        order=content.order,
        header_text={key: text for key, text in metadata.items() if key not in ties},
        left_out=tuple(left_out),
    )


def _chunk_crcs(tensors: Iterable[Tensor], digests: Mapping[str, int]) -> dict[Chunk, int]:
    """CRC-32 of each chunk that is a whole tensor: its digest."""
    crcs: dict[Chunk, int] = {}
    for tensor in tensors:
        if tensor.name in digests and len(tensor.chunks) == 1:
            crcs[tensor.chunks[0]] = digests[tensor.name]
    return crcs


def _open_files(
    source: Files, names: Sequence[str], problems: list[Problem], *, lenient: bool
) -> tuple[list[Shard], dict[str, int]]:
    """Open files without an index; where there are several, one that cannot be read is passed."""
    shards: list[Shard] = []
    files = dict.fromkeys(names, 0)
    for name in names:
        try:
            shard = open_shard(source, name, lenient=lenient)
        except SourceError as error:
            if not lenient or len(names) == 1:
                raise
            problems.append(Problem.of(error))
            continue
        files[name] = shard.nbytes
        shards.append(shard)
    return shards, files


def _merge(shards: Iterable[Shard]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Merge the tensors, by name, and the metadata of all shards."""
    pieces: dict[str, list[tuple[Tensor, Chunk]]] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            (chunk,) = tensor.chunks
            if shard.offsets is not None and shard.offsets[tensor.name] != chunk.offsets:
                chunk = chunk._replace(offsets=shard.offsets[tensor.name])
            pieces.setdefault(tensor.name, []).append((tensor, chunk))
        metadata |= shard.metadata
    metadata.pop(sidecar.KEY, None)
    return {name: _put_together(name, parts) for name, parts in pieces.items()}, metadata


def _put_together(name: str, pieces: Sequence[tuple[Tensor, Chunk]]) -> Tensor:
    """Put the chunks of a tensor together; it ends where the last of them does."""
    first, begin = pieces[0]
    if len(pieces) == 1 and begin is first.chunks[0]:
        return first
    for tensor, chunk in pieces[1:]:
        if (tensor.dtype, len(tensor.shape)) != (first.dtype, len(first.shape)):
            form, other = (f"{t.dtype.name} {list(t.shape)}" for t in (tensor, first))
            message = f"{chunk.file}: tensor {name!r} is {form}, in {first.first_file} {other}"
            raise SourceError("index-mismatch", message, tensor=name, file=chunk.file)
    chunks = tuple(chunk for _, chunk in pieces)
    ends = [[a + b for a, b in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
    shape = tuple(map(max, zip(*ends, strict=True)))
    check_geometry(name, shape, first.dtype, chunks[0].file)
    return replace(first, shape=shape, chunks=chunks)


def _ranks(shards: Iterable[Shard]) -> set[int]:
    """Ranks, from 1, that the names of files say, where the files say where their chunks begin."""
    ranks = set()
    for shard in shards:
        match = _RANK_SHARD.fullmatch(shard.file)
        if match and shard.offsets is not None:
            ranks.add(int(match[1]))
    return ranks


def _unseen_ranks(shards: Sequence[Shard], where: str) -> Iterable[Diagnostic]:
    """Warn that files of further ranks, were there any, could not be missed."""
    if all(shard.offsets is None for shard in shards):
        return
    ranks = _ranks(shards)
    absent = sorted(set(range(1, max(ranks, default=1))) - ranks)
    message = f"{where}: put together from {len(shards)} files of torch's HuggingFaceStorageWriter"
    if absent:
        message += f", none of which is of shard {', '.join(map(str, absent[:10]))}"
    reason = "which record neither how many ranks saved nor the shapes of whole tensors"
    remedy = "compare with the number of ranks of the run"
    yield Diagnostic("unchecked", f"{message}, {reason}: missing last rows go unseen; {remedy}")


def _read_sidecar(
    source: Files,
    shards: list[Shard],
    files: Mapping[str, int],
    warnings: list[Diagnostic],
    problems: list[Problem],
) -> Sidecar:
    """Read the sidecar in the one file, or the one beside the files if it is about one of them."""
    is_one = len(files) == len(shards) == 1
    if is_one and sidecar.KEY in shards[0].metadata:
        return _parse_own(shards[0], warnings, problems)
    try:
        content = sidecar.read(source, problems)
    except RefusedError as error:
        warnings.append(sidecar.unread(error))
        return Sidecar()
    except SourceError as error:
        if error.code == "missing-file":
            return Sidecar()
        raise
    if not files.keys() & set(content.files):
        return Sidecar()
    return _unless_changed(content, shards[0], shards[0].file, warnings) if is_one else content


def _unless_changed(
    content: Sidecar, shard: Shard, name: str, warnings: list[Diagnostic]
) -> Sidecar:
    """Return a sidecar, or none if the tensors of its one file are others than it describes.

    Raises:
        SourceError: `index-mismatch` if one name differs in one character, which is damage and no
            program's work.
    """
    entries = _entries(shard)
    if name not in content.describes or not content.is_stale(name, crc_of(sorted(entries))):
        return content
    recorded = {Entry(key, digest.dtype, digest.shape) for key, digest in content.digests.items()}
    lost, added = recorded.difference(entries), set(entries) - recorded
    if not lost and not added:
        return content
    if len(lost) == len(added) == 1:
        _refuse_damaged_name(lost.pop(), added.pop(), shard.file)
    warnings.append(sidecar.stale_header(shard.file))
    return Sidecar()


def _refuse_damaged_name(recorded: Entry, stored: Entry, file: str) -> None:
    """Refuse a file in which one name differs from the recorded one in one character."""
    is_same_tensor = recorded[1:] == stored[1:]
    if not is_same_tensor or len(recorded.name) != len(stored.name):
        return
    differing = sum([a != b for a, b in zip(recorded.name, stored.name, strict=True)])
    if differing == 1:
        message = f"{file}: tensor {stored.name!r} is recorded as {recorded.name!r}: one character "
        message += "was damaged, or changed by another program; take the file from its source"
        raise SourceError("index-mismatch", message, tensor=stored.name, file=file)


def _entries(shard: Shard) -> list[Entry]:
    return [Entry(tensor.name, tensor.dtype.name, tensor.shape) for tensor in shard.tensors]


def _parse_own(shard: Shard, warnings: list[Diagnostic], problems: list[Problem] | None) -> Sidecar:
    """Parse the record in a file's own header, in either form."""
    text, file = shard.metadata[sidecar.KEY], shard.file
    document = sidecar.load_json(text, file)
    sidecar.check_own(text, document, file, problems)
    if not is_compact(document):
        content = sidecar.parse_document(lambda: document, file)
        return _unless_changed(content, shard, sidecar.ITSELF, warnings)
    entries = _entries(shard)
    if document.get("header") != sidecar.crc_text(crc_of(entries)):
        warnings.append(sidecar.stale_header(file))
        return Sidecar()
    return sidecar.parse_document(lambda: expand(document, entries), file)


def _check_none_lost(content: Sidecar, names: Mapping[str, Tensor], where: str) -> None:
    lost = sorted(content.digests.keys() - names.keys())
    if lost:
        message = f"{where}: digests are recorded of tensors that are not there: {shown(lost)}"
        raise SourceError("index-mismatch", message, tensor=lost[0])


def _as_recorded(stored: dict[str, Tensor], content: Sidecar) -> list[Tensor]:
    """Restore order and paths, and list tensors again under names that were dropped as tied."""
    if set(content.sequence) >= stored.keys():
        # A file is ordered by element size; averages without names are paired with parameters in
        # the model's order.
        stored = _in_order(stored, content.sequence)
    if content.nesting is None and not content.ties:
        return list(stored.values())
    shared = set(content.ties.values())
    restored: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        storage = (name,) if name in shared else None
        restored[name] = replace(tensor, path=content.paths.get(name, (name,)), storage=storage)
    for name, kept in content.ties.items():
        if kept in stored and name not in stored:
            path = content.paths.get(name, (name,))
            restored[name] = replace(restored[kept], name=name, path=path)
    return list(_in_order(restored, content.order).values())


def _in_order(tensors: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Put the tensors called `names` first, in that order."""
    return {name: tensors[name] for name in names if name in tensors} | tensors


def _saved_ties(metadata: Mapping[str, str], names: Mapping[str, Tensor]) -> dict[str, str]:
    """Find the ties that safetensors.torch.save_model leaves: {dropped name: kept name}.

    Any text may stand there. An entry whose names end alike is enough to pass the tie on and to
    excuse a missing name, and not to list one.
    """
    ties: dict[str, str] = {}
    for key, text in metadata.items():
        end_alike = key.rpartition(".")[2] == text.rpartition(".")[2]
        if end_alike and text in names and key not in names:
            ties[key] = text
    return ties


def _open_index(
    source: Files,
    index: str,
    problems: list[Problem],
    warnings: list[Diagnostic],
    *,
    lenient: bool,
) -> tuple[list[Shard], dict[str, int]]:
    """Open every file that an index names, and list all that is wrong with any of them."""
    weight_map, total = read_index(source, index)
    expected = names_by_file(weight_map)
    shards: list[Shard] = []
    files = dict.fromkeys(expected, 0)
    for file, names in expected.items():
        with open_indexed(file, names, problems):
            shard = open_shard(source, file, lenient=lenient)
            problems += check_names(index, file, {tensor.name for tensor in shard.tensors}, names)
            files[file] = shard.nbytes
            shards.append(shard)
    stored = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    # Indices that count tied tensors twice, or bytes of another dtype, are common: only a warning.
    if total not in (None, stored) and len(shards) == len(files):
        message = f"{index}: total_size is {total}, the shards hold {stored} bytes"
        if files:
            warnings.append(Diagnostic("index-mismatch", message))
        else:
            problems.append(Problem("index-mismatch", None, index, f"{message}: it names none"))
    return shards, files


def _unless_stale(
    content: Sidecar, source: Files, index: str, warnings: list[Diagnostic]
) -> Sidecar:
    """Return what a sidecar says; nothing if the index was written again since it was made."""
    if index not in content.describes:
        return content
    if not content.is_stale(index, crc32(source.read(index, 0, source.size(index)))):
        return content
    warnings.append(sidecar.stale(index))
    return Sidecar()
