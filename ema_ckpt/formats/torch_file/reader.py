"""Files that `torch.save` writes (`.pt .pth .bin .ckpt`): reading the zip form, without torch.

One pickle, `data.pkl`, holds everything but the storages, which are records `data/<key>` of their
own; so several tensors can lie in one storage, with any strides. Files from before torch 1.6 are
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

from ema_ckpt.core.box import row_major_strides
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
from ema_ckpt.core.errors import SourceError, UnsafeError
from ema_ckpt.core.text import counted, shown
from ema_ckpt.formats import sidecar as record
from ema_ckpt.formats.nesting import flatten
from ema_ckpt.formats.pickle.safe_globals import (
    Global,
    Maker,
    Opaque,
    executor_within,
    is_executor,
    opaque_within,
    parts_of,
    within,
)
from ema_ckpt.formats.pickle.tensors import TensorRef, load_value
from ema_ckpt.formats.torch_zip.reader import Archive, read_archive

Path = tuple[str | int, ...]

# What the first bytes of other files than zips say; the pickled number is torch's legacy
# MAGIC_NUMBER.
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
_TAR_MAGIC_AT = 257
_REBUILDERS = frozenset(
    [
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
    ]
)


class Unreadable(Opaque):
    """Something that must not, or cannot, be read; who meets it raises `code` with `reason`."""

    __slots__ = ("code", "reason")

    def __init__(self, found: Global, code: str, reason: str, args: tuple[object, ...]) -> None:
        super().__init__(found.module, found.name, args, called=True)
        self.code = code
        self.reason = reason


class LenientGlobals:
    """Gives globals that stop a strict reader a stand-in that tells why, so that the rest can be
    listed.

    `unsafe` are all that would have been called, those included whose result the pickle throws
    away. `subclass` is given the arguments of each tensor subclass
    (`torch._tensor._rebuild_from_type_v2`).
    """

    def __init__(
        self, subclass: Callable[[Global, tuple[object, ...]], object] | None = None
    ) -> None:
        self.unsafe: list[Unreadable] = []
        self._subclass = subclass or strided_subclass

    def prepare(self, found: Global) -> None:
        """Put a stand-in for `found` where one is needed."""
        key = (found.module, found.name)
        if found.module == "torch._utils" and found.name in _REBUILDERS and found.make:
            found.make = _naming_refusals(found, found.make)
        elif key == ("torch._tensor", "_rebuild_from_type_v2"):
            found.make = lambda *args: self._subclass(found, args)
        elif found.module == "torch._utils" and found.name.startswith("_rebuild_"):
            reason = (
                f"it is stored in a form that ema_ckpt does not read (torch._utils.{found.name})"
            )
            found.make = lambda *args: Unreadable(found, "unsupported", reason, args)
        elif key in (("builtins", "getattr"), ("__builtin__", "getattr")):
            found.make = lambda *args: self._attribute(found, args)
        elif found.make is None and is_executor(*key):
            found.make = lambda *args: self._refuse(found, args)

    def _refuse(self, found: Global, args: tuple[object, ...]) -> Unreadable:
        reason = f"unpickling would call {found.module}.{found.name}"
        self.unsafe.append(Unreadable(found, "unsafe-pickle", reason, args))
        return self.unsafe[-1]

    def _attribute(self, found: Global, args: tuple[object, ...]) -> object:
        """Protocol 2 writes a class inside a class as `getattr(Outer, "Inner")`: here it is no more
        than a name.
        """
        if len(args) != 2 or not isinstance(args[0], Global) or not isinstance(args[1], str):
            return self._refuse(found, args)
        inner = Global(args[0].module, f"{args[0].name}.{args[1]}", None)
        if is_executor(inner.module, inner.name):
            inner.make = lambda *given: self._refuse(inner, given)
        return inner


def _naming_refusals(found: Global, make: Maker) -> Maker:
    """`make`, but a tensor in a form that is not read (lazily conjugated, say) is refused once its
    name is known.
    """

    def rebuild(*args: object) -> object:
        try:
            return make(*args)
        except SourceError as error:
            if error.code != "unsupported":
                raise
            return Unreadable(found, error.code, str(error), args)

    return rebuild


def strided_subclass(found: Global, args: tuple[object, ...]) -> object:
    """`_rebuild_from_type_v2(function, class, args, state)`: strided data under a class that is
    only named.
    """
    match args:
        case [Global(module="torch._utils", make=make) as function, _, tuple() as given, _] if (
            make is not None and function.name in _REBUILDERS
        ):
            return make(*given)
        case [_, Global(module=module, name=name), *_]:
            kind = f"{module}.{name}"
        case _:
            kind = "of an unknown class"
    reason = f"it is a tensor subclass ({kind}); save plain tensors, or save through torch.distributed.checkpoint"
    return Unreadable(found, "unsupported", reason, args)


@dataclass(frozen=True, slots=True)
class TorchReader:
    """Finds payloads by `Tensor.storage`: (file, key, first element, strides or None)."""

    archive: Archive

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        """The storage behind a tensor, and how the tensor lies in it."""
        file, key, start, strides = cast(
            "tuple[str, str, int, tuple[int, ...] | None]", tensor.storage
        )
        stored = self.archive.record(f"data/{key}")
        return (Payload(file, stored.offset, stored.nbytes, strides, start, stored.crc),)

    def load(self, item: Object) -> object:
        """A value that was read along with the file.

        Raises:
            UnsafeError: `unsafe-pickle` if unpickling it would run code.
        """
        return read_before(item)


def open_torchfile(source: Files, names: tuple[str, ...], path: str, resolved: str) -> Catalog:
    """Read the pickle and the directory of one torch file; payloads are not read.

    Objects of unknown classes become `Opaque` with a warning. Unsafe ones are listed with a warning
    too: `Catalog.reader.load` refuses them, and nothing that leads to a tensor may be one.

    Raises:
        SourceError: `unsupported` for old forms, tensor subclasses and whole pickled modules,
            `bad-header`, `unreadable`, `truncated-file`, `checksum`.
        UnsafeError: `unsafe-pickle` if unpickling a tensor would call anything unlisted.
    """
    file = names[0]
    archive = open_archive(source, file)
    tolerance = LenientGlobals()
    leaves, nesting = read_leaves(archive, tolerance)
    tensors, objects, warnings = _sort(archive, leaves)
    refuse_discarded(tolerance.unsafe, objects, file)
    digests = _digests(archive, tensors)
    return Catalog(
        path=path,
        resolved=resolved,
        format="torch",
        tensors=tensors,
        objects=objects,
        source=source,
        reader=TorchReader(archive),
        nested=any(len(place) > 1 for place, _ in leaves),
        files={file: source.size(file)},
        digests=digests,
        warnings=tuple(warnings),
        nesting=nesting,
    )


def open_archive(source: Files, file: str) -> Archive:
    """The directory of a torch file.

    Raises:
        SourceError: `unsupported` for old forms and programs, `bad-header`, `truncated-file`.
    """
    nbytes = source.size(file)
    if not nbytes:
        raise SourceError("truncated-file", f"{file}: the file is empty", file=file)
    _refuse_other_forms(source.read(file, 0, min(nbytes, 512)), file)
    archive = read_archive(source, file, 0, nbytes)
    if "constants.pkl" in archive.records:
        message = f"{file}: a TorchScript program, not a checkpoint; save its state_dict()"
        raise SourceError("unsupported", message, file=file)
    if "byteorder" in archive.records and archive.read("byteorder").strip() != b"little":
        raise SourceError("unsupported", f"{file}: written on a big-endian machine", file=file)
    return archive


def _refuse_other_forms(first: bytes, file: str) -> None:
    if first.startswith(b"PK"):
        return
    old = "; load it with torch and save it again with torch.save"
    if first[2:].startswith(_LEGACY_MAGIC):
        raise SourceError(
            "unsupported", f"{file}: the form of torch.save before torch 1.6{old}", file=file
        )
    if first[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        raise SourceError(
            "unsupported", f"{file}: the tar form of torch.save before torch 0.2{old}", file=file
        )
    if first.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise SourceError(
            "unsupported", f"{file}: a bare pickle, not a file of torch.save", file=file
        )
    if first.startswith(b"version https://git-lfs"):
        raise SourceError(
            "bad-header",
            f"{file}: a Git LFS pointer; fetch the file with `git lfs pull`",
            file=file,
        )
    raise SourceError(
        "bad-header",
        f"{file}: not a file of torch.save: it does not begin as a zip does",
        file=file,
    )


def is_tensor(value: object) -> bool:
    """Whether a value of a torch file is a tensor, or one in a form that is not read."""
    return isinstance(value, TensorRef) or (
        isinstance(value, Unreadable) and value.code == "unsupported"
    )


def read_leaves(
    archive: Archive, tolerance: LenientGlobals, is_tensor: Callable[[object], bool] = is_tensor
) -> tuple[list[tuple[Path, object]], Nesting]:
    """All that a torch file holds, by path in stored order, and how it nests.

    Raises:
        SourceError: `unsupported unreadable name-collision`. UnsafeError: `unsafe-pickle`.
    """
    where, data = archive.file, archive.read("data.pkl")
    root = _load(data, where, tolerance)
    if isinstance(root, Unreadable):
        refuse(root, "the checkpoint", where)
    if isinstance(root, Opaque):
        what = f"a pickled {root.module}.{root.name}, not a dict of tensors; save its state_dict()"
        raise SourceError("unsupported", f"{where}: holds {what}", file=where)
    if not isinstance(root, dict | list | tuple):
        what = "one bare tensor" if isinstance(root, TensorRef) else f"a {type(root).__name__}"
        raise SourceError(
            "unsupported", f"{where}: holds {what}, not a dict of tensors", file=where
        )
    try:
        # Each thing that is stored takes a byte of the pickle at least.
        leaves, nesting = flatten(root, is_tensor, len(data) + 64)
    except SourceError as error:
        raise error.about(file=where) from None
    return [(path, value) for path, value in leaves if path], nesting


def _load(data: bytes, where: str, tolerance: LenientGlobals) -> object:
    try:
        return load_value(data, where, prepare=tolerance.prepare)
    except UnsafeError:
        raise
    except SourceError:
        # A call of what an executor returned ends here; a reader that stops at the executor names
        # it.
        load_value(data, where)
        raise


def refuse(found: Unreadable, what: str, file: str, tensor: str | None = None) -> NoReturn:
    """Raise what `found` stands for, said of `what`."""
    kind = UnsafeError if found.code == "unsafe-pickle" else SourceError
    raise kind(found.code, f"{file}: {what}: {found.reason}", tensor=tensor, file=file)


def _sort(
    archive: Archive, leaves: Iterable[tuple[Path, object]]
) -> tuple[tuple[Tensor, ...], tuple[Object, ...], list[Diagnostic]]:
    tensors: list[Tensor] = []
    objects: list[Object] = []
    warnings: list[Diagnostic] = []
    for path, value in leaves:
        name = ".".join(map(str, path))
        if isinstance(value, TensorRef):
            tensors.append(_tensor(name, path, value, archive))
            continue
        if isinstance(value, Unreadable) and value.code == "unsupported":
            refuse(value, f"tensor {name!r}", archive.file, name)
        warnings += object_warnings(name, value, archive.file)
        objects.append(Object(name, path, archive.file, inline=value, is_inline=True))
    return tuple(tensors), tuple(objects), warnings


def _tensor(name: str, path: Path, ref: TensorRef, archive: Archive) -> Tensor:
    check_geometry(name, ref.shape, ref.dtype, archive.file)
    stored = archive.record(f"data/{ref.storage.key}")
    if stored.nbytes != ref.storage.nbytes:
        found = f"its storage has {stored.nbytes} bytes, the pickle says {ref.storage.nbytes}"
        raise SourceError(
            "bad-header",
            f"{archive.file}: tensor {name!r}: {found}",
            tensor=name,
            file=archive.file,
        )
    storage = (archive.file, ref.storage.key, ref.start, view_strides(ref))
    chunk = Chunk((0,) * len(ref.shape), ref.shape, archive.file, stored.offset, stored.nbytes)
    return Tensor(name, path, ref.shape, ref.dtype, (chunk,), storage)


def view_strides(ref: TensorRef) -> tuple[int, ...] | None:
    """None if the tensor is row-major, whatever torch notes as the stride of a dimension of length
    1.
    """
    plain = row_major_strides(ref.shape)
    strides = tuple(
        p if size == 1 else s for s, p, size in zip(ref.strides, plain, ref.shape, strict=True)
    )
    return None if strides == plain or 0 in ref.shape else strides


def object_warnings(name: str, value: object, file: str) -> Iterator[Diagnostic]:
    """What there is to say about an object.

    Raises:
        UnsafeError: `unsafe-pickle` if tensors are below something that would be called.
    """
    called = _caller_of_tensors(value)
    if called is not None:
        message = f"{file}: {name!r}: unpickling the tensors in it would call {called.module}.{called.name}"
        raise UnsafeError("unsafe-pickle", message, tensor=name, file=file)
    unsafe = unsafe_within(value)
    if unsafe is not None:
        yield Diagnostic("unsafe-pickle", f"{name!r}: {unsafe}")
        return
    opaque = opaque_within(value)
    if opaque is not None:
        held = sum(isinstance(inner, TensorRef) for inner in within(value))
        lost = f"; not read: {counted(held, 'tensor')} in it" if held else ""
        yield Diagnostic("opaque", f"{name!r} holds a {opaque}, unknown to ema_ckpt{lost}")


def refuse_discarded(unsafe: Sequence[Unreadable], objects: Sequence[Object], file: str) -> None:
    """A call whose result is in no object was hidden on purpose."""
    listed = {id(inner) for item in objects for inner in within(item.inline)} if unsafe else set()
    for found in unsafe:
        if id(found) not in listed:
            refuse(found, "the pickle throws away what it calls", file)


def _caller_of_tensors(value: object) -> Opaque | None:
    """Something that unpickling would call with a tensor in its arguments or state."""
    seen: set[tuple[int, bool]] = set()
    todo: list[tuple[object, Opaque | None]] = [(value, None)]
    while todo:
        inner, caller = todo.pop()
        if (id(inner), caller is None) in seen:
            continue
        seen.add((id(inner), caller is None))
        if isinstance(inner, TensorRef) and caller is not None:
            return caller
        if isinstance(inner, Opaque) and inner.called:
            caller = inner
        todo += [(part, caller) for part in parts_of(inner)]
    return None


def unsafe_within(value: object) -> str | None:
    """What is to be said of something in a value that unpickling would run, or that runs code when
    called; or None.
    """
    refused = (i for i in within(value) if isinstance(i, Unreadable) and i.code == "unsafe-pickle")
    called = next((found.reason for found in refused), None)
    return called or executor_within(value)


def read_before(item: Object) -> object:
    """The value of an object that was read along with its file.

    Raises:
        UnsafeError: `unsafe-pickle` if unpickling it would run code.
    """
    unsafe = unsafe_within(item.inline)
    if unsafe is not None:
        message = f"{item.file}: object {item.name!r}: {unsafe}"
        raise UnsafeError("unsafe-pickle", message, tensor=item.name, file=item.file)
    return item.inline


def _digests(archive: Archive, tensors: Sequence[Tensor]) -> Mapping[str, int]:
    if record.SIDECAR not in archive.records:
        return {}
    found = record.parse(archive.read(record.SIDECAR), archive.file)
    lost = sorted(found.digests.keys() - {tensor.name for tensor in tensors})
    if lost:
        message = (
            f"{archive.file}: digests are recorded of tensors that are not there: {shown(lost)}"
        )
        raise SourceError("index-mismatch", message, tensor=lost[0], file=archive.file)
    return record.digests_of(found, tensors, archive.file)
