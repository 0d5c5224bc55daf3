"""The engine for averages in pinned host memory: they pass through small slots on the device.

Averages that follow each other in memory travel as one chunk: copied in, moved by the kernel,
copied out, beside the training. All of it is recorded once as a CUDA graph: launching chunk by
chunk from Python takes longer than the copies of small chunks, and takes that time from the
training loop. Streams of high priority made no measurable difference to the step beside them.

FSDP2 uploads a small table for every group it gathers or reduces, in the stream of the computation.
Such an upload queues behind the copies into the device that are waiting in the copy engine, and
with sharded ranks the slowest one holds up all. So one chunk after the other goes through its slot,
which leaves the engine idle half of the time. Only where that is too slow for the training (few
ranks share the averages, or steps are short) do chunks go through all slots side by side.

An update starts after the work that its caller has queued (the optimizer's step) and reads
parameters after it has returned. So whatever writes parameters has to wait: a global hook makes
every `optimizer.step()` do so, other writers call `ShardedEMA.wait()`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ema_ckpt.core.errors import StateError, UsageError
from ema_ckpt.ema.engines import cuda
from ema_ckpt.ema.engines.update_batch import Step, UpdateBatch

# By measurement on an H100: larger ones slow down more what runs beside them (three of these fit
# into its cache), smaller ones take longer to launch (docs/about/benchmarks_gpu.md).
SLOT_NBYTES = 16 << 20
_SLOTS = 3
# Share of the time between two updates that one may take with its chunks one after the other.
_MOST_BUSY = 0.85


class _Slots:
    """Device memory and streams that all offloaded averages of a process share on one device."""

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


class _Copy(NamedTuple):
    """A flat tensor in pinned memory and the one on the device that mirrors it."""

    host: Tensor
    device: Tensor


class _Chunk(NamedTuple):
    """Averages that pass through a slot at once; `batch` has them on the device."""

    copies: list[_Copy]
    batch: UpdateBatch


class OffloadStep:
    """A step over averages in pinned host memory; the rest of the batch is on one device."""

    def __init__(self, batch: UpdateBatch) -> None:
        strided = [tuple(param.shape) for param in batch.params if not param.is_contiguous()]
        if strided:
            raise UsageError(
                "unsupported",
                f"offload needs contiguous parameters; {len(strided)} are not, the first of shape"
                f" {strided[0]}: call .contiguous() on the model's parameters (channels_last is"
                " not), or leave offload out",
            )
        self.device = batch.params[0].device
        with torch.cuda.device(self.device):
            key = (self.device, SLOT_NBYTES)
            _slots[key] = self._slots = slots = _slots.get(key) or _Slots(self.device)
            slots.main.wait_stream(torch.cuda.current_stream())
            self._done = _event()
            with torch.cuda.stream(slots.main):
                # Kept: it owns the tables that its graphs read.
                self._record = _prepare(batch, slots, cuda.Control.on(self.device))
                self._run = self._record(1)
                self._done.record()
        self.slots_in_flight = 1
        self._pace = _Pace()
        _steps.add(self)
        if not _hook:
            hook = torch.compiler.disable(_before_any_step)  # type: ignore[no-untyped-call]
            _hook.append(register_optimizer_step_pre_hook(hook))

    def __call__(self, weight: float) -> None:
        with torch.cuda.device(self.device):
            main = self._slots.main
            if self.slots_in_flight == 1 and self._pace.is_too_slow():
                self._done.synchronize()  # a graph must outlast what is still running
                with torch.cuda.stream(main):
                    self._run = self._record(_SLOTS)
                self.slots_in_flight = _SLOTS
            main.wait_stream(torch.cuda.current_stream())
            begin, end = _event(), _event()
            with torch.cuda.stream(main):
                begin.record(main)
                self._run(weight)
                end.record(main)
            self._done = end
            if self.slots_in_flight == 1:
                self._pace.updates.append((begin, end))

    def join(self) -> None:
        """Make later work in the current stream wait for the pending update."""
        torch.cuda.current_stream(self.device).wait_event(self._done)

    def wait(self) -> None:
        """Return once no update is pending."""
        self._done.synchronize()

    def __del__(self) -> None:
        # The graph's memory must outlast what is still running.
        if not sys.is_finalizing():
            self.wait()


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Pace:
    """Measures which share of the time between two updates they take on the device."""

    def __init__(self) -> None:
        self.updates: deque[tuple[Any, Any]] = deque()  # (begin, end) of those not evaluated yet
        self._slow_in_a_row = 0

    def is_too_slow(self) -> bool:
        """Whether two updates in a row left hardly any time before the next. Waits for nothing."""
        while len(self.updates) > 1:
            (begin, end), (next_begin, _) = self.updates[0], self.updates[1]
            if not (end.query() and next_begin.query()):
                break
            share = begin.elapsed_time(end) / max(begin.elapsed_time(next_begin), 1e-6)
            self._slow_in_a_row = self._slow_in_a_row + 1 if share > _MOST_BUSY else 0
            self.updates.popleft()
        return self._slow_in_a_row >= 2


def _prepare(batch: UpdateBatch, slots: _Slots, control: cuda.Control) -> Callable[[int], Step]:
    """Return what records a step: one update in the main stream, so many slots in flight."""
    chunks = list(_chunks(batch, slots))
    if not cuda.serves(batch):

        def queue_by_torch(in_flight: int) -> Step:
            # Prepared and dropped at each update: the scratch of all chunks at once would be
            # larger than the averages.
            def step(weight: float) -> None:
                _queue(chunks, slots, in_flight, lambda chunk: cuda.prepare(chunk.batch)(weight))

            return step

        return queue_by_torch
    kernel_steps = {id(chunk): cuda.TritonStep(chunk.batch, control) for chunk in chunks}

    def record_graph(in_flight: int) -> Step:
        graph = torch.cuda.CUDAGraph()
        # Other threads may be talking to CUDA, as the watchdog of NCCL does.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            _queue(chunks, slots, in_flight, lambda chunk: kernel_steps[id(chunk)].launch())
        finally:
            graph.capture_end()

        def step(weight: float) -> None:
            control.weight.fill_(weight)
            if batch.noise is not None:
                control.call.fill_(batch.noise.call())
            graph.replay()

        return step

    return record_graph


def _queue(
    chunks: Sequence[_Chunk], slots: _Slots, in_flight: int, move: Callable[[_Chunk], None]
) -> None:
    """Queue all chunks, in turn in the streams of so many slots; the main one waits for them."""
    streams = slots.streams[:in_flight]
    for stream in streams:
        stream.wait_stream(slots.main)
    for index, chunk in enumerate(chunks):
        with torch.cuda.stream(streams[index % in_flight]):
            for copy in chunk.copies:
                copy.device.copy_(copy.host, non_blocking=True)
            move(chunk)
            for copy in chunk.copies:
                copy.host.copy_(copy.device, non_blocking=True)
    for stream in streams:
        slots.main.wait_stream(stream)


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    for step in list(_steps):
        if torch.cuda.is_current_stream_capturing():
            raise StateError(
                "unsupported",
                f"a step of {type(optimizer).__name__} inside a CUDA graph beside an offloaded"
                " average: on replay it would write parameters while they are read; leave offload"
                " out",
            )
        step.join()


class _Piece(NamedTuple):
    """Elements [first, first + numel) of a tensor of the batch, at `offset` of its slab."""

    tensor: int
    first: int
    numel: int
    offset: int


def _chunks(batch: UpdateBatch, slots: _Slots) -> Iterator[_Chunk]:
    """Cut the averages, in order of their addresses, to the size of a slot."""
    element_size = batch.averages[0].element_size()
    if batch.residuals is not None:
        element_size += batch.residuals[0].element_size()
    room = SLOT_NBYTES // element_size // 64 * 64
    for index, pieces in enumerate(_pieces_of_chunks(batch, room)):
        yield _chunk(batch, pieces, room, slots.memory[index % _SLOTS])


def _pieces_of_chunks(batch: UpdateBatch, room: int) -> list[list[_Piece]]:
    chunks: list[list[_Piece]] = []
    slab, start = None, 0
    for tensor in sorted(range(len(batch.averages)), key=lambda i: batch.averages[i].data_ptr()):
        average = batch.averages[tensor]
        first, offset = 0, int(average.storage_offset())
        while first < average.numel():
            if slab != average.untyped_storage().data_ptr() or offset - start >= room:
                chunks.append([])
                slab, start = average.untyped_storage().data_ptr(), offset
            numel = min(average.numel() - first, room - (offset - start))
            chunks[-1].append(_Piece(tensor, first, numel, offset))
            first, offset = first + numel, offset + numel
    return chunks


def _chunk(batch: UpdateBatch, pieces: Sequence[_Piece], room: int, memory: Tensor) -> _Chunk:
    """Return the chunk from the first to the last of `pieces`, mirrored in a slot's memory."""
    averages, average_copy = _mirror(batch.averages, pieces, memory)
    residuals, copies = None, [average_copy]
    if batch.residuals is not None:
        rest = memory[room * batch.averages[0].element_size() :]
        residuals, residual_copy = _mirror(batch.residuals, pieces, rest)
        copies.append(residual_copy)
    params = [
        batch.params[piece.tensor].detach().view(-1)[piece.first : piece.first + piece.numel]
        for piece in pieces
    ]
    noise = batch.noise
    if noise is not None:
        noise = noise.at([noise.positions[piece.tensor].after(piece.first) for piece in pieces])
    return _Chunk(copies, UpdateBatch(averages, params, residuals, batch.nonfinite_count, noise))


def _mirror(
    tensors: Sequence[Tensor], pieces: Sequence[_Piece], memory: Tensor
) -> tuple[list[Tensor], _Copy]:
    """Return each piece on the device, and the copy from the first to the last of them."""
    offsets = [int(tensors[piece.tensor].storage_offset()) + piece.first for piece in pieces]
    start, total = offsets[0], offsets[-1] + pieces[-1].numel - offsets[0]
    host = tensors[pieces[0].tensor].as_strided((total,), (1,), start)
    slot = memory[: total * host.element_size()].view(host.dtype)
    views = [
        slot[offset - start :][: piece.numel] for offset, piece in zip(offsets, pieces, strict=True)
    ]
    return views, _Copy(host, slot)
