"""Tensors as `torch.save` pickles them: references to storages, read without torch.

The constructors are those of `torch/_utils.py` (`_rebuild_tensor_v2`, `_rebuild_tensor_v3`,
`_rebuild_parameter`); a storage is a persistent id `("storage", class, key, location, numel)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as brief  # bounded: a hostile value may nest without end

from ema_ckpt.core.dtypes import DType, by_name, by_storage_class
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.pickle.machine import loads
from ema_ckpt.formats.pickle.safe_globals import Global, Maker, Opaque

_UNSUPPORTED = (
    "_rebuild_wrapper_subclass",
    "_rebuild_sparse_tensor",
    "_rebuild_nested_tensor",
    "_rebuild_qtensor",
    "_rebuild_meta_tensor_no_storage",
    "_rebuild_device_tensor_from_numpy",
    "_rebuild_device_tensor_from_cpu_tensor",
    "_rebuild_sparse_csr_tensor",
)


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage: the record `data/<key>` of its archive. `dtype` is None for an untyped one;
    `numel` counts elements of that dtype, or bytes."""

    key: str
    dtype: DType | None
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes the storage must have."""
        return self.numel * (self.dtype.itemsize if self.dtype else 1)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided view of a storage; `start` and `strides` are in elements of `dtype`."""

    storage: StorageRef
    dtype: DType
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _bad(why: str) -> SourceError:
    return SourceError("unreadable", why)


def _ints(value: object) -> tuple[int, ...]:
    if isinstance(value, tuple) and all(type(part) is int for part in value):
        return value
    raise _bad(f"a shape or stride is {brief(value)}")


def _view(
    storage: object,
    start: object,
    shape: object,
    strides: object,
    dtype: DType | None,
    flags: object,
) -> TensorRef:
    if not isinstance(storage, StorageRef) or type(start) is not int or start < 0:
        raise _bad("a tensor is built from something that is no storage")
    kind = dtype or storage.dtype
    if kind is None:
        raise _bad("an untyped storage is used without a dtype")
    if flags:
        names = ", ".join(sorted(map(str, flags))) if isinstance(flags, Mapping) else repr(flags)
        raise SourceError(
            "unsupported",
            f"a tensor is stored with the lazy bits {names}; resolve them before saving",
        )
    ref = TensorRef(storage, kind, start, _ints(shape), _ints(strides))
    if len(ref.shape) != len(ref.strides) or min((*ref.shape, *ref.strides), default=0) < 0:
        raise _bad("a tensor has impossible strides")
    _check_extent(ref)
    return ref


def _check_extent(ref: TensorRef) -> None:
    """Refuse views that reach beyond their storage."""
    if 0 in ref.shape:
        return
    last = ref.start + sum(
        (size - 1) * stride for size, stride in zip(ref.shape, ref.strides, strict=True)
    )
    if (last + 1) * ref.dtype.itemsize > ref.storage.nbytes:
        raise SourceError(
            "out-of-bounds", f"a tensor of shape {list(ref.shape)} reaches beyond its storage"
        )


def _rebuild_v2(
    storage: object,
    start: object,
    shape: object,
    strides: object,
    _grad: object,
    _hooks: object,
    flags: object = None,
) -> TensorRef:
    return _view(storage, start, shape, strides, None, flags)


def _rebuild_v3(
    storage: object,
    start: object,
    shape: object,
    strides: object,
    _grad: object,
    _hooks: object,
    dtype: object,
    flags: object = None,
) -> TensorRef:
    if not isinstance(dtype, Global) or dtype.module != "torch":
        raise _bad("a dtype is missing")
    return _view(storage, start, shape, strides, by_name(dtype.name), flags)


def _rebuild_parameter(data: object, *_rest: object) -> object:
    return data


def _rebuild_from_type(function: object, _kind: object, args: object, _state: object) -> object:
    # The subclass is only named, never imported: the strided data under it is what is wanted.
    if (
        isinstance(function, Global)
        and function.make in (_rebuild_v2, _rebuild_v3)
        and isinstance(args, tuple)
    ):
        return function.make(*args)
    raise SourceError("unsupported", f"a tensor subclass is built by {function!r}")


def _unsupported(name: str) -> Maker:
    def refuse(*_args: object) -> object:
        raise SourceError(
            "unsupported",
            f"a tensor is stored by torch._utils.{name}, which ema_ckpt does not read",
        )

    return refuse


def _as_dict(*args: object) -> dict[object, object]:
    return dict(args[0]) if args else {}  # type: ignore[call-overload]


def _default_dict(_factory: object = None, *args: object) -> dict[object, object]:
    return _as_dict(*args)


def _path(*parts: object) -> str:
    return "/".join(map(str, parts)).replace("//", "/")


def _encode(text: str, _encoding: str) -> bytes:
    return text.encode("latin-1")


def _bytes(data: object = b"", encoding: object = "latin-1") -> bytes:
    # A number here would mean that many zero bytes.
    if isinstance(data, str) and encoding == "latin-1":
        return data.encode("latin-1")
    if isinstance(data, bytes | bytearray):
        return bytes(data)
    raise _bad("bytes are made of something else than bytes")


def _bytearray(data: object = b"", encoding: object = "latin-1") -> bytearray:
    return bytearray(_bytes(data, encoding))


PLAIN_GLOBALS: dict[tuple[str, str], Maker] = {
    ("collections", "OrderedDict"): _as_dict,
    ("collections", "defaultdict"): _default_dict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytearray,
    ("__builtin__", "set"): set,
    ("__builtin__", "frozenset"): frozenset,
    ("__builtin__", "complex"): complex,
    ("__builtin__", "bytes"): _bytes,
    ("__builtin__", "bytearray"): _bytearray,
    ("_codecs", "encode"): _encode,
    ("torch", "Size"): lambda *args: tuple(args[0]) if args else (),
    ("torch", "device"): lambda *args: ":".join(map(str, args)),
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "PurePosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # Python 3.13 pickles it under this name
    ("pathlib._local", "PurePosixPath"): _path,
}
TENSOR_GLOBALS: dict[tuple[str, str], Maker] = {
    **PLAIN_GLOBALS,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    **{("torch._utils", name): _unsupported(name) for name in _UNSUPPORTED},
}


def _storage(pid: object) -> StorageRef:
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
        raise _bad(f"a storage has the persistent id {brief(pid)}")
    _, kind, key, _location, numel = pid
    if (
        not isinstance(kind, Global)
        or not isinstance(key, str)
        or type(numel) is not int
        or numel < 0
    ):
        raise _bad(f"a storage has the persistent id {brief(pid)}")
    if (kind.module, kind.name) == ("torch.storage", "UntypedStorage"):
        return StorageRef(key, None, numel)
    dtype = by_storage_class(kind.name) if kind.module == "torch" else None
    if dtype is None:
        raise SourceError(
            "unsupported",
            f"a storage of class {kind.module}.{kind.name} is not one that ema_ckpt reads",
        )
    return StorageRef(key, dtype, numel)


def load_tensor(data: bytes, where: str) -> TensorRef:
    """The one tensor of a `data.pkl`.

    Raises:
        UnsafeError: `unsafe-pickle` if anything unlisted would be called.
        SourceError: `unsupported` for subclasses that wrap other tensors, `unreadable` for anything
            else.
    """
    value = loads(data, TENSOR_GLOBALS, where=where, persistent=_storage)
    if isinstance(value, TensorRef):
        return value
    what = repr(value) if isinstance(value, Opaque) else f"a {type(value).__name__}"
    raise SourceError("unsupported", f"{where}: expected a tensor, found {what}", file=where)


def load_value(
    data: bytes,
    where: str,
    *,
    strict: bool = False,
    prepare: Callable[[Global], None] | None = None,
) -> object:
    """Any `data.pkl`: plain values and containers, `TensorRef` for tensors, `Opaque` for unknown
    classes.

    `prepare` is shown each global when it is first named, and may put another stand-in for it.

    Raises:
        UnsafeError: `unsafe-pickle` for known executors, and with `strict` for any unlisted call.
    """
    return loads(
        data, TENSOR_GLOBALS, where=where, persistent=_storage, strict=strict, prepare=prepare
    )
