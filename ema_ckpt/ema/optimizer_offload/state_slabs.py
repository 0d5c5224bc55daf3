"""Slabs of host memory for an optimizer's state, and two slots of device memory to work on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ema_ckpt.ema.optimizer_offload.pinned import pinned_zeros

_SLOTS = 2
# Gaps between the tensors of a slab, and between slabs in a slot, are less.
_OVERHEAD_NBYTES = 4 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Elements [start, stop) of the flattened local part of a slab's parameter."""

    index: int  # of the parameter
    start: int
    stop: int
    is_last: bool  # of the parameter's pieces


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Pieces that pass through a slot at once."""

    slab: StateSlab
    pieces: tuple[Piece, ...]
    hosts: Mapping[str, Tensor]  # by state name, from the first to the last piece
    first: int  # element of the slabs at which it begins


class StateSlab:
    """The state of some parameters, one slab of memory per state name.

    `views[i]` are the tensors of parameter i in `optimizer.state`, which alias the slabs.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        names: tuple[str, ...],
        slot_nbytes: int,
    ) -> None:
        self.params = list(params)
        self.names = names
        self.views: list[dict[str, Tensor]] = [{} for _ in params]
        self.starts: list[int] = []
        shapes = [local_of(param).shape for param in params]
        on_device = local_of(params[0]).is_cuda
        hosts: dict[str, list[Tensor]] = {}
        for name in names:
            dtype = optimizer.state[params[0]][name].dtype
            if on_device:
                hosts[name] = pinned_zeros(shapes, dtype)
            else:
                hosts[name] = [torch.zeros(shape, dtype=dtype) for shape in shapes]
            for host, param, views in zip(hosts[name], params, self.views, strict=True):
                value = optimizer.state[param][name]
                host.copy_(local_of(value))
                optimizer.state[param][name] = views[name] = host_state_like(value, host)
        pieces = [Piece(i, 0, shape.numel(), is_last=True) for i, shape in enumerate(shapes)]
        self.chunks = [Chunk(self, tuple(pieces), {}, 0)]
        if on_device:
            self.starts = [int(host.storage_offset()) for host in hosts[names[0]]]
            self.chunks = list(self._cut(hosts, pieces, slot_nbytes))

    def is_whole(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer still has this state, not another in its place."""
        return all(
            optimizer.state.get(param, {}).get(name) is view
            for param, views in zip(self.params, self.views, strict=True)
            for name, view in views.items()
        )

    def _cut(
        self, hosts: Mapping[str, list[Tensor]], pieces: Sequence[Piece], slot_nbytes: int
    ) -> Iterator[Chunk]:
        stop = self.starts[-1] + pieces[-1].stop - self.starts[0]
        whole = {name: _span(tensors, 0, stop) for name, tensors in hosts.items()}
        if len(pieces) > 1 or sum(map(_nbytes_in_slot, whole.values())) <= slot_nbytes:
            yield Chunk(self, tuple(pieces), whole, 0)
            return
        element_size = sum(host.element_size() for host in whole.values())
        step = slot_nbytes // element_size // 256 * 256 - 256
        for start in range(0, stop, step):
            end = min(start + step, stop)
            spans = {name: _span(tensors, start, end) for name, tensors in hosts.items()}
            yield Chunk(self, (Piece(0, start, end, is_last=end == stop),), spans, start)


def _span(hosts: Sequence[Tensor], start: int, stop: int) -> Tensor:
    return hosts[0].as_strided((stop - start,), (1,), hosts[0].storage_offset() + start)


def _nbytes_in_slot(host: Tensor) -> int:
    return -(-host.numel() * host.element_size() // 256) * 256


class OffloadedState:
    """The state of an optimizer in slabs; state that is put there otherwise is adopted later."""

    def __init__(self, optimizer: Optimizer, slot_nbytes: int) -> None:
        self._optimizer = optimizer
        self._slot_nbytes = slot_nbytes
        self.slabs: list[StateSlab] = []
        self.slab_of: dict[Tensor, StateSlab] = {}
        self.pipeline: SlotPipeline | None = None

    def wait(self) -> None:
        """Return once host memory holds the results of the last step."""
        if self.pipeline is not None:
            self.pipeline.done.synchronize()

    def is_whole(self) -> bool:
        """Return whether the optimizer still has the state of every slab."""
        return all(slab.is_whole(self._optimizer) for slab in self.slabs)

    def settle(self) -> None:
        """Move all state into slabs that is not there, as loaded from a checkpoint."""
        self.wait()
        if not self.is_whole():
            self.slabs = [slab for slab in self.slabs if slab.is_whole(self._optimizer)]
            self.slab_of = {}
            for slab in self.slabs:
                self.slab_of.update(dict.fromkeys(slab.params, slab))
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            self.adopt([p for p in group["params"] if p not in self.slab_of and state.get(p)])

    def adopt(self, params: Sequence[Tensor]) -> None:
        """Move the state of parameters into slabs, one for those with the same names and dtypes."""
        for batch in self.batches(params):
            kinds: dict[tuple[Any, ...], list[Tensor]] = {}
            for param in batch:
                state = self._optimizer.state[param]
                dtypes: dict[str, torch.dtype] = {}
                for name, value in state.items():
                    if is_moment(name, value, param):
                        dtypes[name] = value.dtype
                kinds.setdefault(tuple(dtypes.items()), []).append(param)
            for kind, members in kinds.items():
                if not kind:
                    continue
                names = tuple(name for name, _ in kind)
                slab = StateSlab(self._optimizer, members, names, self._slot_nbytes)
                self.slabs.append(slab)
                self.slab_of.update(dict.fromkeys(members, slab))
                device = local_of(members[0]).device
                if device.type == "cuda" and self.pipeline is None:
                    self.pipeline = SlotPipeline(device, self._slot_nbytes)

    def release(self) -> None:
        """Move the state back to the parameters' devices."""
        for slab in self.slabs:
            for param, views in zip(slab.params, slab.views, strict=True):
                device = local_of(param).device
                for name, view in views.items():
                    local = local_of(view).to(device, copy=True)
                    self._optimizer.state[param][name] = host_state_like(view, local)
        self.slabs, self.slab_of, self.pipeline = [], {}, None

    def batches(self, params: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return parameters of one dtype, as many as have their state in a slot; one at least."""
        batches: list[list[Tensor]] = []
        nbytes = 0
        for param in params:
            param_nbytes = self._state_nbytes(param) + _OVERHEAD_NBYTES
            is_full = nbytes + param_nbytes > self._slot_nbytes
            if not batches or is_full or local_of(param).dtype != batches[-1][0].dtype:
                batches.append([])
                nbytes = 0
            batches[-1].append(param)
            nbytes += param_nbytes
        return batches

    def _state_nbytes(self, param: Tensor) -> int:
        """Return the bytes of a parameter's state, or of the two moments that it will have."""
        local, state = local_of(param), self._optimizer.state.get(param)
        if not state:
            return 2 * local.numel() * local.element_size()
        moments = [value for name, value in state.items() if is_moment(name, value, param)]
        return sum(local.numel() * value.element_size() for value in moments)


class _DeviceSlot:
    """Device memory for one chunk, and events: it is filled, worked on, and free again."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        event: Any = torch.cuda.Event
        self.full, self.worked, self.free = event(), event(), event()

    def views(self, chunk: Chunk) -> dict[str, Tensor]:
        """Return a flat tensor for each of the chunk's state names."""
        views, offset = {}, 0
        for name, host in chunk.hosts.items():
            memory = self.memory[offset : offset + host.numel() * host.element_size()]
            views[name] = memory.view(host.dtype)
            offset += _nbytes_in_slot(host)
        return views


class SlotPipeline:
    """The copies of chunks through the two slots of a device."""

    def __init__(self, device: torch.device, slot_nbytes: int) -> None:
        stream: Any = torch.cuda.Stream
        self.device = device
        self.slots = [_DeviceSlot(slot_nbytes, device) for _ in range(_SLOTS)]
        self.inward, self.outward = stream(device), stream(device)
        self.done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._turn = 0

    def begin(self) -> None:
        """Wait, before copies in, for the last step's copies out, and for the slots' allocation."""
        if not self._turn:
            self.inward.wait_stream(torch.cuda.current_stream(self.device))
        self.inward.wait_event(self.done)

    def work(self, chunk: Chunk, job: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Copy a chunk in, run `job` on it in the current stream, and copy it out."""
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


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's elements, without autograd."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def host_state_like(like: Tensor, local: Tensor) -> Tensor:
    """Return `local` as a tensor of `like`'s mesh and placements, wherever it is."""
    if not isinstance(like, DTensor):
        return local
    # `DTensor.from_local(local)` would move it to the mesh's device.
    dtensor = DTensor.from_local(
        local.new_empty(0).to(like.device_mesh.device_type),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    ).detach()
    dtensor._local_tensor = local  # type: ignore[attr-defined]
    return dtensor


def is_moment(name: str, value: object, param: Tensor) -> bool:
    """Return whether a state entry has a number for each element of the parameter."""
    if name == "step" or not isinstance(value, Tensor) or value.shape != param.shape:
        return False
    return value.is_floating_point() or value.is_complex()
