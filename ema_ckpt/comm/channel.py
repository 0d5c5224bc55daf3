"""Channels between all ranks: gloo groups of this package alone, which carry small values.

They need no NCCL and do not get in the way of the training's collectives.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import starmap
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ema_ckpt.core.errors import CollectiveError, EmaCkptError

# A rank that dies is noticed at once by its closed connection; this bounds only one that hangs
# while writing.
_GROUP_TIMEOUT = timedelta(hours=2)
# Ranks connect right after they have met: whoever is not there by then has died in between.
_CONNECT_TIMEOUT = timedelta(minutes=2)
_RETURN_SECONDS = 15.0  # in which ranks that have met come to connect anew
# A rank asks whether the others have come after this part of the time that it has waited.
_PAUSE, _SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 0.001, 0.2
_LEFT = 1 << 32  # added to the number of ranks that have come to connect, by one that will not
_CONNECT, _LEAVE = "connect", "leave"  # what ranks do that have come, all or not

_channels: dict[str, tuple[object, Channel]] = {}  # by purpose, with the default group at that time
_begun = ""  # the place where this rank last began to connect, for the others to find it
_connected: WeakSet[Channel] = WeakSet()
_TOLD = "_ema_ckpt_told"  # of an error: whether the other ranks know of it


class _Closed:
    """Instead of the gloo group of a channel that is closed."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the channel is closed")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Channel:
    """Connections between all ranks, apart from every process group of the training.

    It is a gloo group made by hand: it works beside NCCL-only groups and outlives
    `destroy_process_group`, which an asynchronous save may still need when a script ends. Calls are
    collective and in one order on all ranks.
    Every method raises CollectiveError `rank-failed` if another rank died or has closed it, and
    closes it then: the ranks that wait for this one hear of it so.
    """

    gloo: Any  # a ProcessGroupGloo, whose methods torch's stubs leave out; None: only one rank
    rank: int = 0
    size: int = 1

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order; they must survive JSON."""
        return [json.loads(data) for data in self.all_gather(json.dumps(value).encode())]

    def exchange_if_different(self, value: Any) -> list[Any]:
        """Exchange values, or return an empty list if they are equal: large ones then stay here."""
        digests = self.exchange(hashlib.sha256(json.dumps(value).encode()).hexdigest())
        return self.exchange(value) if len(set(digests)) > 1 else []

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in rank order."""
        if self.gloo is None:
            return [data]
        sizes = self._exchange_sizes(len(data))
        parts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        padded = _padded(data, max(sizes))
        self._wait(lambda: self.gloo.allgather([parts], [padded]))
        return [_bytes_of(part, size) for part, size in zip(parts, sizes, strict=True)]

    def gather(self, data: bytes) -> list[bytes]:
        """Return on rank 0 the bytes of every rank, in rank order; elsewhere an empty list."""
        if self.gloo is None:
            return [data]
        sizes = self._exchange_sizes(len(data))
        padded = _padded(data, max(sizes))
        if self.rank:
            self._wait(lambda: self.gloo.gather([], [padded]))
            return []
        parts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        self._wait(lambda: self.gloo.gather([parts], [padded]))
        return [_bytes_of(part, size) for part, size in zip(parts, sizes, strict=True)]

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Return on each rank its part of what rank 0 passed; other ranks pass nothing."""
        if self.gloo is None:
            return parts[0]
        sizes = self.broadcast_json([len(part) for part in parts])
        received = torch.empty(max(sizes), dtype=torch.uint8)
        inputs = [[_padded(part, max(sizes)) for part in parts]] if self.rank == 0 else []
        self._wait(lambda: self.gloo.scatter([received], inputs))
        return _bytes_of(received, sizes[self.rank])

    def broadcast_json(self, value: Any) -> Any:
        """Return the value that rank 0 passed."""
        if self.gloo is None:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(data)])
        self._wait(lambda: self.gloo.broadcast([size]))
        content = _padded(data, int(size))
        self._wait(lambda: self.gloo.broadcast([content]))
        return json.loads(_bytes_of(content, int(size)))

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a contiguous host tensor to the rank that calls `receive`."""
        if self.gloo is not None:
            self._wait(lambda: self.gloo.send([tensor.view(-1).view(torch.uint8)], rank, 0))

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Fill a contiguous host tensor with what `rank` sends."""
        if self.gloo is not None:
            self._wait(lambda: self.gloo.recv([tensor.view(-1).view(torch.uint8)], rank, 0))

    def greet(self) -> None:
        """Wait for all ranks."""
        self._exchange_sizes(0)

    def _exchange_sizes(self, nbytes: int) -> list[int]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._wait(lambda: self.gloo.allgather([sizes], [torch.tensor([nbytes])]))
        return [int(size) for size in sizes]

    def close(self) -> None:
        """Disconnect from the other ranks, which hear of it where they wait for this one."""
        if self.gloo is not None:
            object.__setattr__(self, "gloo", _Closed())

    def _wait(self, begin: Callable[[], dist.Work]) -> None:
        try:
            begin().wait()  # what else refers to the work keeps a closed channel connected
        except RuntimeError as error:
            self.close()
            raise lost_rank() from error


def lost_rank() -> CollectiveError:
    """Return the error of a collective in which another rank was lost.

    What gloo says names a line of its source, and no rank.
    """
    return CollectiveError("rank-failed", "another rank ended, hung or left in a collective call")


def mark_told(error: BaseException, *, is_told: bool) -> None:
    """Note whether the other ranks know of an error of this one, and leave the call too."""
    object.__setattr__(error, _TOLD, is_told)


def is_told(error: BaseException) -> bool:
    """Whether the other ranks know of an error: what this package raises it raises on all ranks."""
    return bool(getattr(error, _TOLD, isinstance(error, EmaCkptError)))


@contextlib.contextmanager
def leaving_together(
    purpose: str, when_free: Callable[[Callable[[], None]], object] = lambda close: close()
) -> Iterator[None]:
    """Close the channel for `purpose` if this rank leaves the block alone, as by an interrupt.

    The others would wait for it, and its next call would meet them in the middle of this one.
    `when_free` closes it when nobody else on this rank uses it.
    """
    try:
        yield
    except BaseException as error:
        if not is_told(error) and purpose in _channels:
            when_free(_channels[purpose][1].close)
        mark_told(error, is_told=False)  # not by a call around this one, in whose midst it was made
        raise


def open_channel(purpose: str, meeting: int, timeout: float = 0) -> Channel:
    """Return the channel of all ranks for `purpose`; different channels may be used in threads.

    Opened at the first call, and at the next one after a rank has closed it. A call is collective:
    `meet` first, which returns the number of the meeting.

    Args:
        purpose: which of this package's channels.
        meeting: the number of the meeting.
        timeout: seconds to wait for the others to come here from the meeting; 15 at least, 120 at
            most.

    Raises:
        CollectiveError: `rank-failed`: another rank died, or left, before all were connected.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Channel(None)
    world = dist.group.WORLD
    group, channel = _channels.get(purpose, (None, None))
    place, store = _place(purpose, meeting)
    _forget_begun()
    seconds = min(max(timeout, _RETURN_SECONDS), _CONNECT_TIMEOUT.total_seconds())
    if channel is not None and group is world:
        with contextlib.suppress(CollectiveError):  # it is closed, here or elsewhere
            channel.greet()
            return channel
        seconds = _RETURN_SECONDS
    _await_all(PrefixStore(f"ema_ckpt/{place}", store), seconds)
    channel = Channel(_Closed(), dist.get_rank(), dist.get_world_size())
    _channels[purpose] = (world, channel)  # whoever is interrupted from here on closes it
    _connect(channel, place, store)
    channel.greet()  # whoever is interrupted from here on keeps nobody in the midst of connecting
    return channel


def _place(purpose: str, meeting: int) -> tuple[str, Store]:
    """Return where in the ranks' store those find each other who have met; the store, too."""
    # Apart from what an earlier meeting has left.
    return f"{purpose}/{meeting}", dist.distributed_c10d._get_default_store()


def _forget_begun() -> None:
    global _begun
    _begun = ""


def _await_all(store: Store, seconds: float) -> None:
    """Wait until all ranks have come to connect: one of them may have died or left instead.

    Raises:
        CollectiveError: `rank-failed`.
    """
    began = time.monotonic()
    try:
        present = store.add("present", 1)
        while present < dist.get_world_size():
            waited = time.monotonic() - began
            if waited > seconds and _settle(store, _LEAVE):
                store.add("present", _LEFT)  # whoever comes later does not wait for this rank
            time.sleep(pause_after(waited, _LONGEST_PAUSE))
            present = store.add("present", 0)
        if not _settle(store, _CONNECT):
            raise lost_rank()
    except RuntimeError as error:  # rank 0, which keeps the store, has died
        raise lost_rank() from error


def pause_after(waited: float, longest: float) -> float:
    """Return the seconds until a rank that has waited so many asks the ranks' store again."""
    return min(max(waited * _PAUSE, _SHORTEST_PAUSE), longest)


def _settle(store: Store, way: str) -> bool:
    """Whether the ranks go this way: that of the first who says one."""
    return bool(store.compare_set("way", "", way) == way.encode())


def leave_before_connecting(purpose: str, meeting: int) -> None:
    """Tell the ranks that come to open the channel after a meeting that this one does not.

    Where all have come, and some may connect already, it connects for their sake, and leaves when
    all are connected: gloo does not tell those who wait for a third rank that this one has closed.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    place, store = _place(purpose, meeting)
    with contextlib.suppress(RuntimeError, CollectiveError):  # the store may be what has failed
        there = PrefixStore(f"ema_ckpt/{place}", store)
        if _settle(there, _LEAVE):
            there.add("present", _LEFT)
            return
        channel = Channel(_Closed(), dist.get_rank(), dist.get_world_size())
        if _begun != place:
            _connect(channel, place, store)
        _await_connected(there)
        channel.close()


def _await_connected(store: Store) -> None:
    """Wait until no rank connects any more, or for some seconds: one may have died."""
    began = time.monotonic()
    while store.add("connected", 0) < dist.get_world_size():
        waited = time.monotonic() - began
        if waited > _RETURN_SECONDS:
            return
        time.sleep(pause_after(waited, _LONGEST_PAUSE))


def connect_channel(
    purpose: str, store: Store, rank: int, size: int, timeout: timedelta = _GROUP_TIMEOUT
) -> Channel:
    """Connect all ranks, which find each other in `store`; `timeout` bounds each call.

    Raises:
        CollectiveError: `rank-failed`: another rank died before all were connected.
    """
    channel = Channel(_Closed(), rank, size)
    _connect(channel, purpose, store, timeout)
    return channel


def _connect(
    channel: Channel, place: str, store: Store, timeout: timedelta = _GROUP_TIMEOUT
) -> None:
    global _begun
    prefixed = PrefixStore(f"ema_ckpt/{place}", store)
    options = prefixed, channel.rank, channel.size, _CONNECT_TIMEOUT
    keep = partial(object.__setattr__, channel, "gloo")
    connecting = map(keep, starmap(dist.ProcessGroupGloo, [options]))
    _connected.add(channel)
    try:
        _begun = place  # an interrupt comes before this or after the next call
        try:
            # One call in C: an interrupt that comes in it finds the group in the channel. A name
            # for the group would keep it alive, by the traceback of the error.
            deque(connecting, maxlen=0)
        finally:
            prefixed.add("connected", 1)
    except RuntimeError as error:
        message = f"not all ranks could be connected: {plain_cause(error)}"
        raise CollectiveError("rank-failed", message) from error
    channel.gloo._set_default_timeout(timeout)


def _disconnect() -> None:
    """End the threads of gloo, which abort the process if one lets go of a tensor later.

    Whoever else has a channel is not asked: an error holds it through its traceback, and often
    itself, until the interpreter is half gone.
    """
    _channels.clear()
    for channel in list(_connected):
        object.__setattr__(channel, "gloo", None)


# Saves in the background are over by then: threads are joined before this is called.
atexit.register(_disconnect)


def plain_cause(error: Exception) -> str:
    """Say in a line what torch's store or gloo met, without lines of their sources."""
    text = next(iter(str(error).splitlines()), "")
    if "EADDRINUSE" in text:
        return "the port is in use; choose another one"
    if "timeout" in text or "timed out" in text:
        return "no answer in time"
    if any(word in text for word in ("peer", "SocketImpl", "pipe", "likely closed")):
        return "the connection to another rank was lost"
    return re.sub(r"^\[[^\]]*\] ", "", text).partition(". This is ")[0]


def _padded(data: bytes, nbytes: int) -> torch.Tensor:
    padded = torch.zeros(nbytes, dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return padded


def _bytes_of(tensor: torch.Tensor, nbytes: int) -> bytes:
    return tensor[:nbytes].numpy().tobytes()
