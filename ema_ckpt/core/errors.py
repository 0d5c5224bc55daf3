"""The error tree. Every failure the package foresees is an `EmaCkptError` with a stable `code`.

EmaCkptError
├── UsageError        the call asks for something that is not there or not allowed
├── SourceError       the checkpoint read is missing, damaged or unsupported
│   └── UnsafeError   reading it would run code or leave its directory
├── AccessError       a machine or a server failed while it was read: no verdict on the checkpoint
│   └── RefusedError  it does not allow to read
├── TargetError       the place to write to is taken, busy or too small
├── CollectiveError   another rank failed, or did not join a collective call
└── StateError        a training-side call came at the wrong moment or with the wrong model
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from ema_ckpt.core.display import displayed, masked


class EmaCkptError(Exception):
    """Base of all errors of this package.

    Attributes:
        code: a stable word such as `missing-file`, the same in `--json` output.
        tensor: the full stored name of the tensor concerned, if it is about one.
        file: the file concerned, relative to the checkpoint, if it is about one; a URL is without
            its credentials.

    The message is one printable line of bounded length, without credentials of URLs.
    """

    def __init__(
        self, code: str, message: str, *, tensor: str | None = None, file: str | None = None
    ) -> None:
        super().__init__(displayed(message))
        self.code = code
        self.tensor = tensor
        self.file: str | None = None if file is None else masked(file)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between ranks; the default would call __init__ with the message alone.
        rebuild = partial(type(self), tensor=self.tensor, file=self.file)
        return rebuild, (self.code, str(self))


class UsageError(EmaCkptError):
    """The call asks for something that is not there or not allowed."""


class SourceError(EmaCkptError):
    """The checkpoint that is read is missing, damaged or of an unsupported kind."""


class UnsafeError(SourceError):
    """Reading on would run code from the checkpoint or leave its directory."""


class AccessError(EmaCkptError):
    """A machine or a server failed, or refused, while the checkpoint was read.

    This says nothing about the checkpoint, so it is no `SourceError`.
    """


class RefusedError(AccessError):
    """The system or the server does not allow to read a file."""


class TargetError(EmaCkptError):
    """The place to write to is taken, busy, unwritable or too small."""


class CollectiveError(EmaCkptError):
    """Another rank failed, or did not join a collective call in time."""


class StateError(EmaCkptError):
    """A training-side call came at the wrong moment, or with the wrong model."""


for _kind in [kind for kind in vars().values() if isinstance(kind, type)]:
    if issubclass(_kind, EmaCkptError):
        _kind.__module__ = "ema_ckpt"  # as tracebacks name it, and users import it

ErrorT = TypeVar("ErrorT", bound=EmaCkptError)


def about(
    error: ErrorT,
    *,
    tensor: str | None = None,
    file: str | None = None,
    kind: str = "tensor",
    label: str = "",
    remedy: str = "",
) -> ErrorT:
    """Return the same error that also names `tensor` and `file`, as far as it names none yet.

    `kind` says what `tensor` is (`object`, say); `label` is put before the message, `remedy` after
    it.
    """
    message = str(error)
    if tensor is not None and repr(tensor) not in message:
        message = f"{kind} {tensor!r}: {message}"
    if file is not None and masked(file) not in message:
        message = f"{file}: {message}"
    if label:
        message = f"{label}: {message}"
    if remedy:
        message = f"{message}; {remedy}"
    return type(error)(error.code, message, tensor=error.tensor or tensor, file=error.file or file)
