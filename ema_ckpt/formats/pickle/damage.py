"""What interpreting a damaged pickle raises, turned into errors that name it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from ema_ckpt.core.errors import EmaCkptError, SourceError, UnsafeError


class ShortcutMissedError(Exception):
    """A memo entry that a shortcut skipped is needed: interpret again without shortcuts."""


@contextmanager
def own_errors(data: bytes, where: str) -> Iterator[None]:
    """Turn whatever interpreting a damaged pickle raises into errors that name it."""
    try:
        yield
        return
    except EmaCkptError as error:
        raise type(error)(error.code, f"{where}: {error}", file=where) from None
    except RecursionError:
        problem = "the pickle is nested too deeply"
    except ShortcutMissedError:
        problem = "a memo entry is written twice"
    except (IndexError, struct.error) as error:
        cut = f"cut short at {len(data)} bytes ({error})"
        problem = f"a damaged pickle, or one {cut}; use another copy"
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        problem = f"damaged pickle ({error})"
    raise SourceError("unreadable", f"{where}: {problem}", file=where)


def refused_call(module: str, name: str) -> UnsafeError:
    """Return the error of a call that is not made."""
    problem = f"unpickling would call {module}.{name}"
    return UnsafeError("unsafe-pickle", f"{problem}, which is not on the list of harmless globals")
