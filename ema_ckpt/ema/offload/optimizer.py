"""Optimizer state in pinned host memory: it passes through two slots on the device while the
optimizer steps.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import _foreach_supported_types

from ema_ckpt.core.errors import UsageError
from ema_ckpt.ema.offload.state_slabs import (
    Chunk,
    Piece,
    SlotPipeline,
    StateSlab,
    is_moment,
    local_of,
    shown_like,
    state_nbytes,
)

_OVERHEAD_NBYTES = (
    4 << 10
)  # gaps between the tensors of a slab, and between slabs in a slot, are less
_REFUSED = ("amsgrad", "capturable", "differentiable")
_HANDLE = "_ema_ckpt_offloaded"
# of the `step` that schedulers put into an optimizer: it notes that it was called
_NOTE = "_wrapped_by_lr_sched"


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
        raise UsageError(
            "unsupported",
            f"offload_optimizer: {type(optimizer).__name__} is neither Adam nor AdamW",
        )
    if handle_of(optimizer) is not None:
        raise UsageError(
            "usage", "offload_optimizer: the state of this optimizer is offloaded already"
        )
    if slot_bytes < 1 << 16:
        raise UsageError(
            "usage", f"offload_optimizer: slot_bytes={slot_bytes}: expected 65536 or more"
        )
    return OffloadedOptimizer(optimizer, slot_bytes)


def handle_of(optimizer: Optimizer) -> OffloadedOptimizer | None:
    """The handle of an offloaded optimizer; None for others."""
    handle: OffloadedOptimizer | None = vars(optimizer).get(_HANDLE)
    return handle


class OffloadedOptimizer:
    """An optimizer whose state is in host memory; made by `offload_optimizer`.

    `optimizer.state_dict()`, `ema_ckpt.save` and `ema_ckpt.restore` wait for the last step's copies
    by themselves; whoever reads `optimizer.state` on his own calls `wait()` first.
    """

    def __init__(self, optimizer: Optimizer, slot_nbytes: int) -> None:
        self._optimizer = optimizer
        self._slot_nbytes = slot_nbytes
        self._banks: list[StateSlab] = []
        self._bank_of: dict[torch.Tensor, StateSlab] = {}
        self._traffic: SlotPipeline | None = None
        self._class = type(optimizer)
        self._raw = _without_hooks(self._class)
        self._check()
        if "step" in vars(optimizer) and not hasattr(optimizer.step, _NOTE):
            raise UsageError(
                "unsupported", "offload_optimizer: something has replaced this optimizer's step()"
            )
        optimizer.__class__ = _offloaded(self._class)  # type: ignore[arg-type]
        _renew_note(optimizer)
        setattr(optimizer, _HANDLE, self)
        before: Any = lambda _: self.wait()  # noqa: E731
        after: Any = lambda _: self.settle()  # noqa: E731
        self._hooks = [
            optimizer.register_state_dict_pre_hook(before),
            optimizer.register_load_state_dict_post_hook(after),
        ]
        self.settle()

    def wait(self) -> None:
        """Return once host memory holds what the last step left."""
        if self._traffic is not None:
            self._traffic.done.synchronize()

    def settle(self) -> None:
        """Move state to host memory that is not there, as a checkpoint that was loaded or other
        code put it.
        """
        self.wait()
        kept = [bank for bank in self._banks if bank.is_whole(self._optimizer)]
        if len(kept) < len(self._banks):
            self._banks = kept
            self._bank_of = {param: bank for bank in kept for param in bank.params}
        for group in self._optimizer.param_groups:
            self._adopt(
                [
                    p
                    for p in group["params"]
                    if p not in self._bank_of and self._optimizer.state.get(p)
                ]
            )

    @staticmethod
    def zeros(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """State of a parameter in host memory, to be filled and then taken over by `settle`."""
        return shown_like(param, torch.zeros(local_of(param).shape, dtype=dtype))

    def detach(self) -> None:
        """Move the state back to the parameters' devices and make the optimizer what it was."""
        optimizer = self._optimizer
        if handle_of(optimizer) is not self:
            return
        self.settle()
        for bank in self._banks:
            for param, shown in zip(bank.params, bank.shown, strict=True):
                for name, value in shown.items():
                    device = local_of(param).device
                    optimizer.state[param][name] = shown_like(
                        value, local_of(value).to(device, copy=True)
                    )
        for hook in self._hooks:
            hook.remove()
        delattr(optimizer, _HANDLE)
        optimizer.__class__ = self._class
        _renew_note(optimizer)
        self._banks, self._bank_of, self._traffic = [], {}, None

    def step(self) -> None:
        """What the optimizer's `step` does."""
        self._check()
        if any(not bank.is_whole(self._optimizer) for bank in self._banks):
            self.settle()
        for group in self._optimizer.param_groups:
            live = [param for param in group["params"] if param.grad is not None]
            options = {key: value for key, value in group.items() if key != "params"}
            if (
                options.get("foreach") is None
                and options.get("fused") is None
                and any(map(_is_foreign, live))
            ):
                options["foreach"] = (
                    False  # as torch chooses; what it is given here are plain tensors
                )
            fresh = [param for param in live if param not in self._bank_of]
            stepped = self._first_steps(fresh, options)
            banks = dict.fromkeys(self._bank_of[param] for param in live if param not in stepped)
            if banks and self._traffic is not None:
                self._traffic.begin()
            for bank in banks:
                for chunk in bank.chunks:
                    self._work(chunk, options)

    def _check(self) -> None:
        devices = set()
        for group in self._optimizer.param_groups:
            for option in _REFUSED:
                if group.get(option):
                    raise UsageError(
                        "unsupported", f"offload_optimizer: {option}=True is not supported"
                    )
            for param in group["params"]:
                local = local_of(param)
                devices.add(local.device)
                if not local.is_contiguous():
                    message = f"a parameter of shape {tuple(param.shape)} is not contiguous"
                    raise UsageError(
                        "unsupported", f"offload_optimizer: {message}; call .contiguous() on it"
                    )
        if len(devices) > 1:
            found = ", ".join(sorted(map(str, devices)))
            raise UsageError(
                "unsupported", f"offload_optimizer: parameters on several devices: {found}"
            )

    def _first_steps(
        self, params: Sequence[torch.Tensor], options: Mapping[str, Any]
    ) -> set[torch.Tensor]:
        """Step parameters that have no state: the optimizer makes it on the device, some at a time,
        and it moves.
        """
        for batch in self._batches(params):
            pieces = [_whole_piece(param) for param in batch]
            states: dict[torch.Tensor, dict[str, Any]] = {piece: {} for piece in pieces}
            left = self._run(options, states)
            for param, piece in zip(batch, pieces, strict=True):
                shape = local_of(param).shape
                made = {
                    name: shown_like(param, value.view(shape))
                    if is_moment(name, value, piece)
                    else value
                    for name, value in left[piece].items()
                }
                self._optimizer.state[param] = made
            self._adopt(batch)
        return set(params)

    def _batches(self, params: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Parameters in order, of one dtype, so many that two moments of theirs fit into a slot;
        one at least.
        """
        batch: list[torch.Tensor] = []
        nbytes = 0
        for param in params:
            local = local_of(param)
            own = state_nbytes(self._optimizer, param) + _OVERHEAD_NBYTES
            if batch and (nbytes + own > self._slot_nbytes or local.dtype != batch[0].dtype):
                yield batch
                batch, nbytes = [], 0
            batch.append(param)
            nbytes += own
        if batch:
            yield batch

    def _adopt(self, params: Sequence[torch.Tensor]) -> None:
        for batch in self._batches(params):
            kinds: dict[tuple[Any, ...], list[torch.Tensor]] = {}
            for param in batch:
                state = self._optimizer.state[param]
                names = tuple(
                    name for name, value in state.items() if is_moment(name, value, param)
                )
                kinds.setdefault((names, *(state[name].dtype for name in names)), []).append(param)
            for (names, *_), members in kinds.items():
                if names:
                    self._keep(StateSlab(self._optimizer, members, names, self._slot_nbytes))

    def _keep(self, bank: StateSlab) -> None:
        self._banks.append(bank)
        self._bank_of.update(dict.fromkeys(bank.params, bank))
        device = local_of(bank.params[0]).device
        if device.type == "cuda" and self._traffic is None:
            self._traffic = SlotPipeline(device, self._slot_nbytes)

    def _work(self, chunk: Chunk, options: Mapping[str, Any]) -> None:
        if self._traffic is None:
            self._on_chunk(chunk, options, {})
        else:
            self._traffic.work(chunk, lambda views: self._on_chunk(chunk, options, views))

    def _on_chunk(
        self, chunk: Chunk, options: Mapping[str, Any], views: Mapping[str, torch.Tensor]
    ) -> None:
        bank, states = chunk.bank, dict[torch.Tensor, dict[str, Any]]()
        given: list[tuple[Piece, torch.Tensor, dict[str, torch.Tensor]]] = []
        for piece in chunk.pieces:
            param = bank.params[piece.index]
            if param.grad is None:
                continue
            flat = _flat(param, piece.start, piece.stop)
            state = dict(self._optimizer.state[param])
            for name in bank.names:
                if views:
                    at = bank.starts[piece.index] + piece.start - chunk.first - bank.starts[0]
                    state[name] = views[name][at : at + piece.stop - piece.start]
                else:
                    state[name] = local_of(state[name]).view(-1)[piece.start : piece.stop]
            if (
                not piece.is_last
            ):  # counts are shared by the pieces of a parameter; the last one moves them on
                state = {
                    k: v if k in bank.names or not torch.is_tensor(v) else v.clone()
                    for k, v in state.items()
                }
            states[flat] = state
            given.append((piece, flat, {name: state[name] for name in bank.names}))
        if not states:
            return
        left = self._run(options, states)
        for piece, flat, moments in given:
            for name, value in left[flat].items():
                if name not in moments:
                    if piece.is_last:
                        self._optimizer.state[bank.params[piece.index]][name] = value
                elif value is not moments[name]:  # put in its place instead of written into it
                    moments[name].copy_(value)

    def _run(
        self, options: Mapping[str, Any], states: Mapping[torch.Tensor, dict[str, Any]]
    ) -> Mapping[torch.Tensor, dict[str, Any]]:
        """Let the optimizer's own code step these tensors alone; returns their state after that."""
        optimizer = self._optimizer
        groups, state = optimizer.param_groups, optimizer.state
        own = {**options, "params": list(states)}
        optimizer.param_groups = [own]
        optimizer.state = defaultdict(dict, states)
        try:
            self._raw(optimizer)
            left = optimizer.state
        finally:
            optimizer.param_groups, optimizer.state = groups, state
        changed = [name for name in own if name != "params" and own[name] is not options.get(name)]
        if changed:
            message = f"{self._class.__name__}.step() changes {', '.join(map(repr, changed))} of its parameter groups"
            raise UsageError(
                "unsupported",
                f"offload_optimizer: {message}, which it would do several times a step",
            )
        return left


def _without_hooks(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """A class' `step` without the hooks that torch puts around it."""
    step: Any = kind.step
    unhooked: Callable[[Optimizer], Any] = (
        step.__wrapped__ if getattr(step, "hooked", False) else step
    )
    return unhooked


@functools.cache
def _offloaded(kind: type[Optimizer]) -> type[Optimizer]:
    """The class of an offloaded optimizer: the same but for `step`."""

    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> None:
        if closure is not None:
            raise UsageError(
                "unsupported", "offload_optimizer: step() with a closure is not supported"
            )
        handle: OffloadedOptimizer = getattr(self, _HANDLE)
        handle.step()

    def refuse(self: Optimizer, protocol: int) -> None:
        del self, protocol
        raise UsageError(
            "unsupported",
            "offload_optimizer: detach() the handle before copying or pickling the optimizer",
        )

    hooked: Any = torch.compiler.disable(Optimizer.profile_hook_step(step))  # type: ignore[no-untyped-call]
    hooked.hooked = True  # torch wraps a step that is not
    return type(
        kind.__name__,
        (kind,),
        {
            "step": hooked,
            "__reduce_ex__": refuse,
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
        },
    )


def _renew_note(optimizer: Optimizer) -> None:
    """Where a scheduler has put its `step` around the one of another class, put the same around the
    present one.
    """
    if "step" not in vars(optimizer) or not hasattr(optimizer.step, _NOTE):
        return
    step: Any = type(optimizer).step
    itself = weakref.ref(optimizer)

    @functools.wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        optimizer: Any = itself()
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    setattr(noted, _NOTE, True)
    optimizer.step = noted  # type: ignore[method-assign]


def _flat(param: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Part of the local parameter with its gradient, as a plain tensor."""
    grad: Any = param.grad
    if (
        isinstance(param, DTensor)
        and isinstance(grad, DTensor)
        and grad.placements != param.placements
    ):
        grad = grad.redistribute(param.device_mesh, param.placements)
    flat = local_of(param).view(-1)[start:stop]
    flat.grad = local_of(grad).reshape(-1)[start:stop]
    return flat


def _whole_piece(param: torch.Tensor) -> torch.Tensor:
    return _flat(param, 0, local_of(param).numel())


def _is_foreign(param: torch.Tensor) -> bool:
    """Whether torch does not take its foreach way for tensors of this type by itself."""
    return type(param) not in _foreach_supported_types
