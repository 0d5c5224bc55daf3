"""Read the zip form of `torch.save` (`.pt .pth .bin .ckpt`), without torch.

One pickle, `data.pkl`, holds everything but the storages, which are records `data/<key>` of their
own; so several tensors can lie in one storage, with any strides. Files from before torch 1.6 are
rejected by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ema_ckpt.core.catalog import (
    Catalog,
    Chunk,
    Diagnostic,
    Files,
    Nesting,
    Object,
    Payload,
    Tensor,
    check_geometry,
)
from ema_ckpt.core.errors import SourceError, UnsafeError, about
from ema_ckpt.core.text import shown
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.nesting import flatten
from ema_ckpt.formats.pickle.safe_globals import Opaque
from ema_ckpt.formats.pickle.tensors import TensorRef, load_value
from ema_ckpt.formats.torch_file.lenient import (
    LenientGlobals,
    Unreadable,
    check_discarded,
    check_supported,
    is_tensor,
    load_inline,
    object_warnings,
)
from ema_ckpt.formats.torch_zip.reader import Archive, read_archive

Path = tuple[str | int, ...]

# First bytes of other files than zips; the pickled number is torch's legacy MAGIC_NUMBER.
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
_PICKLE_MAGICS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True, slots=True)
class TorchReader:
    """Locates payloads by `Tensor.storage`: (file, key, first element, strides or None)."""

    archive: Archive

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        """Locate the storage behind a tensor, and the tensor in it."""
        file, key, start, strides = cast(
            "tuple[str, str, int, tuple[int, ...] | None]", tensor.storage
        )
        record = self.archive.record(f"data/{key}")
        return (Payload(file, record.offset, record.nbytes, strides, start, record.crc),)

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
    archive = open_archive(source, file)
    lenient = LenientGlobals()
    leaves, nesting = read_leaves(archive, lenient)
    tensors: list[Tensor] = []
    objects: list[Object] = []
    warnings: list[Diagnostic] = []
    for leaf_path, value in leaves:
        name = ".".join(map(str, leaf_path))
        if isinstance(value, TensorRef):
            shape, key, strides = value.shape, value.storage.key, value.strides_in_storage()
            check_geometry(name, shape, value.dtype, file)
            record = archive.storage(key, value.storage.nbytes, name)
            chunk = Chunk((0,) * len(shape), shape, file, record.offset, record.nbytes)
            storage = (file, key, value.start, strides)
            tensors.append(Tensor(name, leaf_path, shape, value.dtype, (chunk,), storage))
            continue
        check_supported(value, name, file)
        warnings += object_warnings(name, value, file)
        objects.append(Object(name, leaf_path, file, inline=value, is_inline=True))
    check_discarded(lenient.unsafe, [item.inline for item in objects], file)
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
        archives=frozenset({file}),
        digests=_digests(archive, tensors),
        warnings=tuple(warnings),
        nesting=nesting,
        order=tuple([".".join(map(str, leaf_path)) for leaf_path, _ in leaves]),
    )


def open_archive(source: Files, file: str) -> Archive:
    """Read the directory of a torch file.

    Raises:
        SourceError: `unsupported` for old forms and programs, `bad-header`, `truncated-file`.
    """
    nbytes = source.size(file)
    if not nbytes:
        raise SourceError("truncated-file", f"{file}: the file is empty", file=file)
    _check_magic(source.read(file, 0, min(nbytes, 512)), file)
    archive = read_archive(source, file, 0, nbytes)
    if "constants.pkl" in archive.records:
        message = f"{file}: a TorchScript program, not a checkpoint; save its state_dict()"
        raise SourceError("unsupported", message, file=file)
    if "byteorder" in archive.records and archive.read("byteorder").strip() != b"little":
        raise SourceError("unsupported", f"{file}: written on a big-endian machine", file=file)
    return archive


def _check_magic(first: bytes, file: str) -> None:
    if first.startswith(b"PK"):
        return
    code, remedy = "unsupported", "load it with torch and save it again with torch.save"
    if first[2:].startswith(_LEGACY_MAGIC):
        problem = f"the form of torch.save before torch 1.6; {remedy}"
    elif first[257:262] == b"ustar":
        problem = f"the tar form of torch.save before torch 0.2; {remedy}"
    elif first.startswith(_PICKLE_MAGICS):
        problem = "a bare pickle, not a file of torch.save"
    elif first.startswith(b"version https://git-lfs"):
        code, problem = "bad-header", "a Git LFS pointer; fetch the file with `git lfs pull`"
    else:
        code, problem = "bad-header", "not a file of torch.save: it does not begin as a zip does"
    raise SourceError(code, f"{file}: {problem}", file=file)


def read_leaves(
    archive: Archive, lenient: LenientGlobals, is_tensor: Callable[[object], bool] = is_tensor
) -> tuple[list[tuple[Path, object]], Nesting]:
    """Read all leaves of a torch file by path, in stored order, and how they nest.

    Raises:
        SourceError: `unsupported unreadable name-collision`. UnsafeError: `unsafe-pickle`.
    """
    file, data = archive.file, archive.read("data.pkl")
    try:
        root = load_value(data, file, prepare=lenient.prepare)
    except UnsafeError:
        raise
    except SourceError:
        # A call of what an executor returned ends here; a strict reader names the executor.
        load_value(data, file)
        raise
    if isinstance(root, Unreadable):
        raise root.error("the checkpoint", file)
    if not isinstance(root, dict | list | tuple):
        kind, remedy = f"a {type(root).__name__}", ""
        if isinstance(root, TensorRef):
            kind = "one bare tensor"
        elif isinstance(root, Opaque):
            kind, remedy = f"a pickled {root.module}.{root.name}", "; save its state_dict()"
        message = f"{file}: holds {kind}, not a dict of tensors{remedy}"
        raise SourceError("unsupported", message, file=file)
    try:
        # Each thing that is stored takes a byte of the pickle at least.
        leaves, nesting = flatten(root, is_tensor, len(data) + 64)
    except SourceError as error:
        raise about(error, file=file) from None
    return [(path, value) for path, value in leaves if path], nesting


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
