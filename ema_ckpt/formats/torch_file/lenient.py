"""List a torch file although parts of it are unsafe or in a form that is not read.

Such a part becomes an `Unreadable` that says why. Whoever needs its value raises its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeGuard

from ema_ckpt.core.box import are_sizes
from ema_ckpt.core.catalog import Chunk, Diagnostic, Object, Tensor, check_geometry
from ema_ckpt.core.dtypes import DTYPES_BY_NAME, DType, is_dtype_name, unread
from ema_ckpt.core.errors import SourceError, UnsafeError
from ema_ckpt.core.text import counted
from ema_ckpt.formats.pickle.safe_globals import (
    Global,
    Maker,
    Opaque,
    executor_within,
    is_executor,
    method_of,
    opaque_within,
    parts_of,
    within,
)
from ema_ckpt.formats.pickle.tensors import StorageRef, TensorRef

Ints = tuple[int, ...]
Path = tuple[str | int, ...]
ReadSubclass = Callable[[Global, tuple[object, ...]], object]
_REBUILDERS = """
    _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3
    _rebuild_parameter _rebuild_parameter_with_state
    """.split()
_MAX_ARGS = 64
_MAX_PARTS = 4096  # of the arguments: they may refer to the same ones over and over
_MAX_SIZE = 2**40


class Unreadable(Opaque):
    """Something that must not, or cannot, be read: error code and reason."""

    __slots__ = ("code", "reason")

    def __init__(self, named: Global, code: str, reason: str, args: tuple[object, ...]) -> None:
        super().__init__(named.module, named.name, args, called=True)
        self.code = code
        self.reason = reason

    def error(self, subject: str, file: str, tensor: str | None = None) -> SourceError:
        """Return the error to raise where `subject` is needed."""
        kind = UnsafeError if self.code == "unsafe-pickle" else SourceError
        return kind(self.code, f"{file}: {subject}: {self.reason}", tensor=tensor, file=file)


def strided_subclass(named: Global, args: tuple[object, ...]) -> object:
    """Read `_rebuild_from_type_v2(function, class, args, state)` of a strided tensor subclass."""
    match args:
        case [Global(module="torch._utils", make=make) as function, _, tuple() as inner, _] if (
            make is not None and function.name in _REBUILDERS
        ):
            return make(*inner)
        case [_, Global(module=module, name=name), *_]:
            kind = f"{module}.{name}"
        case _:
            kind = "of an unknown class"
    remedy = "save plain tensors, or save through torch.distributed.checkpoint"
    reason = f"it is a tensor subclass ({kind}); {remedy}"
    return Unreadable(named, "unsupported", reason, args)


class LenientGlobals:
    """Replace globals that stop a strict reader by functions that return an `Unreadable`.

    `unsafe` lists all that would have been called, those included whose result the pickle throws
    away. `subclass` reads the arguments of `torch._tensor._rebuild_from_type_v2`.
    """

    def __init__(self, subclass: ReadSubclass = strided_subclass) -> None:
        self.unsafe: list[Unreadable] = []
        self._subclass = subclass

    def prepare(self, named: Global) -> None:
        """Replace `named.make` where needed."""
        module, name = named.module, named.name
        if module == "torch._utils" and name.startswith("_rebuild_"):
            if name in _REBUILDERS and named.make:
                named.make = _rebuild_or_unreadable(named, named.make)
            else:
                reason = f"ema_ckpt does not read its form ({module}.{name})"
                named.make = lambda *args: Unreadable(named, "unsupported", reason, args)
        elif (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            named.make = lambda *args: self._subclass(named, args)
        elif module in ("builtins", "__builtin__") and name == "getattr":
            named.make = lambda *args: self._attribute(named, args)
        elif named.make is None and is_executor(module, name):
            named.make = lambda *args: self._unsafe(named, args)

    def _unsafe(self, named: Global, args: tuple[object, ...]) -> Unreadable:
        reason = f"unpickling would call {named.module}.{named.name}"
        self.unsafe.append(Unreadable(named, "unsafe-pickle", reason, args))
        return self.unsafe[-1]

    def _attribute(self, named: Global, args: tuple[object, ...]) -> object:
        # Protocol 2 writes a class inside a class as `getattr(Outer, "Inner")`: only a name.
        match args:
            case (Global() as outer, str() as attribute):
                inner = Global(outer.module, f"{outer.name}.{attribute}", None)
            case (Opaque() as instance, str() as name) if method := method_of(instance, name):
                return method
            case _:
                return self._unsafe(named, args)
        if is_executor(inner.module, inner.name):
            inner.make = lambda *call_args: self._unsafe(inner, call_args)
        return inner


def _rebuild_or_unreadable(named: Global, make: Maker) -> Maker:
    # A tensor in a form that is not read (lazily conjugated, say) is rejected once it has a name.
    def rebuild(*args: object) -> object:
        try:
            return make(*args)
        except SourceError as error:
            if error.code != "unsupported":
                raise
            return Unreadable(named, error.code, str(error), args)

    return rebuild


def is_unread(value: object) -> TypeGuard[Unreadable]:
    """Whether a value of a torch file is a tensor in a form that is not read."""
    return isinstance(value, Unreadable) and value.code == "unsupported"


def refused_tensor(path: Path, value: Unreadable, file: str) -> Tensor:
    """List a tensor in a form that is not read, so that only a verb that needs it refuses."""
    shape, dtype = _recorded_form(value)
    refusal = Diagnostic(value.code, f"{value.reason}; leave it out with --exclude")
    return refused(path, shape, dtype, file, refusal)


def refused(path: Path, shape: Ints, dtype: DType, file: str, refusal: Diagnostic) -> Tensor:
    """List a tensor that cannot be read from `file`, and why."""
    name = ".".join(map(str, path))
    check_geometry(name, shape, dtype, file)
    chunk = Chunk((0,) * len(shape), shape, file, 0, 0)
    return Tensor(name, path, shape, dtype, (chunk,), refusal=refusal)


def big_endian_refused(tensor: Tensor) -> Tensor:
    """Refuse the numbers of several bytes that a big-endian machine wrote."""
    if tensor.dtype.itemsize < 2 or tensor.refusal is not None:
        return tensor
    problem = "its numbers are big-endian, and their bytes are not swapped here"
    remedy = "load it with torch and save it again, or leave it out with --exclude"
    return replace(tensor, refusal=Diagnostic("unsupported", f"{problem}; {remedy}"))


def wrapper_subclass(value: Unreadable) -> tuple[str, Mapping[str, object]] | None:
    """Class and attributes of a tensor that consists of other tensors, as torchao's do."""
    match value.args:
        case (Global(name="_rebuild_wrapper_subclass"), Global() as kind, tuple(), dict() as state):
            named = {key: one for key, one in state.items() if isinstance(key, str)}
            return f"{kind.module}.{kind.name}", named
    return None


def _recorded_form(value: Unreadable) -> tuple[Ints, DType]:
    """Shape and dtype that a tensor's constructor is given: the first size and the first dtype.

    Where it is given no dtype, that of the last tensor (a sparse tensor's values follow its
    indices).
    """
    shapes: list[Ints] = []
    named: list[DType] = []
    data: list[DType] = []
    for part in islice(_in_order(value.args), _MAX_PARTS):
        dtype = _dtype_of(part)
        if dtype is not None:
            data.append(dtype)
        elif _is_shape(part):
            shapes.append(part)
        elif isinstance(part, Global) and is_dtype_name(part.name):
            named.append(DTYPES_BY_NAME.get(part.name) or unread(part.name))
    shape = shapes[0] if shapes else ()
    dtypes = [*named, *data[-1:], unread("unknown")]
    return shape, dtypes[0]


def _dtype_of(part: object) -> DType | None:
    if isinstance(part, TensorRef | StorageRef):
        return part.dtype
    if isinstance(part, Opaque) and part.name.endswith("Storage"):  # of quantized numbers
        return unread(part.name.removesuffix("Storage").lower())
    return None


def _is_shape(value: object) -> TypeGuard[Ints]:
    if not isinstance(value, tuple) or not 0 < len(value) <= _MAX_ARGS:
        return False
    return are_sizes(value, _MAX_SIZE)


def _in_order(value: object, depth: int = 4) -> Iterator[object]:
    yield value
    if isinstance(value, tuple) and depth:
        for part in value[:_MAX_ARGS]:
            yield from _in_order(part, depth - 1)


def object_warnings(name: str, value: object, file: str) -> Iterator[Diagnostic]:
    """Warn about what is unsafe or unknown in an object of `file`.

    Raises:
        UnsafeError: `unsafe-pickle` if tensors are below something that runs code.
    """
    unsafe, called = unsafe_within(value), called_with_tensors(value)
    if unsafe is not None and called is not None:
        raise UnsafeError("unsafe-pickle", f"{file}: {name!r}: {called}", tensor=name, file=file)
    unsafe, opaque = unsafe or called, opaque_within(value)
    if unsafe is not None:
        yield Diagnostic("unsafe-pickle", f"{name!r}: {unsafe}")
    elif opaque is not None:
        count = sum(isinstance(inner, TensorRef) for inner in within(value))
        lost = f"; not read: {counted(count, 'tensor')} in it" if count else ""
        yield Diagnostic("opaque", f"{name!r} holds a {opaque}, unknown to ema_ckpt{lost}")


def called_with_tensors(value: object) -> str | None:
    """Describe what unpickling would call with a tensor in its arguments or state, if anything."""
    seen: set[tuple[int, bool]] = set()
    todo: list[tuple[object, Opaque | None]] = [(value, None)]
    while todo:
        inner, caller = todo.pop()
        if (id(inner), caller is None) in seen:
            continue
        seen.add((id(inner), caller is None))
        if isinstance(inner, TensorRef) and caller is not None:
            return f"unpickling the tensors in it would call {caller.module}.{caller.name}"
        if isinstance(inner, Opaque) and inner.called:
            caller = inner
        todo += [(part, caller) for part in parts_of(inner)]
    return None


def unsafe_within(value: object) -> str | None:
    """Describe what unpickling `value` would run, or a global in it that runs code when called."""
    for inner in within(value):
        if isinstance(inner, Unreadable) and inner.code == "unsafe-pickle":
            return inner.reason
    return executor_within(value)


def check_discarded(unsafe: Sequence[Unreadable], values: Sequence[object], file: str) -> None:
    """Raise UnsafeError for an unsafe call whose result is in no value: hidden on purpose."""
    if not unsafe:
        return
    listed: set[int] = set()
    for value in values:
        listed.update(map(id, within(value)))
    for call in unsafe:
        if id(call) not in listed:
            raise call.error("the pickle throws away what it calls", file)


def load_inline(item: Object) -> object:
    """Return the value of an object that was read along with its file.

    Raises:
        UnsafeError: `unsafe-pickle` if unpickling it would run code.
    """
    unsafe = unsafe_within(item.inline) or called_with_tensors(item.inline)
    if unsafe is not None:
        message = f"{item.file}: object {item.name!r}: {unsafe}"
        raise UnsafeError("unsafe-pickle", message, tensor=item.name, file=item.file)
    return item.inline
