"""Read files of `torch.save` (`.pt .pth .bin .ckpt`) and bare pickles, without torch.

One pickle, `data.pkl` of a zip, holds everything but the storages, which are records `data/<key>`
of their own; so several tensors can lie in one storage, with any strides. The forms that are no zip
are read by `legacy.py` into the same records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypeGuard, cast

from ema_ckpt.core.box import whole
from ema_ckpt.core.catalog import (
    Catalog,
    Chunk,
    Diagnostic,
    Files,
    Nesting,
    Object,
    Payload,
    Subclass,
    Tensor,
    check_geometry,
)
from ema_ckpt.core.errors import SourceError, UnsafeError, about
from ema_ckpt.core.text import counted, shown
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.nesting import flatten
from ema_ckpt.formats.pickle.arrays import Array
from ema_ckpt.formats.pickle.safe_globals import Global, Opaque
from ema_ckpt.formats.pickle.tensors import TensorRef, load_value
from ema_ckpt.formats.text_kinds import text_in
from ema_ckpt.formats.torch_file.legacy import read_pickled
from ema_ckpt.formats.torch_file.lenient import (
    LenientGlobals,
    Unreadable,
    big_endian_refused,
    check_discarded,
    is_unread,
    load_inline,
    object_warnings,
    refused,
    refused_tensor,
    wrapper_subclass,
)
from ema_ckpt.formats.torch_file.sharded_tensors import ShardRef, SubclassReader
from ema_ckpt.formats.torch_zip.reader import Archive, read_archive

Path = tuple[str | int, ...]
_Place = tuple[str, int, tuple[int, ...] | None]
_Places = Sequence[_Place]

_AnyTensor = TensorRef | ShardRef | Array | Unreadable

# Protocols 2 to 5, and 0 and 1 of a dict; files of torch before 1.6 among them.
_PICKLE_MAGICS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"(dp", b"}q\0")


@dataclass(frozen=True, slots=True)
class TorchReader:
    """Locates payloads by `Tensor.storage`: for each chunk key, first element, strides or None."""

    archive: Archive

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        """Locate the storage behind each chunk of a tensor, and the chunk in it."""
        payloads = []
        for key, start, strides in cast("_Places", (tensor.storage or ())[1:]):
            record = self.archive.record(f"data/{key}")
            place = Payload(self.archive.file, record.offset, record.nbytes, strides, start)
            payloads.append(place._replace(crc=record.crc))
        return tuple(payloads)

    def load(self, item: Object) -> object:
        """Return a value that was read along with the file. Raises as `load_inline`."""
        return load_inline(item)


def open_torchfile(source: Files, names: tuple[str, ...], path: str, resolved: str) -> Catalog:
    """Read the pickle and the directory of one torch file; payloads are not read.

    Objects of unknown classes become `Opaque` with a warning. Unsafe ones are listed with a warning
    too: `Catalog.reader.load` rejects them, and nothing that leads to a tensor may be one.

    Raises:
        SourceError: `unsupported` for old forms, tensor subclasses and whole pickled modules,
            `bad-header`, `unreadable`, `truncated-file`, `checksum`.
        UnsafeError: `unsafe-pickle` if unpickling a tensor would call anything unlisted.
    """
    file = names[0]
    lenient = LenientGlobals(SubclassReader())
    content = read_content(source, file, lenient)
    archive, (leaves, nesting) = content.archive, read_leaves(content)
    is_bare = not content.is_zip
    tensors: list[Tensor] = []
    objects: list[Object] = []
    warnings = archive.warnings()
    for leaf_path, value in leaves:
        if is_tensor(value):
            tensor = _tensor(archive, leaf_path, value)
            tensors.append(big_endian_refused(tensor) if content.is_big_endian else tensor)
            continue
        name = ".".join(map(str, leaf_path))
        warnings += object_warnings(name, value, file)
        objects.append(Object(name, leaf_path, file, inline=value, is_inline=True, is_bare=is_bare))
    check_discarded(lenient.unsafe, [value for _, value in leaves], file)
    return Catalog(
        path=path,
        resolved=resolved,
        format="torch",
        tensors=tuple(tensors),
        objects=tuple(objects),
        source=source,
        reader=TorchReader(archive),
        nested=any(len(leaf_path) > 1 for leaf_path, _ in leaves),
        files={file: source.size(file)},
        digests=_digests(archive, tensors),
        warnings=tuple(warnings),
        archives=frozenset([file] if content.is_zip else ()),
        nesting=nesting,
        order=tuple([".".join(map(str, leaf_path)) for leaf_path, _ in leaves]),
    )


def _tensor(archive: Archive, path: Path, value: _AnyTensor) -> Tensor:
    """List a tensor, whole or one rank's piece of it, or one that is not read."""
    file = archive.file
    if isinstance(value, Array):
        array = Global(value.module, value.name, None)
        value = value.ref or Unreadable(array, "unsupported", value.reason, value.args)
    if isinstance(value, Unreadable):
        return _with_parts(archive, refused_tensor(path, value, file), value)
    name = ".".join(map(str, path))
    shards = [(whole(value.shape), value)] if isinstance(value, TensorRef) else value.shards
    check_geometry(name, value.shape, value.dtype, file)
    if isinstance(value, ShardRef) and sum(box.numel for box, _ in shards) < prod(value.shape):
        held = ", ".join(f"{list(box.sizes)} at {list(box.offsets)}" for box, _ in shards)
        problem = f"the file holds {held or 'no part'} of {list(value.shape)}, what one rank has"
        remedy = "put the files of all ranks into one directory and open that"
        message = f"{problem} of {counted(value.ranks, 'rank')}; {remedy}"
        refusal = Diagnostic("incomplete", message)
        return refused(path, value.shape, value.dtype, file, refusal)
    chunks: list[Chunk] = []
    places: list[_Place] = []
    for box, ref in shards:
        record = archive.storage(ref.storage.key, ref.storage.nbytes, name)
        chunks.append(Chunk(box.offsets, box.sizes, file, record.offset, record.nbytes))
        places.append((ref.storage.key, ref.start, ref.strides_in_storage()))
    return Tensor(name, path, value.shape, value.dtype, tuple(chunks), (file, *places))


def _with_parts(archive: Archive, tensor: Tensor, value: Unreadable) -> Tensor:
    """List the tensors inside a subclass that is not read, where they are plain ones."""
    wrapped = wrapper_subclass(value)
    if wrapped is None or tensor.refusal is None:
        return tensor
    kind, state = wrapped
    parts, attributes = {}, {}
    for key, one in state.items():
        if isinstance(one, TensorRef):
            parts[key] = _tensor(archive, (*tensor.path, key), one)
        elif one is not None:
            attributes[key] = one
    refusal = tensor.refusal
    if kind.startswith("torchao."):
        hint = "or write its values with --dequantize"
        refusal = Diagnostic(refusal.code, f"{refusal.message}, {hint}")
    return replace(tensor, refusal=refusal, subclass=Subclass(kind, attributes, parts))


class Content(NamedTuple):
    """What a torch file holds: the value of its pickle, of `nbytes` bytes, and its storages."""

    root: object
    archive: Archive
    nbytes: int
    is_big_endian: bool
    is_zip: bool


def read_content(source: Files, file: str, lenient: LenientGlobals) -> Content:
    """Read the pickle and the directory of a torch file of any form.

    Raises:
        SourceError: `unsupported` for programs and forms that are not read, `bad-header`,
            `unreadable`, `truncated-file`. UnsafeError: `unsafe-pickle`.
    """
    nbytes = source.size(file)
    if not nbytes:
        raise SourceError("truncated-file", f"{file}: the file is empty", file=file)
    first = source.read(file, 0, min(nbytes, 512))
    if first.startswith(b"PK"):
        return _read_zip(read_archive(source, file, 0, nbytes), lenient)
    if first.startswith(_PICKLE_MAGICS):
        root, archive, nbytes, is_swapped = read_pickled(source, file, lenient)
        return Content(root, archive, nbytes, is_swapped, is_zip=False)
    code, problem = "bad-header", "not a file of torch.save: it does not begin as a zip does"
    if first[257:262] == b"ustar":
        code, problem = "unsupported", "the tar form of torch.save before torch 0.2"
        problem += "; load it with torch and save it again with torch.save"
    elif (text := text_in(first)) is not None:
        problem = f"not a file of torch.save: {text}"
    raise SourceError(code, f"{file}: {problem}", file=file)


def _read_zip(archive: Archive, lenient: LenientGlobals) -> Content:
    file = archive.file
    if "constants.pkl" in archive.records:
        message = f"{file}: a TorchScript program, not a checkpoint; save its state_dict()"
        raise SourceError("unsupported", message, file=file)
    data, order = archive.read("data.pkl"), b"little"
    if "byteorder" in archive.records:
        order = archive.read("byteorder")
        if order not in (b"little", b"big"):
            problem = f"its byte order is {order[:20]!r}, which torch refuses to load"
            raise SourceError("bad-header", f"{file}: {problem}", file=file)
    try:
        root = load_value(data, file, prepare=lenient.prepare)
    except UnsafeError:
        raise
    except SourceError:
        # A call of what an executor returned ends here; a strict reader names the executor.
        load_value(data, file)
        raise
    return Content(root, archive, len(data), order != b"little", is_zip=True)


def is_tensor(value: object) -> TypeGuard[_AnyTensor]:
    """Whether a value of a torch file is a tensor, sharded and unread ones included."""
    return isinstance(value, TensorRef | ShardRef | Array) or is_unread(value)


def read_leaves(content: Content) -> tuple[list[tuple[Path, object]], Nesting]:
    """List all leaves of a torch file by path, in stored order, and how they nest.

    Raises:
        SourceError: `unsupported`, `name-collision`. UnsafeError: `unsafe-pickle`.
    """
    root, file = content.root, content.archive.file
    if isinstance(root, Unreadable):
        raise root.error("the checkpoint", file)
    if not isinstance(root, dict | list | tuple):
        kind, remedy = f"a {type(root).__name__}", ""
        if is_tensor(root):
            kind = "one bare tensor"
        elif isinstance(root, Opaque):
            kind, remedy = f"a pickled {root.module}.{root.name}", "; save its state_dict()"
        message = f"{file}: holds {kind}, not a dict of tensors{remedy}"
        raise SourceError("unsupported", message, file=file)
    leaves, nesting = flat_leaves(content)
    return [(path, value) for path, value in leaves if path], nesting


def flat_leaves(content: Content) -> tuple[list[tuple[Path, object]], Nesting]:
    """List the leaves of whatever a torch file holds; that of a bare value has the path ().

    Raises:
        SourceError: `unsupported`, `name-collision`.
    """
    try:
        # Each thing that is stored takes a byte of the pickle at least.
        return flatten(content.root, is_tensor, content.nbytes + 64)
    except SourceError as error:
        raise about(error, file=content.archive.file) from None


def _digests(archive: Archive, tensors: Sequence[Tensor]) -> Mapping[str, int]:
    if sidecar.SIDECAR not in archive.records:
        return {}
    content = sidecar.parse(archive.read(sidecar.SIDECAR), archive.file)
    lost = sorted(content.digests.keys() - {tensor.name for tensor in tensors})
    if lost:
        message = f"digests are recorded of tensors that are not there: {shown(lost)}"
        raise SourceError(
            "index-mismatch", f"{archive.file}: {message}", tensor=lost[0], file=archive.file
        )
    return sidecar.digests_of(content, tensors, archive.file)
