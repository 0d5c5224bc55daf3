"""Tensors as `torch.save` pickles them: references to storages, read without torch.

The constructors are those of `torch/_utils.py` (`_rebuild_tensor_v2`, `_rebuild_tensor_v3`,
`_rebuild_parameter`); a storage is a persistent id `("storage", class, key, location, numel)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as brief  # bounded: a hostile value may nest without end
from typing import Any

from ema_ckpt.core.box import are_int64, are_sizes, row_major_strides
from ema_ckpt.core.collisions import Collisions
from ema_ckpt.core.dtypes import DType, by_name, by_storage_class
from ema_ckpt.core.errors import SourceError, UnsafeError
from ema_ckpt.formats.pickle.keys import check_keys
from ema_ckpt.formats.pickle.machine import loads
from ema_ckpt.formats.pickle.numpy_numbers import NUMBER_GLOBALS
from ema_ckpt.formats.pickle.safe_globals import Global, Maker, Opaque, method_of
from ema_ckpt.formats.pickle.typed_values import Device, Layout, PathText, Size

Ints = tuple[int, ...]

_UNSUPPORTED = """
    _rebuild_wrapper_subclass _rebuild_sparse_tensor _rebuild_sparse_csr_tensor
    _rebuild_nested_tensor _rebuild_qtensor _rebuild_meta_tensor_no_storage
    _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor
    """.split()


@dataclass(frozen=True, slots=True, repr=False)
class StorageRef:
    """A storage: the record `data/<key>` of its archive.

    `dtype` is None for an untyped storage; `numel` counts elements of that dtype, or bytes.
    """

    key: str
    dtype: DType | None
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes the storage must have."""
        return self.numel * (self.dtype.itemsize if self.dtype else 1)

    def __repr__(self) -> str:
        return f"<storage of {self.numel} {self.dtype.name if self.dtype else 'bytes'}>"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided view of a storage; `start` and `strides` are in elements of `dtype`."""

    storage: StorageRef
    dtype: DType
    start: int
    shape: Ints
    strides: Ints

    def strides_in_storage(self) -> Ints | None:
        """Strides, or None if the view is row-major, whatever torch notes for dims of length 1."""
        row_major = row_major_strides(self.shape)
        if self.strides == row_major or 0 in self.shape:
            return None
        strides = list(row_major)
        for dim, size in enumerate(self.shape):
            if size != 1:
                strides[dim] = self.strides[dim]
        return None if tuple(strides) == row_major else tuple(strides)


def _bad(why: str) -> SourceError:
    return SourceError("unreadable", why)


def _ints(value: object) -> Ints:
    if isinstance(value, tuple) and are_int64(value):
        return tuple(value)
    raise _bad(f"a shape or stride is {brief(value)}")


def _view(
    dtype: DType | None,
    storage: object,
    start: object,
    shape: object,
    strides: object,
    bits: object,
) -> TensorRef:
    if isinstance(storage, Opaque):
        message = f"a storage of class {storage.module}.{storage.name} is not one that is read"
        raise SourceError("unsupported", message)
    if not isinstance(storage, StorageRef) or type(start) is not int or not are_sizes((start,)):
        raise _bad("a tensor is built from something that is no storage")
    dtype = dtype or storage.dtype
    if dtype is None:
        raise _bad("an untyped storage is used without a dtype")
    if bits:
        message = (
            f"a tensor is stored with the lazy bits {_named(bits)}; resolve them before saving"
        )
        raise SourceError("unsupported", message)
    ref = TensorRef(storage, dtype, start, _ints(shape), _ints(strides))
    if len(ref.shape) != len(ref.strides) or min((*ref.shape, *ref.strides), default=0) < 0:
        raise _bad("a tensor has impossible strides")
    _check_extent(ref)
    return ref


def _named(bits: object) -> str:
    if isinstance(bits, Mapping) and all(isinstance(name, str) for name in bits):
        return ", ".join(sorted(bits))
    return brief(bits)


def _check_extent(ref: TensorRef) -> None:
    if 0 in ref.shape:  # a view without elements reaches nowhere
        return
    last = ref.start
    for size, stride in zip(ref.shape, ref.strides, strict=True):
        last += (size - 1) * stride
    if (last + 1) * ref.dtype.itemsize > ref.storage.nbytes:
        message = f"a tensor of shape {list(ref.shape)} reaches beyond its storage"
        raise SourceError("out-of-bounds", message)


def _rebuild_v2(*args: object) -> TensorRef:
    storage, start, shape, strides, _grad, _hooks, bits = args if len(args) > 6 else (*args, None)
    return _view(None, storage, start, shape, strides, bits)


def _rebuild_v3(*args: object) -> TensorRef:
    args = args if len(args) > 7 else (*args, None)
    storage, start, shape, strides, _grad, _hooks, dtype, bits = args
    if not isinstance(dtype, Global) or dtype.module != "torch":
        raise _bad("a dtype is missing")
    return _view(by_name(dtype.name), storage, start, shape, strides, bits)


def _rebuild_from_type(function: object, kind: object, args: object, _state: object) -> object:
    # The subclass is only named, never imported: the strided data under it is read.
    make = function.make if isinstance(function, Global) else None
    if (make is _rebuild_v2 or make is _rebuild_v3) and isinstance(args, tuple):
        return make(*args)
    kind = f"{kind.module}.{kind.name}" if isinstance(kind, Global) else "of an unknown class"
    problem = f"it is a tensor subclass ({kind}), which is not read here"
    raise SourceError("unsupported", f"{problem}; save plain tensors, or leave it out")


def _unsupported(name: str) -> Maker:
    def reject(*_args: object) -> object:
        message = f"a tensor is stored by torch._utils.{name}, which ema_ckpt does not read"
        raise SourceError("unsupported", message)

    return reject


# A value can be small here and endless once every reference in it is followed, as `hash`, `str`
# and `==` do: what makes a value of others looks at their types first.


def _items(value: object) -> list[object]:
    """Return what is in a list or its like; what stands for an instance is none, nor is text."""
    if type(value) not in (list, tuple, set, frozenset):
        raise _bad(f"expected a list or tuple, found a {type(value).__name__}")
    return list(value)  # type: ignore[call-overload, no-any-return]


def _dict(items: object = (), *_rest: object) -> dict[object, object]:
    if isinstance(items, dict):
        return dict(items)
    pairs: list[Any] = [_items(pair) for pair in _items(items)]
    check_keys(Collisions(), [key for key, _ in pairs])
    return dict(pairs)


def _default_dict(factory: object = None, *args: object) -> dict[object, object]:
    if isinstance(factory, Global) and factory.is_executor:
        named = f"{factory.module}.{factory.name}, which runs code"
        raise UnsafeError("unsafe-pickle", f"a missing key of a defaultdict would call {named}")
    return _dict(*args)


def _encoded(text: object, encoding: object) -> bytes:
    """Return the bytes that protocols 0 to 2 write as a text of their values."""
    if isinstance(text, str) and encoding in ("latin1", "latin-1"):
        return text.encode("latin-1")
    raise _bad(f"bytes are made of a text as {brief(encoding)}, which no pickler writes")


def _set(items: object = ()) -> set[object]:
    members = _items(items)
    check_keys(Collisions(), members)
    return set(members)


def _joined(separator: str, parts: tuple[object, ...]) -> str:
    if not all(isinstance(part, str | int) for part in parts):
        raise _bad("a path or a device is made of something else than text")
    return separator.join(map(str, parts))


def _path(*parts: object) -> PathText:
    return PathText(_joined("/", parts).replace("//", "/") or ".")  # `Path(".")` has no parts


def _bytes(data: object = b"", encoding: object = "latin-1") -> bytes:
    # A number here would mean that many zero bytes.
    if isinstance(data, str) and encoding == "latin-1":
        return data.encode("latin-1")
    if isinstance(data, bytes | bytearray):
        return bytes(data)
    raise _bad("bytes are made of something else than bytes")


_BUILTINS: dict[str, Maker] = {
    "set": _set,
    "frozenset": lambda items=(): frozenset(_set(items)),
    "complex": complex,
    "bytes": _bytes,
    "bytearray": lambda *args: bytearray(_bytes(*args)),
}
_LAYOUTS = """
    torch.strided torch.sparse_coo torch.sparse_csr torch.sparse_csc torch.sparse_bsr
    torch.sparse_bsc torch.jagged torch._mkldnn
""".split()


def _layout(name: object) -> object:
    """Check the name of a layout, as `torch.serialization._get_layout` does."""
    if name not in _LAYOUTS:
        raise _bad(f"{brief(name)} is no layout")
    return Layout(str(name))


def attribute(*args: object) -> Global | Opaque:
    """Name what lies in a class, as pickles do by `getattr(Class, "name")`; nothing is looked up.

    Protocol 2 names a class in a class so, and early versions of Python 3.11 the member of an enum.
    Every protocol names the method of an object so, which is opaque as the object is.

    Raises:
        UnsafeError: `unsafe-pickle` for the attribute of anything else.
    """
    match args:
        case (Global() as owner, str() as name):
            named = Global(owner.module, f"{owner.name}.{name}", None)
            named.is_executor = True  # it may be a method: a call of it is refused
            return named
        case (Opaque() as instance, str() as name) if method := method_of(instance, name):
            return method
    problem = "unpickling would call builtins.getattr, and not for what lies in a class"
    raise UnsafeError("unsafe-pickle", problem)


PLAIN_GLOBALS: dict[tuple[str, str], Maker] = {
    **{("builtins", name): make for name, make in _BUILTINS.items()},
    **{("__builtin__", name): make for name, make in _BUILTINS.items()},
    ("builtins", "getattr"): attribute,
    ("__builtin__", "getattr"): attribute,
    ("collections", "OrderedDict"): _dict,
    ("collections", "defaultdict"): _default_dict,
    ("_codecs", "encode"): _encoded,
    ("torch", "Size"): lambda sizes=(): tuple(_items(sizes)),
    ("torch", "device"): lambda *args: Device(_joined(":", args)),
    ("torch.serialization", "_get_layout"): _layout,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "PurePosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # Python 3.13 pickles it under this name
    ("pathlib._local", "PurePosixPath"): _path,
}
TENSOR_GLOBALS: dict[tuple[str, str], Maker] = {
    **PLAIN_GLOBALS,
    **NUMBER_GLOBALS,
    ("torch", "Size"): lambda sizes=(): Size(_items(sizes)),
    ("torch._utils", "_rebuild_tensor"): lambda *args: _rebuild_v2(*args, False, None),
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_rest: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_rest: data,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    **{("torch._utils", name): _unsupported(name) for name in _UNSUPPORTED},
}


def storage_of(pid: object) -> StorageRef | Opaque:
    """Return the storage that a persistent id means; an `Opaque` for one that is not read."""
    match pid:
        case ("storage", Global() as storage_class, str() as key, _, numel) if (
            isinstance(pid, tuple) and type(numel) is int and are_sizes((numel,))
        ):
            module, name = storage_class.module, storage_class.name
        case _:
            raise _bad(f"a storage has the persistent id {brief(pid)}")
    if (module, name) == ("torch.storage", "UntypedStorage"):
        return StorageRef(key, None, numel)
    dtype = by_storage_class(name) if module == "torch" else None
    if dtype is None:  # of quantized numbers, say
        return Opaque(module, name, (), called=False)
    return StorageRef(key, dtype, numel)


class Storages:
    """Makes the storages of one pickle. torch takes the first that it meets of each key for all."""

    def __init__(self) -> None:
        self.by_key: dict[str, StorageRef] = {}

    def add(self, pid: object) -> StorageRef | Opaque:
        """Return the storage that a persistent id means, which must be the same each time.

        Raises:
            SourceError: `unreadable`.
        """
        storage = storage_of(pid)
        if isinstance(storage, Opaque):
            return storage
        first = self.by_key.setdefault(storage.key, storage)
        if first != storage and not _are_both_bytes(first, storage):
            a, b = (
                f"{one.numel} of {one.dtype.name if one.dtype else 'bytes'}"
                for one in (first, storage)
            )
            raise _bad(f"the storage {storage.key!r} has {a} in one place and {b} in another")
        return storage


def _are_both_bytes(a: StorageRef, b: StorageRef) -> bool:
    """Whether both are the same bytes: torch.save types them as uint8 for a tensor of these only.

    So it does where fp8 weights and a view of their bytes share a storage.
    """
    kinds = {one.dtype.name if one.dtype else None for one in (a, b)}
    return kinds == {None, "uint8"} and a.numel == b.numel


def load_tensor(data: bytes, where: str) -> TensorRef:
    """Read a `data.pkl` that holds one tensor.

    Raises:
        UnsafeError: `unsafe-pickle` if anything unlisted would be called.
        SourceError: `unsupported` for subclasses that wrap other tensors, `index-mismatch` for a
            plain value, `unreadable` for anything else.
    """
    try:
        value = load_value(data, where, strict=True)
    except UnsafeError as refused:
        raise _torchao_refusal(data, where) or refused from None
    if isinstance(value, TensorRef):
        return value
    if isinstance(value, Opaque):
        code, kind = "unsupported", repr(value)
    else:  # of a class that is known, and so of another entry
        code, kind = "index-mismatch", f"a {type(value).__name__}"
    raise SourceError(code, f"{where}: expected a tensor, found {kind}", file=where)


def _torchao_refusal(data: bytes, where: str) -> SourceError | None:
    """Return why a weight of torchao is not read; None if the pickle calls anything else.

    Among the settings of such a weight are enums, which pickle makes by a call.
    """
    packages: set[str] = set()

    def note(named: Global) -> None:
        if named.make is None and named.module not in ("torch", "torch.storage"):
            packages.add(named.module.partition(".")[0])

    try:
        load_value(data, where, prepare=note)
    except UnsafeError:
        return None
    except SourceError as error:
        return error if packages == {"torchao"} and error.code == "unsupported" else None
    return None


def load_value(
    data: bytes,
    where: str,
    *,
    strict: bool = False,
    prepare: Callable[[Global], None] | None = None,
) -> object:
    """Read any `data.pkl`, with `TensorRef` for tensors and `Opaque` for unknown classes.

    `prepare` is called with each global when it is first named, and may replace its `make`.

    Raises:
        UnsafeError: `unsafe-pickle` for known executors, and with `strict` for any unlisted call.
    """
    return loads(
        data, TENSOR_GLOBALS, where=where, persistent=Storages().add, strict=strict, prepare=prepare
    )
