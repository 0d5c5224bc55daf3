"""Updating by itself after the optimizer's step, through optimizer hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ema_ckpt.core.errors import UsageError
from ema_ckpt.ema import swap
from ema_ckpt.ema.model.scan import is_state_init

if TYPE_CHECKING:
    from ema_ckpt.ema.manager import ShardedEMA

# What torch puts around `step`; every class' has the same code.
_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
Samples = int | Callable[[], int] | None


class Attachment:
    """The hooks of one manager on its optimizers."""

    def __init__(
        self, ema: ShardedEMA, optimizers: Sequence[torch.optim.Optimizer], samples: Samples
    ) -> None:
        if not optimizers:
            raise UsageError("usage", "attach wants at least one optimizer")
        self._ema = ema
        self._waiting_for = set(optimizers)
        self._optimizers = tuple(dict.fromkeys(optimizers))
        self._samples = samples
        self._dummy: set[torch.optim.Optimizer] = set()  # those inside a dummy step at the moment
        self._handles = []
        # Traced into a compiled step the hooks would break its graph in three.
        before = torch.compiler.disable(self._before)  # type: ignore[no-untyped-call]
        after = torch.compiler.disable(self._after)  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            self._handles += [
                optimizer.register_step_pre_hook(before),
                optimizer.register_step_post_hook(after),
            ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if _is_nested(optimizer):
            return
        swap.refuse_inside(self._ema.model, "a step of the attached optimizer")
        # Only a fresh optimizer is ever initialised, so that the stack need not be looked at on
        # later steps.
        if not optimizer.state and is_state_init():
            self._dummy.add(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if _is_nested(optimizer):
            return
        if optimizer in self._dummy:
            self._dummy.discard(optimizer)
            return
        # A fused optimizer is told to skip by this attribute, which exists only while a scaler
        # drives it.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return
        self._waiting_for.discard(optimizer)
        if not self._waiting_for:
            self._waiting_for = set(self._optimizers)
            self._ema.update(self._samples() if callable(self._samples) else self._samples)


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether these hooks run inside a `step` of the same optimizer: torch hooks the `step` of
    every class, so that one that calls its base class' runs them twice. Counted on the stack, since
    a step may end by raising."""
    steps, frame = 0, sys._getframe(1)
    while frame is not None and steps < 2:
        if frame.f_code is _HOOKED:
            steps += frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return steps > 1
