"""Globals that a pickle names, and what replaces them: none is ever imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from ema_ckpt.core.dtypes import DTYPE_NAMES

Maker = Callable[..., object]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _full_names(text: str) -> frozenset[tuple[str, ...]]:
    """Split `module.name` words into (module, name)."""
    return frozenset(tuple(full.rsplit(".", 1)) for full in text.split())


# Modules, with all below them, that run programs, load code or reach files and the network.
_EXECUTOR_MODULES = _words("""
    os posix nt subprocess _posixsubprocess _winapi winreg msvcrt sys sysconfig site runpy
    importlib imp _imp pkgutil zipimport _frozen_importlib _frozen_importlib_external
    pkg_resources setuptools distutils _distutils_hack pip ensurepip venv pty fcntl mmap socket
    _socket ssl _ssl select socketserver shutil ctypes _ctypes cffi _cffi_backend code codeop
    pickle _pickle cPickle _compat_pickle marshal shelve dbm sqlite3 _sqlite3 dill cloudpickle
    joblib webbrowser antigravity multiprocessing _multiprocessing asyncio _asyncio http httplib
    urllib urllib2 urllib3 requests httpx aiohttp xmlrpc wsgiref ftplib smtplib poplib imaplib
    nntplib telnetlib pdb bdb timeit trace profile cProfile doctest pydoc lib2to3 idlelib
    platform commands popen2 signal _signal threading _thread concurrent _xxsubinterpreters
    _interpreters _testcapi tempfile fileinput linecache logging.config numpy.testing numpy.f2py
    numpy.distutils numpy.ctypeslib torch.hub torch.utils.cpp_extension torch.utils.model_zoo
    torch.utils.collect_env torch.utils.bottleneck torch._inductor torch._dynamo
""")
_EXECUTOR_NAMES = _full_names("""
    types.FunctionType types.CodeType types.function types.code new.FunctionType new.CodeType
    new.function new.code operator.attrgetter operator.methodcaller operator.call
    _operator.attrgetter _operator.methodcaller _operator.call functools.partial
    functools.reduce functools.partialmethod _functools.partial _functools.reduce
    _functools.partialmethod io.FileIO _io.FileIO _pyio.FileIO torch.load torch.jit.load
    torch.serialization.load torch.storage._load_from_bytes numpy.load
""")
_DEPTH = 4  # at least the parts of the longest of these names
_HEADS = {
    module.partition(".")[0]
    for module in (*_EXECUTOR_MODULES, *(names[0] for names in _EXECUTOR_NAMES))
}
# Functions that many modules have under their own name: `io.open`, `gzip.open`, `pandas.eval`.
_EXECUTOR_FUNCTIONS = _words("""
    open open_code fdopen system popen Popen startfile eval exec execfile runstring run_path
    run_module check_call check_output import_module resolve_name
""")
# Enumerations and records, which do nothing when made, and numpy's generators, usual in objects.
_HARMLESS_NAMES = _full_names("""
    signal.Signals http.HTTPStatus http.HTTPMethod os.terminal_size platform.uname_result
    torch._dynamo.decorators._DimRange
    numpy.random._pickle.__bit_generator_ctor numpy.random._pickle.__generator_ctor
    numpy.random._pickle.__randomstate_ctor
    numpy.random.bit_generator.__pyx_unpickle_SeedSequence
""")
# Classes whose instances are pickled as a call of the class.
_PLAIN_CLASSES = _full_names("""
    collections.deque collections.Counter collections.ChainMap types.SimpleNamespace
    torch._C.Generator
    numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct
""")
_SAFE_BUILTINS = _words("""
    set frozenset list dict tuple int long float complex bool str unicode bytes bytearray
    memoryview slice range xrange iter reversed enumerate zip object NoneType Ellipsis
    NotImplemented type StopIteration KeyboardInterrupt
""")
_SAFE_BUILTINS |= _words("""
    abs all any callable chr divmod hash isinstance issubclass len max min ord repr round sorted sum
""")
_SAFE_BUILTIN_ENDS = ("Error", "Exception", "Warning")


def _leads_to_executor(path: list[str], first: int) -> bool:
    """Whether the parts of a name from `first` on are those of an executor.

    Only a few are looked at, for a name may have a million.
    """
    if path[first] not in _HEADS:
        return False
    parents = accumulate(path[first : min(first + _DEPTH, len(path) - 1)], "{}.{}".format)
    if not _EXECUTOR_MODULES.isdisjoint(parents):  # a, a.b and a.b.c of a.b.c.d
        return True
    is_short = len(path) - first <= _DEPTH
    return is_short and (".".join(path[first:-1]), path[-1]) in _EXECUTOR_NAMES


def is_executor(module: str, name: str) -> bool:
    """Whether a global is known to run code when called."""
    if module in ("builtins", "__builtin__"):
        is_safe = name in _SAFE_BUILTINS or name.endswith(_SAFE_BUILTIN_ENDS)
        return "." in name or not is_safe
    if (module, name) in _HARMLESS_NAMES:
        return False
    # What a module imports is reached through it: `torch` and `serialization.load`.
    path, modules = [*module.split("."), *name.split(".")], module.count(".") + 1
    if any(_leads_to_executor(path, first) for first in (0, *range(modules, len(path)))):
        return True
    *outer, last = name.split(".")
    if last in _EXECUTOR_FUNCTIONS or last.startswith("__"):
        return True
    # Some import modules under a private name: `random`, `_os.system`.
    return any(part.lstrip("_") in _EXECUTOR_MODULES or part.startswith("__") for part in outer)


class Replacement:
    """Base of the classes that replace listed globals and accept a state (opcode BUILD)."""

    __slots__ = ()

    def setstate(self, state: object) -> None:
        """Accept the pickled state. Raises ValueError if it is not of the form expected."""
        raise ValueError(f"{type(self).__name__} takes no state, given a {type(state).__name__}")


class Opaque(Replacement):
    """An instance of an unlisted class: its name, arguments and state; nothing was made or called.

    `called`: unpickling it for real would call a function rather than make an instance.
    """

    __slots__ = ("args", "called", "entries", "module", "name", "state")

    def __init__(self, module: str, name: str, args: tuple[object, ...], called: bool) -> None:
        self.module = module
        self.name = name
        self.args = args
        self.called = called
        self.state: object = None
        self.entries: list[object] = []

    def setstate(self, state: object) -> None:
        """Keep the state unread."""
        self.state = state

    def __repr__(self) -> str:
        return f"<opaque {self.module}.{self.name}>"


def method_of(instance: Opaque, name: str) -> Opaque | None:
    """Return what stands for a method of an instance; None if its name is that of an executor."""
    full = f"{instance.name}.{name}"
    if is_executor(instance.module, full):
        return None
    return Opaque(instance.module, full, (instance,), called=False)


class Global:
    """A global as the pickle names it. `make` replaces it; None if the global is not listed."""

    __slots__ = ("is_executor", "is_plain_class", "make", "module", "name", "shortcut")

    def __init__(self, module: str, name: str, make: Maker | None) -> None:
        self.module = module
        self.name = name
        self.make = make
        self.is_executor = is_executor(module, name)
        self.is_plain_class = (module, name) in _PLAIN_CLASSES
        self.shortcut: Callable[[Any], None] | None = None

    def __repr__(self) -> str:
        return f"<global {self.module}.{self.name}>"


def parts_of(value: object) -> Iterable[object]:
    """List the values directly inside a value that was read from a pickle."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return value
    return [value.args, value.state, value.entries] if isinstance(value, Opaque) else ()


def within(value: object) -> Iterator[object]:
    """Iterate over a value and all that is in it, each once, however often it is referred to."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        inner = todo.pop()
        if id(inner) not in seen:
            seen.add(id(inner))
            yield inner
            todo += parts_of(inner)


def executor_within(value: object) -> str | None:
    """Describe a global in `value` that runs code when called, though the pickle only names it."""
    for inner in within(value):
        if isinstance(inner, Global) and is_executor(inner.module, inner.name):
            return f"it holds {inner.module}.{inner.name}, which runs code when called"
    return None


def opaque_within(value: object) -> str | None:
    """Name an unknown instance, class or function in `value`; None if there is none."""
    for inner in within(value):
        if isinstance(inner, Global) and inner.module == "torch" and inner.name in DTYPE_NAMES:
            continue
        if isinstance(inner, Opaque | Global):
            return f"{inner.module}.{inner.name}"
    return None
