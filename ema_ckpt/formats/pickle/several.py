"""What stands for several objects on the interpreter's stack, and opcodes that must not meet it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING

from ema_ckpt.formats.pickle.damage import ShortcutMissedError

if TYPE_CHECKING:
    from ema_ckpt.formats.pickle.machine import Machine

MARK = object()  # on the stack: where a tuple, list or dict begins

# How many objects of the stack an opcode takes or looks at.
_TAKEN = dict.fromkeys(b"\x94qrp02Q\x85", 1) | dict.fromkeys(b"\x86R\x81\x93ba", 2)
_TAKEN |= dict.fromkeys(b"\x87\x92s", 3)
_TAKE_ALL = b"tldio\x90\x91"  # all from a mark on, for something else than a list or dict


class Several:
    """On the stack: what a shortcut has read, in the place of several objects in a row."""

    __slots__ = ()

    def __len__(self) -> int:
        """Return how many these are."""
        raise NotImplementedError


def guarded(op: int, interpret: Callable[[Machine], object]) -> Callable[[Machine], object]:
    """Return what interprets an opcode where `Several` may be on the stack.

    They may be pushed upon, and be put into a list or dict with all that follows a mark. An opcode
    that would take them for one object raises ShortcutMissedError.
    """
    count = _TAKEN.get(op, 0)
    if not count and op not in _TAKE_ALL:
        return interpret

    def guard_top(machine: Machine) -> None:
        if isinstance(machine.stack[-1], Several):
            raise ShortcutMissedError
        interpret(machine)

    def guard(machine: Machine) -> None:
        stack = machine.stack
        for value in stack[-count:] if count else takewhile(_is_no_mark, reversed(stack)):
            if isinstance(value, Several):
                raise ShortcutMissedError
        interpret(machine)

    return guard_top if count == 1 else guard


def _is_no_mark(value: object) -> bool:
    return value is not MARK
