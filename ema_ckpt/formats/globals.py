"""What stands in for the globals that a pickle names: none of them is ever imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["Global", "Maker", "Opaque", "Standin", "is_executor", "parts_of", "within"]

Maker = Callable[..., object]

# Packages whose functions run programs, load code or reach the network: naming one is never innocent.
_EXECUTOR_PACKAGES = frozenset(
    "os posix nt subprocess sys runpy importlib pty socket shutil ctypes code codeop pickle _pickle marshal "
    "webbrowser multiprocessing asyncio http urllib requests pdb bdb timeit trace profile cProfile pip pydoc "
    "platform commands popen2 signal threading _thread concurrent tempfile dill cloudpickle joblib".split()
)
_EXECUTOR_NAMES = frozenset(
    [
        ("types", "FunctionType"),
        ("types", "CodeType"),
        ("operator", "attrgetter"),
        ("operator", "methodcaller"),
        ("functools", "partial"),
        ("functools", "reduce"),
        ("torch", "load"),
        ("torch.serialization", "load"),
        ("torch.hub", "load"),
        ("numpy", "load"),
    ]
)
_SAFE_BUILTINS = frozenset(
    "set frozenset list dict tuple int float complex bool str bytes bytearray slice range object NoneType "
    "Ellipsis Exception ValueError TypeError KeyError RuntimeError type".split()
)


def is_executor(module: str, name: str) -> bool:
    """Whether a global is known to run code when called."""
    if module in ("builtins", "__builtin__"):
        return name not in _SAFE_BUILTINS
    package = module.partition(".")[0]
    return package in _EXECUTOR_PACKAGES or (module, name) in _EXECUTOR_NAMES or name.startswith("__")


class Standin:
    """Base of the classes that stand in for listed globals and take a state (`BUILD`)."""

    __slots__ = ()

    def setstate(self, state: object) -> None:
        """Take the pickled state. Raises ValueError if it is not of the form expected."""
        raise ValueError(f"{type(self).__name__} takes no state, given a {type(state).__name__}")


class Opaque(Standin):
    """Something of an unlisted class. Its name, arguments and state are kept; nothing was made or called.

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
