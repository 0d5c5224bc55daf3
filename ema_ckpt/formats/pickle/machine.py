"""A pickle reader that cannot run anything: an opcode interpreter over a closed set of
constructors.

Python's own unpickler imports and calls what the data names; a memo opcode of nine bytes makes its
C form take gigabytes. Here no global is ever imported. A caller lists the globals it knows with the
function that stands in for each; every other global is a name. Calling an unlisted one is refused,
making an instance of one gives an `Opaque` placeholder. Opcodes:
https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from ema_ckpt.core.errors import EmaCkptError, SourceError, UnsafeError
from ema_ckpt.formats.pickle.opcodes import MARK, TABLE, Mark
from ema_ckpt.formats.pickle.safe_globals import Global, Maker, Opaque, is_executor

Allowed = Mapping[tuple[str, str], Maker]


UNBUILT = Mark()


class Machine:
    """The state of one interpretation: data, position, stack, memo.

    `memo` is a list: real pickles number their entries in order. Entries far ahead go to `sparse`,
    so that a huge index costs nothing. `UNBUILT` in `memo` is an entry that a shortcut did not
    build.
    """

    def __init__(
        self,
        data: bytes,
        allowed: Allowed,
        persistent: Callable[[object], object] | None,
        strict: bool,
        prepare: Callable[[Global], None] | None = None,
    ) -> None:
        self.data = data
        self.pos = 0
        self.stack: list[object] = []
        self.memo: list[object] = []
        self.sparse: dict[int, object] = {}
        self.allowed = allowed
        self.persistent = persistent
        self.strict = strict
        self.prepare = prepare
        self.globals: dict[tuple[str, str], Global] = {}

    def run(self) -> object:
        """Interpret up to STOP and return the value."""
        data, table = self.data, TABLE
        while True:
            op = data[self.pos]
            self.pos += 1
            if op == 0x2E:  # STOP
                return self.stack.pop()
            table[op](self)

    def take(self, nbytes: int) -> bytes:
        """The next `nbytes` bytes of the stream."""
        end = self.pos + nbytes
        if nbytes < 0 or end > len(self.data):
            raise ValueError("the pickle ends inside an opcode")
        part = self.data[self.pos : end]
        self.pos = end
        return part

    def line(self, encoding: str = "utf-8") -> str:
        """The next line of a text opcode."""
        end = self.data.index(b"\n", self.pos)
        part = self.data[self.pos : end]
        self.pos = end + 1
        return part.decode(encoding)

    def popmark(self) -> list[object]:
        """Everything above the topmost mark, which is removed too."""
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not MARK:
            at -= 1
            if at < 0:
                raise ValueError("a mark is missing")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def put(self, index: int) -> None:
        """Memoize the top of the stack under `index`."""
        top = self.stack[-1]
        if index == len(self.memo):
            self.memo.append(top)
        elif index < len(self.memo):
            if self.prepare is not None:  # shortcuts remember what entries meant
                raise _ShortcutMissedError
            self.memo[index] = top
        else:
            self.sparse[index] = top

    def get(self, index: int) -> None:
        """Push a memoized value; try the shortcut of a global."""
        value = self.memo[index] if index < len(self.memo) else self.sparse[index]
        if value is UNBUILT:
            raise _ShortcutMissedError
        self.stack.append(value)
        if value.__class__ is Global and value.shortcut is not None:
            value.shortcut(self)

    def find(self, module: str, name: str) -> Global:
        """The global of that name, one object for each name."""
        found = self.globals.get((module, name))
        if found is None:
            found = self.globals[module, name] = Global(
                module, name, self.allowed.get((module, name))
            )
            if self.prepare is not None:
                self.prepare(found)
        return found

    def call(self, function: object, args: object, calls: bool) -> object:
        """What `REDUCE` (calls) or `NEWOBJ` of a global gives here."""
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise ValueError("something that is no global is called")
        if function.make is not None:
            return function.make(*args)
        if is_executor(function.module, function.name) or (calls and self.strict):
            raise _refused(function)
        return Opaque(function.module, function.name, args, calls)


class _ShortcutMissedError(Exception):
    """A memo entry that a shortcut left out is asked for: interpret again without shortcuts."""


def _refused(found: Global) -> UnsafeError:
    where = f"{found.module}.{found.name}"
    return UnsafeError(
        "unsafe-pickle",
        f"unpickling would call {where}, which is not on the list of harmless globals",
    )


def loads(
    data: bytes,
    allowed: Allowed,
    *,
    where: str,
    persistent: Callable[[object], object] | None = None,
    strict: bool = True,
    prepare: Callable[[Global], None] | None = None,
) -> object:
    """Read a pickle without running anything in it.

    Args:
        data: the pickle.
        allowed: (module, name) of every global that may be called, and what to call in its place.
        where: file and record, for messages.
        persistent: gives the value for a persistent id (torch's storages).
        strict: whether a call of any unlisted global is refused. If not, only known executors are,
            and the rest become `Opaque`.
        prepare: is shown each `Global` when it is first named, and may give it a `shortcut` that
            reads a whole instance at once.

    Raises:
        UnsafeError: `unsafe-pickle` naming the global.
        SourceError: `unreadable` if it is no whole pickle, `unsupported` for forms nobody writes.
    """
    try:
        try:
            return Machine(data, allowed, persistent, strict, prepare).run()
        except _ShortcutMissedError:
            return Machine(data, allowed, persistent, strict).run()
    except EmaCkptError as error:
        raise type(error)(error.code, f"{where}: {error}", file=where) from None
    except RecursionError:
        raise SourceError(
            "unreadable", f"{where}: the pickle is nested too deeply", file=where
        ) from None
    except (IndexError, struct.error) as error:
        message = f"{where}: a damaged pickle, or one cut short at {len(data)} bytes ({error}); use another copy"
        raise SourceError("unreadable", message, file=where) from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise SourceError("unreadable", f"{where}: damaged pickle ({error})", file=where) from None
