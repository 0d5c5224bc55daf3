"""Several processes as one command, under `torchrun`: they meet over gloo, and one's failure
reaches all.

torch is imported only where the environment says that there are several processes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from ema_ckpt.core.errors import CollectiveError, EmaCkptError

_JOIN_SECONDS = 300
_current: Meeting | None = None


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several that a launcher such as `torchrun` started."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in environment for name in needed) and int(environment["WORLD_SIZE"]) > 1


def rank_here(environment: Mapping[str, str] = os.environ) -> int:
    """This process' number; 0 where there is only one."""
    return int(environment["RANK"]) if is_launched(environment) else 0


def current() -> Meeting | None:
    """The processes that carry out the present command together, or None if this one does it
    alone.
    """
    return _current


class Meeting:
    """The processes of a command. Each exchange is a place where all of them come by, with a value
    or an error.
    """

    def __init__(self, rank: int, size: int, group: Any) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self._failed = False

    def exchange(self, value: object) -> list[Any]:
        """Everybody's value, in order.

        Raises:
            CollectiveError: `rank-failed` if another process failed, with its cause.
        """
        return self._meet((None, value))

    def tell(self, error: BaseException) -> None:
        """Let the others know that this process failed, unless that is how it learned of it."""
        if self._failed:
            return
        text = (
            str(error)
            if isinstance(error, EmaCkptError | OSError)
            else f"{type(error).__name__}: {error}"
        )
        with contextlib.suppress(CollectiveError):
            self._meet((text, None))

    def _meet(self, mine: tuple[str | None, object]) -> list[Any]:
        found: list[Any] = [None] * self.size
        errors: list[Exception] = []
        # In a thread of its own: signals must reach this one while others are waited for.
        waiter = threading.Thread(target=self._gather, args=(found, mine, errors), daemon=True)
        waiter.start()
        while waiter.is_alive():
            waiter.join(0.1)
        if errors:
            self._failed = True
            first = str(errors[0]).splitlines()[0]
            raise CollectiveError("rank-failed", f"another process ended without a word ({first})")
        causes = [
            f"rank {rank}: {text}" for rank, (text, _) in enumerate(found) if text is not None
        ]
        if causes:
            self._failed = True
            raise CollectiveError("rank-failed", "; ".join(dict.fromkeys(causes)))
        return [value for _, value in found]

    def _gather(self, found: list[Any], mine: object, errors: list[Exception]) -> None:
        import torch.distributed as dist

        try:
            dist.all_gather_object(found, mine, group=self._group)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            errors.append(error)

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in order."""
        return self.exchange(data)


@contextlib.contextmanager
def process_group() -> Iterator[Meeting]:
    """Meet the other processes; leave only when all are done. A failure of one is raised in all.

    Raises:
        CollectiveError: `rank-failed` if another process failed or did not come.
    """
    global _current
    meeting = _meet_all()
    _current = meeting
    try:
        yield meeting
        meeting.exchange(None)
    except Exception as error:
        meeting.tell(error)
        raise
    finally:
        _current = None
        _part()


def _meet_all() -> Meeting:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_JOIN_SECONDS))
        # Who is done early waits for the others: days, not the half hour that gloo grants.
        group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    except (RuntimeError, ValueError) as error:
        message = (
            f"the processes did not all come within {_JOIN_SECONDS} s: {str(error).splitlines()[0]}"
        )
        raise CollectiveError("rank-failed", message) from None
    return Meeting(dist.get_rank(), dist.get_world_size(), group)


def _part() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
