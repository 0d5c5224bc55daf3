"""Optimizer state in pinned host memory, which passes through two slots on the device at each step.

The parameters' moments (and float32 master weights, where an optimizer keeps them) lie in slabs of
host memory. A step brings a chunk of them into a slot, lets the optimizer's own code work on just
these parameters, and takes the chunk back, while the next one is on its way into the other slot.
Every kernel that runs is the optimizer's own, on flat parts of the local tensors: all of them work
element by element, so that bits are those of the plain optimizer.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import _foreach_supported_types

from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.text import counted
from ema_ckpt.ema.optimizer_offload.state_slabs import (
    Chunk,
    OffloadedState,
    Piece,
    host_state_like,
    is_moment,
    local_of,
)

_REFUSED = ("amsgrad", "capturable", "differentiable")
_HANDLE = "_ema_ckpt_offloaded"
# of the `step` that schedulers put into an optimizer: it notes that it was called
_NOTE = "_wrapped_by_lr_sched"

_State = dict[str, Any]  # of one parameter


def offload_optimizer(optimizer: Optimizer, slot_bytes: int = 128 << 20) -> OffloadedOptimizer:
    """Keep the state of an Adam or AdamW in pinned host memory instead of on the device.

    Saves the bytes of the state on the device (8 for each float32 parameter of this rank) for twice
    `slot_bytes`; `step` then takes the time of copying the state in and out at once. Results are
    those of the plain optimizer, bit for bit. For plain, DDP, FSDP1 and FSDP2 parameters. State
    that is there already is moved; without CUDA it stays in ordinary memory.

    Args:
        optimizer: a `torch.optim.Adam` or `AdamW`, or of a class derived from one of them whose
            `step` treats each element and each parameter by itself, and leaves its parameter groups
            alone.
        slot_bytes: bytes of each of the two slots on the device.

    Raises:
        UsageError: `unsupported` for another optimizer, for amsgrad, capturable, differentiable,
            for parameters that are not contiguous or on several devices; `usage` if it is offloaded
            already.
    """
    if not isinstance(optimizer, Adam | AdamW):
        raise _refusal(f"{type(optimizer).__name__} is neither Adam nor AdamW")
    if handle_of(optimizer) is not None:
        raise _refusal("the state of this optimizer is offloaded already", code="usage")
    if not isinstance(slot_bytes, int) or slot_bytes < 1 << 16:
        raise _refusal(f"slot_bytes={slot_bytes!r}: expected 65536 or more", code="usage")
    return OffloadedOptimizer(optimizer, slot_bytes)


def handle_of(optimizer: Optimizer) -> OffloadedOptimizer | None:
    """Return the handle of an offloaded optimizer; None for others."""
    handle: OffloadedOptimizer | None = getattr(optimizer, "__dict__", {}).get(_HANDLE)
    return handle


def _refusal(reason: str, code: str = "unsupported") -> UsageError:
    return UsageError(code, f"offload_optimizer: {reason}")


class _PieceState(NamedTuple):
    """The state of a piece as the optimizer's step gets it."""

    piece: Piece
    flat: Tensor  # its parameter
    state: _State
    moments: Mapping[str, Tensor]  # of it, in the slot


class OffloadedOptimizer:
    """An optimizer whose state is in host memory; made by `offload_optimizer`.

    `optimizer.state_dict()`, `ema_ckpt.save` and `ema_ckpt.restore` wait for the last step's copies
    by themselves; call `wait()` before you read `optimizer.state` yourself.
    """

    def __init__(self, optimizer: Optimizer, slot_nbytes: int) -> None:
        self._optimizer = optimizer
        self._state = OffloadedState(optimizer, slot_nbytes)
        self._class = type(optimizer)
        step: Any = self._class.step
        # without the hooks that torch puts around it
        self._plain_step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._check()
        if "step" in vars(optimizer) and not hasattr(optimizer.step, _NOTE):
            raise _refusal("something has replaced this optimizer's step()")
        optimizer.__class__ = _offloaded_class(self._class)  # type: ignore[arg-type]
        _renew_note(optimizer)
        setattr(optimizer, _HANDLE, self)
        before: Any = lambda _: self.wait()  # noqa: E731
        after: Any = lambda _: self._settle()  # noqa: E731
        self._hooks = [
            optimizer.register_state_dict_pre_hook(before),
            optimizer.register_load_state_dict_post_hook(after),
        ]
        self._settle()

    def __repr__(self) -> str:
        moved = counted(len(self._state.slab_of), "parameter")
        return f"<OffloadedOptimizer: {self._class.__name__}, state of {moved} in host memory>"

    def wait(self) -> None:
        """Return once host memory holds the results of the last step."""
        self._state.wait()

    def _settle(self) -> None:
        """Move state to host memory that is not there, as loaded from a checkpoint."""
        self._state.settle()

    @staticmethod
    def _zeros(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Make state of a parameter in host memory, to be filled and then adopted by `_settle`."""
        return host_state_like(param, torch.zeros(local_of(param).shape, dtype=dtype))

    def detach(self) -> None:
        """Move the state back to the parameters' devices and restore the optimizer's class."""
        optimizer = self._optimizer
        if handle_of(optimizer) is not self:
            return
        self._settle()
        self._state.release()
        for hook in self._hooks:
            hook.remove()
        delattr(optimizer, _HANDLE)
        optimizer.__class__ = self._class
        _renew_note(optimizer)

    def _step(self) -> None:
        """Step the optimizer, chunk by chunk."""
        self._check()
        if not self._state.is_whole():
            self._settle()
        for group in self._optimizer.param_groups:
            live = [param for param in group["params"] if param.grad is not None]
            self._step_group(live, _step_options(group, live))

    def _step_group(self, params: Sequence[Tensor], options: Mapping[str, Any]) -> None:
        slab_of = self._state.slab_of
        known: list[Tensor] = []
        fresh: dict[Tensor, None] = {}
        for param in params:
            if param in slab_of:
                known.append(param)
            else:
                fresh[param] = None
        self._first_steps(list(fresh), options)
        slabs = dict.fromkeys(slab_of[param] for param in known)
        self._step_chunks([chunk for slab in slabs for chunk in slab.chunks], options)

    def _step_chunks(self, chunks: Sequence[Chunk], options: Mapping[str, Any]) -> None:
        pipeline = self._state.pipeline
        if chunks and pipeline is not None:
            pipeline.begin()
        for chunk in chunks:
            step = functools.partial(self._step_chunk, chunk, options)
            if pipeline is None:
                step({})
            else:
                pipeline.work(chunk, step)

    def _check(self) -> None:
        devices = set()
        for group in self._optimizer.param_groups:
            for option in _REFUSED:
                if group.get(option):
                    raise _refusal(f"{option}=True is not supported")
            for param in group["params"]:
                local = local_of(param)
                devices.add(local.device)
                if not local.is_contiguous():
                    shape = tuple(param.shape)
                    raise _refusal(
                        f"a parameter of shape {shape} is not contiguous; call .contiguous() on it"
                    )
        if len(devices) > 1:
            raise _refusal(f"parameters on several devices: {', '.join(sorted(map(str, devices)))}")

    def _first_steps(self, params: Sequence[Tensor], options: Mapping[str, Any]) -> None:
        """Step parameters without state: the optimizer makes it on the device, then it moves."""
        for batch in self._state.batches(params):
            flats = [_flat_part(param, 0, local_of(param).numel()) for param in batch]
            states = self._run_step(options, {flat: {} for flat in flats})
            for param, flat in zip(batch, flats, strict=True):
                state = states[flat]
                for name, value in state.items():
                    if is_moment(name, value, flat):
                        state[name] = host_state_like(param, value.view(local_of(param).shape))
                self._optimizer.state[param] = dict(state)
            self._state.adopt(batch)

    def _step_chunk(
        self, chunk: Chunk, options: Mapping[str, Any], views: Mapping[str, Tensor]
    ) -> None:
        """Step the pieces of a chunk; `views` are its state on the device, {} without CUDA."""
        parts = []
        for piece in chunk.pieces:
            param = chunk.slab.params[piece.index]
            if param.grad is not None:
                flat = _flat_part(param, piece.start, piece.stop)
                state = self._piece_state(chunk, piece, views)
                moments = {name: state[name] for name in chunk.slab.names}
                parts.append(_PieceState(piece, flat, state, moments))
        if not parts:
            return
        states = self._run_step(options, {part.flat: part.state for part in parts})
        for part in parts:
            counts = _write_moments(states[part.flat], part.moments)
            if part.piece.is_last:
                param = chunk.slab.params[part.piece.index]
                self._optimizer.state[param].update(counts)

    def _piece_state(self, chunk: Chunk, piece: Piece, views: Mapping[str, Tensor]) -> _State:
        slab = chunk.slab
        state = dict(self._optimizer.state[slab.params[piece.index]])
        for name, value in state.items():
            if name in slab.names and views:
                start = slab.starts[piece.index] - slab.starts[0] + piece.start - chunk.first
                state[name] = views[name][start : start + piece.stop - piece.start]
            elif name in slab.names:
                state[name] = local_of(value).view(-1)[piece.start : piece.stop]
            elif torch.is_tensor(value) and not piece.is_last:
                # Counts are shared by the pieces of a parameter; the last one moves them on.
                state[name] = value.clone()
        return state

    def _run_step(
        self, options: Mapping[str, Any], states: Mapping[Tensor, _State]
    ) -> Mapping[Tensor, _State]:
        """Run the optimizer's own code on these tensors alone; returns their state after that."""
        optimizer = self._optimizer
        groups, state = optimizer.param_groups, optimizer.state
        group = {**options, "params": list(states)}
        optimizer.param_groups = [group]
        optimizer.state = defaultdict(dict, states)
        try:
            self._plain_step(optimizer)
            new_states = optimizer.state
        finally:
            optimizer.param_groups, optimizer.state = groups, state
        del group["params"]
        changed = [repr(name) for name, value in group.items() if value is not options.get(name)]
        if changed:
            raise _refusal(
                f"{self._class.__name__}.step() changes {', '.join(changed)} of its parameter"
                " groups, which it would do several times a step"
            )
        return new_states


def _write_moments(state: Mapping[str, Any], moments: Mapping[str, Tensor]) -> _State:
    """Write moments that a step replaced instead of writing into them; return all other state."""
    others: dict[str, Any] = {}
    for name, value in state.items():
        moment = moments.get(name)
        if moment is None:
            others[name] = value
        elif moment is not value:
            moment.copy_(value)
    return others


def _step_options(group: Mapping[str, Any], params: Sequence[Tensor]) -> dict[str, Any]:
    """Return the options of a parameter group, `foreach` as torch would choose it."""
    options = dict(group)
    del options["params"]
    if options.get("foreach") is not None or options.get("fused") is not None:
        return options
    # The step gets plain tensors; for other types torch does not take its foreach way by itself.
    if not set(map(type, params)).issubset(_foreach_supported_types):
        options["foreach"] = False
    return options


@functools.cache
def _offloaded_class(kind: type[Optimizer]) -> type[Optimizer]:
    """Make the class of an offloaded optimizer: the same but for `step`."""

    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> None:
        if closure is not None:
            raise _refusal("step() with a closure is not supported")
        handle: OffloadedOptimizer = getattr(self, _HANDLE)
        handle._step()

    def refuse(self: Optimizer, protocol: int) -> None:
        del self, protocol
        raise _refusal("detach() the handle before copying or pickling the optimizer")

    hooked: Any = torch.compiler.disable(Optimizer.profile_hook_step(step))  # type: ignore[no-untyped-call]
    hooked.hooked = True  # torch wraps a step that is not
    attributes = {
        "step": hooked,
        "__reduce_ex__": refuse,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), attributes)


def _renew_note(optimizer: Optimizer) -> None:
    """Put a scheduler's wrapper around the present class' `step`, if it is around another's."""
    if "step" not in vars(optimizer) or not hasattr(optimizer.step, _NOTE):
        return
    step: Any = type(optimizer).step
    reference = weakref.ref(optimizer)

    @functools.wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        optimizer: Any = reference()
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    setattr(noted, _NOTE, True)
    optimizer.step = noted  # type: ignore[method-assign]


def _flat_part(param: Tensor, start: int, stop: int) -> Tensor:
    """Return part of the local parameter with its gradient, as a plain tensor."""
    grad: Any = param.grad
    if (
        isinstance(param, DTensor)
        and getattr(grad, "placements", param.placements) != param.placements
    ):
        grad = grad.redistribute(param.device_mesh, param.placements)
    flat = local_of(param).view(-1)[start:stop]
    flat.grad = local_of(grad).reshape(-1)[start:stop]
    return flat
