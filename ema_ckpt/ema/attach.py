"""Updates by itself after the optimizer's step, through optimizer hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from ema_ckpt.core.errors import UsageError
from ema_ckpt.ema.model.scan import is_state_init

# The code that torch puts around `step`; every class' is the same.
_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


class Attachment:
    """Optimizer hooks: `before_step` at each step, `update` once all optimizers have stepped."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        before_step: Callable[[], None],
        update: Callable[[], None],
    ) -> None:
        if not optimizers:
            raise UsageError("usage", "attach wants at least one optimizer")
        self._before_step = before_step
        self._update = update
        self._waiting_for = set(optimizers)
        self._optimizers = tuple(dict.fromkeys(optimizers))
        self._in_dummy_step: set[torch.optim.Optimizer] = set()
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
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if _is_nested(optimizer):
            return
        self._before_step()
        # Only a fresh optimizer is ever initialised: the stack need not be searched on later steps.
        if not optimizer.state and is_state_init():
            self._in_dummy_step.add(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if _is_nested(optimizer):
            return
        if optimizer in self._in_dummy_step:
            self._in_dummy_step.discard(optimizer)
            return
        # A scaler makes a fused optimizer skip by this attribute, which exists only meanwhile.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return
        self._waiting_for.discard(optimizer)
        if not self._waiting_for:
            self._waiting_for = set(self._optimizers)
            self._update()


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether these hooks run inside a `step` of the same optimizer.

    torch hooks the `step` of every class, so that one that calls its base class' runs them twice.
    """
    # Counted on the stack, since a step may end by raising.
    steps = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and steps < 2:
        if frame.f_code is _HOOKED:
            steps += frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1
