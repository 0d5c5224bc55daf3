"""Ready-made sources: what to average in place of the parameters themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ema_ckpt.core.errors import StateError
from ema_ckpt.ema.settings import Source

# Transformer Engine's FusedAdam, and names in common use.
_STATE_KEYS = (
    "master_param",
    "master_weight",
    "master_weights",
    "master",
    "fp32_param",
    "main_param",
)


def master_weights(optimizer: torch.optim.Optimizer) -> Source:
    """A source that gives the float32 master weights that an optimizer keeps beside low-precision
    parameters.

    They are looked for in the optimizer's state of the parameter (`master_param` and the like), in
    apex's `param_groups_master`, and as the parameter's attribute `main_param` (Megatron). Before
    the first step, when there are none yet, the parameter itself is averaged. Under FSDP1 without
    original parameters they are the masters of flat parameters, of which each name gets its piece.

    Raises:
        StateError: (from the source) the optimizer has stepped the parameter and keeps no such
            weights.
    """

    def source(fqn: str, param: torch.Tensor) -> torch.Tensor | None:
        state: Mapping[str, Any] = optimizer.state.get(param, {})
        for value in (
            *(state.get(key) for key in _STATE_KEYS),
            _apex_master(optimizer, param),
            _attribute(param),
        ):
            if isinstance(value, torch.Tensor):
                return value
        if state:
            raise StateError(
                "usage",
                f"{type(optimizer).__name__} keeps no master weights of {fqn!r}: its state has {sorted(state)};"
                " leave source out, or write one that knows where they are",
            )
        return None

    return source


def _attribute(param: torch.Tensor) -> object:
    return getattr(param, "main_param", None)


def _apex_master(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> object:
    """apex keeps masters in groups that run parallel to `param_groups`."""
    for group, masters in zip(
        optimizer.param_groups, getattr(optimizer, "param_groups_master", ()), strict=False
    ):
        for own, master in zip(group["params"], masters["params"], strict=False):
            if own is param:
                return master
    return None
