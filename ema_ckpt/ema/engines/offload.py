"""The engine for averages in pinned host memory: they pass through small slots on the device,
beside the training.

Averages that follow each other in memory travel as one chunk: copied in, moved by the kernel,
copied out. Three slots are in flight, each in a stream of its own. All of it is recorded once as a
CUDA graph: launching chunk by chunk from
Python takes longer than the copies of small chunks, and takes that time from the training loop.
Streams of high priority made no measurable difference to the step beside them.

An update starts after the work that its caller has queued (the optimizer's step) and reads
parameters after it has returned. So whatever writes parameters has to wait: a global hook makes
every `optimizer.step()` do so, other writers call `ShardedEMA.wait()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ema_ckpt.core.errors import StateError, UsageError
from ema_ckpt.ema.engines import cuda as triton
from ema_ckpt.ema.engines.lists import Step, UpdateBatch
from ema_ckpt.ema.engines.noise import Noise

# By measurement on an H100: larger ones slow down more what runs beside them (three of these fit
# into its cache), smaller ones take longer to launch (docs/about/benchmarks_gpu.md).
SLOT_NBYTES = 16 << 20
_SLOTS = 3


class _Slots:
    """Device memory and streams that all offloaded averages of a process share, one set per
    device.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = [
            torch.empty(SLOT_NBYTES, dtype=torch.uint8, device=device) for _ in range(_SLOTS)
        ]
        stream: Any = torch.cuda.Stream
        self.streams = [stream(device) for _ in range(_SLOTS)]
        self.main = stream(device)


_slots: WeakValueDictionary[tuple[torch.device, int], _Slots] = WeakValueDictionary()
_steps: WeakSet[OffloadStep] = WeakSet()
_hook: list[Any] = []


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """What passes through a slot at once: (host, device) pairs of flat tensors, and the averages as
    lists there.
    """

    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    lists: UpdateBatch


class OffloadStep:
    """A step over averages in pinned host memory; parameters and events are on one device."""

    def __init__(self, lists: UpdateBatch) -> None:
        strided = [tuple(param.shape) for param in lists.params if not param.is_contiguous()]
        if strided:
            raise UsageError(
                "unsupported",
                f"offload needs contiguous parameters; {len(strided)} are not, the first of shape {strided[0]}: call"
                " .contiguous() on the model's parameters (channels_last is not), or leave offload out",
            )
        self.device = lists.params[0].device
        with torch.cuda.device(self.device):
            key = (self.device, SLOT_NBYTES)
            _slots[key] = self._slots = slots = _slots.get(key) or _Slots(self.device)
            slots.main.wait_stream(torch.cuda.current_stream())
            self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(slots.main):
                self._run = _prepared(lists, slots, triton.Control.on(self.device))
                self._done.record()
        _steps.add(self)
        if not _hook:
            hook = torch.compiler.disable(_before_any_step)  # type: ignore[no-untyped-call]
            _hook.append(register_optimizer_step_pre_hook(hook))

    def __call__(self, weight: float) -> None:
        with torch.cuda.device(self.device):
            main = self._slots.main
            main.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(main):
                self._run(weight)
                self._done.record(main)

    def join(self) -> None:
        """Make what is queued from now on in the current stream wait for the pending update."""
        torch.cuda.current_stream(self.device).wait_event(self._done)

    def wait(self) -> None:
        """Return once no update is pending."""
        self._done.synchronize()

    def __del__(self) -> None:
        # The graph's memory must outlast what is still running.
        if not sys.is_finalizing():
            self._done.synchronize()


def _prepared(lists: UpdateBatch, slots: _Slots, control: triton.Control) -> Step:
    """What queues one update in the main stream."""
    chunks = list(_chunks(lists, slots))
    if not triton.serves(lists):
        return lambda weight: _queue(chunks, slots, lambda chunk: _move_slowly(chunk.lists, weight))
    steps = {id(chunk): triton.TritonStep(chunk.lists, control) for chunk in chunks}
    graph = torch.cuda.CUDAGraph()
    # Other threads may be talking to CUDA, as the watchdog of NCCL does.
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        _queue(chunks, slots, lambda chunk: steps[id(chunk)].launch())
    finally:
        graph.capture_end()

    def step(weight: float) -> None:
        steps  # noqa: B018 - the graph reads their tables
        control.weight.fill_(weight)
        if lists.noise is not None:
            control.call.fill_(lists.noise.call())
        graph.replay()

    return step


def _queue(chunks: Sequence[_Chunk], slots: _Slots, move: Callable[[_Chunk], None]) -> None:
    """Queue all chunks, in turn in the slots' streams, between here and here in the main one."""
    for stream in slots.streams:
        stream.wait_stream(slots.main)
    for index, chunk in enumerate(chunks):
        with torch.cuda.stream(slots.streams[index % _SLOTS]):
            for host, slot in chunk.copies:
                slot.copy_(host, non_blocking=True)
            move(chunk)
            for host, slot in chunk.copies:
                host.copy_(slot, non_blocking=True)
    for stream in slots.streams:
        slots.main.wait_stream(stream)


def _move_slowly(lists: UpdateBatch, weight: float) -> None:
    # Made and dropped at each update: the scratch of all chunks at once would be larger than the
    # averages.
    step: Step = triton.prepare(lists)
    step(weight)


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    for step in list(_steps):
        if torch.cuda.is_current_stream_capturing():
            raise StateError(
                "unsupported",
                f"a step of {type(optimizer).__name__} inside a CUDA graph beside an offloaded average: on replay it"
                " would write parameters while they are read; leave offload out",
            )
        step.join()


def _chunks(lists: UpdateBatch, slots: _Slots) -> Iterator[_Chunk]:
    """The averages in order of their addresses, cut to the size of a slot."""
    room = SLOT_NBYTES // lists.shadows[0].element_size()
    if lists.residuals is not None:
        room = SLOT_NBYTES // (lists.shadows[0].element_size() + lists.residuals[0].element_size())
    room -= room % 64
    pieces: list[tuple[int, int, int]] = []  # tensor, first element, number of elements
    start = 0  # address of the chunk's first element, in elements
    index = 0
    for tensor in sorted(range(len(lists.shadows)), key=lambda i: lists.shadows[i].data_ptr()):
        shadow = lists.shadows[tensor]
        at, done = _place(shadow), 0
        while done < shadow.numel():
            if pieces and (
                at + done - start >= room or not _same_slab(lists, pieces[-1][0], tensor)
            ):
                yield _chunk(lists, pieces, room, slots.memory[index % _SLOTS])
                pieces, index = [], index + 1
            if not pieces:
                start = at + done
            length = min(shadow.numel() - done, room - (at + done - start))
            pieces.append((tensor, done, length))
            done += length
    if pieces:
        yield _chunk(lists, pieces, room, slots.memory[index % _SLOTS])


def _place(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _same_slab(lists: UpdateBatch, a: int, b: int) -> bool:
    return (
        lists.shadows[a].untyped_storage().data_ptr()
        == lists.shadows[b].untyped_storage().data_ptr()
    )


def _chunk(
    lists: UpdateBatch, pieces: Sequence[tuple[int, int, int]], room: int, memory: torch.Tensor
) -> _Chunk:
    """One chunk: the host memory from its first to its last element, and the same elements in a
    slot.
    """
    shadows, shadow_copy = _mirrored(lists.shadows, pieces, memory)
    residuals, copies = None, [shadow_copy]
    if lists.residuals is not None:
        after = memory[room * lists.shadows[0].element_size() :]
        residuals, residual_copy = _mirrored(lists.residuals, pieces, after)
        copies.append(residual_copy)
    params = [lists.params[i].detach().view(-1)[done : done + length] for i, done, length in pieces]
    noise = lists.noise
    if noise is not None:
        noise = Noise(
            noise.seed, noise.call, [noise.positions[i].after(done) for i, done, _ in pieces]
        )
    return _Chunk(tuple(copies), UpdateBatch(shadows, params, residuals, lists.events, noise))


def _mirrored(
    tensors: Sequence[torch.Tensor], pieces: Sequence[tuple[int, int, int]], memory: torch.Tensor
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Each piece on the device, and (host, device) from the first to the last of them."""
    first, begun, _ = pieces[0]
    start = _place(tensors[first]) + begun
    last, ended, length = pieces[-1]
    total = _place(tensors[last]) + ended + length - start
    host = tensors[first].as_strided((total,), (1,), start)
    slot = memory[: total * host.element_size()].view(host.dtype)
    views = [slot[_place(tensors[i]) + done - start :][:length] for i, done, length in pieces]
    return views, (host, slot)
