"""What stands in for the globals that a pickle names: none of them is ever imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from ema_ckpt.core.dtypes import DTYPE_NAMES

Maker = Callable[..., object]

# Modules, with all below them, that run programs, load code or reach files and the network: none is
# ever innocent.
_EXECUTOR_MODULES = frozenset(
    "os posix nt subprocess _posixsubprocess _winapi winreg msvcrt sys sysconfig site runpy importlib imp _imp pkgutil "
    "zipimport _frozen_importlib _frozen_importlib_external pkg_resources setuptools distutils _distutils_hack pip "
    "ensurepip venv pty fcntl mmap socket _socket ssl _ssl select socketserver shutil ctypes _ctypes cffi "
    "_cffi_backend code codeop pickle _pickle cPickle _compat_pickle marshal shelve dbm sqlite3 _sqlite3 dill "
    "cloudpickle joblib webbrowser antigravity multiprocessing _multiprocessing asyncio _asyncio http httplib urllib "
    "urllib2 urllib3 requests httpx aiohttp xmlrpc wsgiref ftplib smtplib poplib imaplib nntplib telnetlib pdb bdb "
    "timeit trace profile cProfile doctest pydoc lib2to3 idlelib platform commands popen2 signal _signal threading "
    "_thread concurrent _xxsubinterpreters _interpreters _testcapi tempfile fileinput linecache logging.config "
    "numpy.testing numpy.f2py numpy.distutils numpy.ctypeslib torch.hub torch.utils.cpp_extension "
    "torch.utils.model_zoo torch.utils.collect_env torch.utils.bottleneck torch._inductor torch._dynamo".split()
)
_EXECUTOR_NAMES = frozenset(
    [
        *(
            (module, name)
            for module in ("types", "new")
            for name in ("FunctionType", "CodeType", "function", "code")
        ),
        *(
            (module, name)
            for module in ("operator", "_operator")
            for name in ("attrgetter", "methodcaller", "call")
        ),
        *(
            (module, name)
            for module in ("functools", "_functools")
            for name in ("partial", "reduce", "partialmethod")
        ),
        *((module, "FileIO") for module in ("io", "_io", "_pyio")),
        ("torch", "load"),
        ("torch.jit", "load"),
        ("torch.serialization", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("numpy", "load"),
    ]
)
# Functions that are found in many modules under their own name: `io.open`, `gzip.open`,
# `pandas.eval`.
_EXECUTOR_FUNCTIONS = frozenset(
    "open open_code fdopen system popen Popen startfile eval exec execfile runstring run_path run_module "
    "check_call check_output import_module resolve_name".split()
)
# Enumerations and records, of which making one does nothing, and numpy's generators, which are
# usual in objects.
_HARMLESS_NAMES = frozenset(
    [
        ("signal", "Signals"),
        ("http", "HTTPStatus"),
        ("http", "HTTPMethod"),
        ("os", "terminal_size"),
        ("platform", "uname_result"),
        ("numpy.random._pickle", "__bit_generator_ctor"),
        ("numpy.random._pickle", "__generator_ctor"),
        ("numpy.random._pickle", "__randomstate_ctor"),
        ("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence"),
    ]
)
_SAFE_BUILTINS = frozenset(
    "set frozenset list dict tuple int long float complex bool str unicode bytes bytearray memoryview slice range "
    "xrange iter reversed enumerate zip object NoneType Ellipsis NotImplemented type StopIteration "
    "KeyboardInterrupt".split()
)
_SAFE_BUILTIN_ENDS = ("Error", "Exception", "Warning")


def is_executor(module: str, name: str) -> bool:
    """Whether a global is known to run code when called."""
    *outer, last = name.split(".")
    if module in ("builtins", "__builtin__"):
        return bool(outer) or (name not in _SAFE_BUILTINS and not name.endswith(_SAFE_BUILTIN_ENDS))
    if (module, name) in _HARMLESS_NAMES:
        return False
    # A dotted name leads through what a module imports: `random`, `_os.system`.
    through = any(part.lstrip("_") in _EXECUTOR_MODULES or part.startswith("__") for part in outer)
    named = (
        (module, name) in _EXECUTOR_NAMES or last in _EXECUTOR_FUNCTIONS or last.startswith("__")
    )
    return through or named or any(parent in _EXECUTOR_MODULES for parent in _parents(module))


def _parents(module: str) -> Iterator[str]:
    """`a`, `a.b` and `a.b.c` of `a.b.c`."""
    return accumulate(module.split("."), "{}.{}".format)


class Replacement:
    """Base of the classes that stand in for listed globals and take a state (`BUILD`)."""

    __slots__ = ()

    def setstate(self, state: object) -> None:
        """Take the pickled state. Raises ValueError if it is not of the form expected."""
        raise ValueError(f"{type(self).__name__} takes no state, given a {type(state).__name__}")


class Opaque(Replacement):
    """Something of an unlisted class. Its name, arguments and state are kept; nothing was made or
    called.

    `called` tells that unpickling it for real would call a function rather than make an instance.
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


class Global:
    """A global as the pickle names it. `make` stands in for it, or is None if it is not listed."""

    __slots__ = ("make", "module", "name", "shortcut")

    def __init__(self, module: str, name: str, make: Maker | None) -> None:
        self.module = module
        self.name = name
        self.make = make
        self.shortcut: Callable[[Any], bool] | None = None

    def __repr__(self) -> str:
        return f"<global {self.module}.{self.name}>"


def parts_of(value: object) -> Iterable[object]:
    """What lies directly in a value that was read from a pickle, placeholders included."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return value
    return [value.args, value.state, value.entries] if isinstance(value, Opaque) else ()


def within(value: object) -> Iterator[object]:
    """A value and all that is in it, each once, however often it is referred to."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        inner = todo.pop()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        yield inner
        todo += parts_of(inner)


def executor_within(value: object) -> str | None:
    """What is to be said of something in a value that runs code when called, though the pickle only
    names it.
    """
    named = (inner for inner in within(value) if isinstance(inner, Global))
    found = next((known for known in named if is_executor(known.module, known.name)), None)
    return (
        None
        if found is None
        else f"it holds {found.module}.{found.name}, which runs code when called"
    )


def opaque_within(value: object) -> str | None:
    """The name of something unknown in a value, be it an instance, a class or a function; or
    None.
    """
    unknown = (
        i
        for i in within(value)
        if isinstance(i, Opaque) or (isinstance(i, Global) and not _is_dtype(i))
    )
    return next((f"{found.module}.{found.name}" for found in unknown), None)


def _is_dtype(found: Global) -> bool:
    return found.module == "torch" and found.name in DTYPE_NAMES
