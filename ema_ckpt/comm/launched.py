"""Processes that carry out one command together, as a launcher such as `torchrun` started them.

torch is imported here only when they meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ema_ckpt.core.errors import CollectiveError, EmaCkptError, UsageError
from ema_ckpt.core.limits import MAX_RANKS
from ema_ckpt.core.text import format_ranks, shown
from ema_ckpt.core.torch_import import import_torch, require_torch

if TYPE_CHECKING:
    from ema_ckpt.comm.channel import Channel

T = TypeVar("T")
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MEET_SECONDS = 300.0
_STEP_TIMEOUT = timedelta(days=7)  # a rank that has written its share waits for the others
_FIRST_NOTICE_SECONDS, _NEXT_NOTICE_SECONDS = 5.0, 60.0
_current: CommandGroup | None = None


def launched_ranks() -> tuple[int, int]:
    """Return this process' rank and how many a launcher started; (0, 1) without one.

    Variables that no launcher sets so are as good as none; `command_group` refuses them.
    """
    try:
        return _read_variables()
    except UsageError:
        return 0, 1


def _read_variables() -> tuple[int, int]:
    """Return rank and number of ranks. Raises UsageError `usage` for what no launcher sets."""
    absent = [name for name in _VARIABLES if name not in os.environ]
    if absent:
        reason = f"{', '.join(absent)} not set; start it with torchrun"
        raise UsageError("usage", f"--distributed: {reason}")
    size = _variable("WORLD_SIZE", 1, MAX_RANKS)
    if size > 1:  # one process alone connects to nothing
        _variable("MASTER_PORT", 1, 65535)
    return _variable("RANK", 0, size - 1), size


def _variable(name: str, least: int, most: int) -> int:
    """Return a number that the launcher has set. Raises UsageError `usage`."""
    text = os.environ[name]
    with contextlib.suppress(ValueError):
        if least <= int(text) <= most:
            return int(text)
    expected = f"expected {least} to {most}; start it with torchrun"
    raise UsageError("usage", f"--distributed: {name} is {shown([text])}: {expected}")


def current_group() -> CommandGroup | None:
    """Return the processes that carry out the present command, or None for a single one."""
    return _current


@contextlib.contextmanager
def command_group(notify: Callable[[str], None]) -> Iterator[None]:
    """Meet the other processes of a command; leave when all are done. An error of one reaches all.

    Args:
        notify: called with a line for people when this process waits for others.

    Raises:
        UsageError: `usage`: no launcher started this process; `missing-extra` without torch.
        CollectiveError: `rank-failed`: another process failed, or did not come.
    """
    global _current
    require_torch("--distributed")
    rank, size = _read_variables()
    if size == 1:
        yield
        return
    _current = group = CommandGroup(rank, size, notify)
    try:
        group.connect()
        yield
        group.end()
    except Exception as error:
        group.report_failure(error)
        raise
    finally:
        _current = group.channel = None


class CommandGroup:
    """The processes of a command: each exchange is a step that all of them come to.

    Every method raises CollectiveError `rank-failed` if another rank failed, with its cause.
    """

    def __init__(self, rank: int, size: int, notify: Callable[[str], None]) -> None:
        self.rank = rank
        self.size = size
        self.channel: Channel | None = None
        self._notify = notify
        self._store: Any = None
        self._step = 0
        self._has_failed = False
        self._is_over = False

    def end(self) -> None:
        """Wait until all ranks are done; after that none hears of another. Once is enough."""
        if not self._is_over:
            self._is_over = True
            self.exchange("all is done")

    def exchange(self, step: str, value: object = None) -> list[Any]:
        """Return the values of all ranks at a step, in rank order; they must survive JSON."""
        parts = [json.loads(data) for data in self.gather(json.dumps([step, value]).encode())]
        if any(other != step for other, _ in parts):
            self._has_failed = True  # all find it out
            reason = "the processes do different things; give all of them the same arguments"
            raise CollectiveError("rank-failed", reason)
        return [value for _, value in parts]

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in rank order."""
        return self._all_gather(b"=" + data)

    def report_failure(self, error: Exception) -> None:
        """Tell the other ranks that this one failed, unless it failed because of them."""
        if self._has_failed or self._is_over:
            return
        text = str(error)
        if not isinstance(error, EmaCkptError | OSError):
            text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(CollectiveError):
            self._all_gather(b"!" + text.encode("utf-8", "surrogatepass"))

    def connect(self) -> None:
        """Wait until all ranks have come, and connect them."""
        deadline = time.monotonic() + _MEET_SECONDS
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

        def come() -> None:
            from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

            store: Store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=self.rank == 0 and not has_agent,
                timeout=timedelta(seconds=_MEET_SECONDS),
                wait_for_workers=False,
                multi_tenant=True,
            )
            # torchrun's store outlives a command: it knows the addresses of processes that it has
            # started anew since, and of the commands before this one.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = PrefixStore(f"ema_ckpt/attempt_{attempt}", store)
            number = store.add(f"commands/{self.rank}", 1)
            self._store = PrefixStore(f"command_{number}", store)
            self._store.set(f"ema_ckpt/0/{self.rank}", "")
            while self._missing() and time.monotonic() < deadline:
                time.sleep(0.05)

        def connect() -> Channel:
            from ema_ckpt.comm.channel import connect_channel

            return connect_channel("command", self._store, self.rank, self.size, _STEP_TIMEOUT)

        # Else torch prints pages of its sources when a rank is lost.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        import_torch("--distributed")
        self._has_failed = True  # nobody can be told yet
        late = f"the processes did not all come within {_MEET_SECONDS:g} s"
        try:
            self._wait(come)
        except (RuntimeError, ValueError) as error:
            raise CollectiveError("rank-failed", _no_meeting(error)) from error
        missing = self._missing()
        if missing:
            raise CollectiveError("rank-failed", f"{late}: {format_ranks(missing)} did not")
        self.channel = self._wait(connect)
        self._has_failed = False

    def _all_gather(self, data: bytes) -> list[bytes]:
        """Exchange bytes that begin with `=`, or with `!` where they are an error."""
        channel = self.channel
        if channel is None:
            return [data]
        self._step += 1

        def gather() -> list[bytes]:
            self._store.set(f"ema_ckpt/{self._step}/{self.rank}", "")
            return channel.all_gather(data)

        try:
            parts = self._wait(gather)
        except (CollectiveError, RuntimeError) as error:
            self._has_failed = True
            text = "another process ended without a word"
            raise CollectiveError("rank-failed", text) from error
        causes = []
        for rank, part in enumerate(parts):
            if part.startswith(b"!"):
                causes.append(f"rank {rank}: {part[1:].decode('utf-8', 'surrogatepass')}")
        if causes:
            self._has_failed = True
            raise CollectiveError("rank-failed", "; ".join(causes))
        return [part[1:] for part in parts]

    def _wait(self, step: Callable[[], T]) -> T:
        """Run a blocking step in a thread, so that signals reach this one; name who is missing."""
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(step())
            except Exception as error:  # noqa: BLE001 - raised below, where it is waited for
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        notice = time.monotonic() + _FIRST_NOTICE_SECONDS
        while thread.is_alive():
            thread.join(0.1)
            if time.monotonic() > notice:
                notice = time.monotonic() + _NEXT_NOTICE_SECONDS
                missing = self._missing()
                first = min(rank for rank in range(self.size) if rank not in missing)
                if missing and self.rank == first:
                    self._notify(f"waiting for {format_ranks(missing)}")
        if errors:
            raise errors[0]
        return results[0]

    def _missing(self) -> list[int]:
        """List the ranks that have not come to the present step."""
        missing = []
        try:
            for rank in range(self.size):
                key = f"ema_ckpt/{self._step}/{rank}"
                if rank != self.rank and not self._store.check([key]):
                    missing.append(rank)
        except (RuntimeError, AttributeError):  # rank 0, which keeps the list, is not there
            return [0]
        return missing


def _no_meeting(error: Exception) -> str:
    from ema_ckpt.comm.channel import plain_cause

    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return f"the processes cannot meet at {place} (MASTER_ADDR, MASTER_PORT): {plain_cause(error)}"
