"""Slabs of host memory for the state of an optimizer, and its way through two slots of device
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ema_ckpt.ema.offload.pinned import pinned_zeros

_SLOTS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Elements [start, stop) of the flattened local part of a bank's parameter; the last of them if
    `is_last`.
    """

    index: int
    start: int
    stop: int
    is_last: bool


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """What passes through a slot at once: per state name the host memory from the first to the last
    piece.
    """

    bank: StateSlab
    pieces: tuple[Piece, ...]
    hosts: Mapping[str, torch.Tensor]
    first: int  # element of the slabs at which it begins


class StateSlab:
    """The state of some parameters in slabs, one for each name; what the optimizer shows are views
    of these.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[torch.Tensor],
        names: tuple[str, ...],
        slot_nbytes: int,
    ) -> None:
        self.params = list(params)
        self.names = names
        self.shown: list[dict[str, torch.Tensor]] = [{} for _ in params]
        self.starts: list[int] = []
        shapes = [local_of(param).shape for param in params]
        on_device = local_of(params[0]).is_cuda
        bases = {}
        for name in names:
            dtype = optimizer.state[params[0]][name].dtype
            hosts = (
                pinned_zeros(shapes, dtype)
                if on_device
                else [torch.zeros(shape, dtype=dtype) for shape in shapes]
            )
            bases[name] = hosts
            for host, param, shown in zip(hosts, params, self.shown, strict=True):
                value = optimizer.state[param][name]
                host.copy_(local_of(value))
                optimizer.state[param][name] = shown[name] = shown_like(value, host)
        if on_device:
            self.starts = [int(host.storage_offset()) for host in bases[names[0]]]
        self.chunks = list(self._cut(bases, slot_nbytes, on_device))

    def is_whole(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer still shows this state, and nobody has put another in its place."""
        return all(
            optimizer.state.get(param, {}).get(name) is tensor
            for param, shown in zip(self.params, self.shown, strict=True)
            for name, tensor in shown.items()
        )

    def _cut(
        self, bases: Mapping[str, list[torch.Tensor]], slot_nbytes: int, on_device: bool
    ) -> Iterator[Chunk]:
        sizes = [host.numel() for host in bases[self.names[0]]]
        pieces = tuple(Piece(i, 0, size, is_last=True) for i, size in enumerate(sizes))
        if not on_device:
            yield Chunk(self, pieces, {}, 0)
            return
        stop = self.starts[-1] + sizes[-1] - self.starts[0]
        whole = {name: _span(hosts, 0, stop) for name, hosts in bases.items()}
        if len(sizes) > 1 or sum(map(_slot_nbytes, whole.values())) <= slot_nbytes:
            yield Chunk(self, pieces, whole, 0)
            return
        room = slot_nbytes // sum(host.element_size() for host in whole.values()) // 256 * 256 - 256
        for start in range(0, stop, room):
            end = min(start + room, stop)
            piece = Piece(0, start, end, is_last=end == stop)
            yield Chunk(
                self,
                (piece,),
                {name: _span(hosts, start, end) for name, hosts in bases.items()},
                start,
            )


def _span(hosts: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    return hosts[0].as_strided((stop - start,), (1,), hosts[0].storage_offset() + start)


def _slot_nbytes(host: torch.Tensor) -> int:
    """Bytes that a span takes in a slot."""
    return -(-host.numel() * host.element_size() // 256) * 256


class _DeviceSlot:
    """Device memory for one chunk, and the events that tell when it is full, worked on, and empty
    again.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        event: Any = torch.cuda.Event
        self.full, self.worked, self.free = event(), event(), event()

    def views(self, chunk: Chunk) -> dict[str, torch.Tensor]:
        """A flat tensor for each of the chunk's state names."""
        views, at = {}, 0
        for name, host in chunk.hosts.items():
            views[name] = self.memory[at : at + host.numel() * host.element_size()].view(host.dtype)
            at += _slot_nbytes(host)
        return views


class SlotPipeline:
    """The way of chunks through the two slots of a device."""

    def __init__(self, device: torch.device, slot_nbytes: int) -> None:
        stream: Any = torch.cuda.Stream
        self.device = device
        self.slots = [_DeviceSlot(slot_nbytes, device) for _ in range(_SLOTS)]
        self.inward, self.outward = stream(device), stream(device)
        self.done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._turn = 0

    def begin(self) -> None:
        """What comes in must have gone out: the last step's chunks, and slots that an allocator
        gave us.
        """
        if not self._turn:
            self.inward.wait_stream(torch.cuda.current_stream(self.device))
        self.inward.wait_event(self.done)

    def work(self, chunk: Chunk, job: Callable[[Mapping[str, torch.Tensor]], None]) -> None:
        """Bring a chunk in, do `job` with it in the current stream, and take it out."""
        slot = self.slots[self._turn % _SLOTS]
        self._turn += 1
        views, current = slot.views(chunk), torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.inward):
            self.inward.wait_event(slot.free)
            for name, view in views.items():
                view.copy_(chunk.hosts[name], non_blocking=True)
            slot.full.record(self.inward)
        current.wait_event(slot.full)
        job(views)
        slot.worked.record(current)
        with torch.cuda.stream(self.outward):
            self.outward.wait_event(slot.worked)
            for name, view in views.items():
                chunk.hosts[name].copy_(view, non_blocking=True)
            slot.free.record(self.outward)
            self.done.record(self.outward)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements, without autograd."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def shown_like(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as a tensor of the same mesh and placements; `DTensor.from_local` would move it to
    the mesh's device.
    """
    if not isinstance(like, DTensor):
        return local
    shown = DTensor.from_local(
        local.new_empty(0).to(like.device_mesh.device_type),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    ).detach()
    shown._local_tensor = local  # type: ignore[attr-defined]
    return shown


def is_moment(name: str, value: object, param: torch.Tensor) -> bool:
    """Whether a state entry has a number for each element of the parameter."""
    if name == "step" or not isinstance(value, torch.Tensor) or value.shape != param.shape:
        return False
    return value.is_floating_point() or value.is_complex()


def state_nbytes(optimizer: Optimizer, param: torch.Tensor) -> int:
    """Bytes of a parameter's state, or of the two moments that it will have."""
    local = local_of(param)
    state = optimizer.state.get(param)
    if not state:
        return 2 * local.numel() * local.element_size()
    moments = [value for name, value in state.items() if is_moment(name, value, param)]
    return sum(local.numel() * value.element_size() for value in moments)
