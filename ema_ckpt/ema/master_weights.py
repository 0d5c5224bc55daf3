"""Ready-made sources: tensors to average in place of the parameters themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ema_ckpt.core.errors import StateError
from ema_ckpt.ema.settings import Source

# Transformer Engine's FusedAdam, and names in common use.
_STATE_KEYS = "master_param master_weight master_weights master fp32_param main_param".split()


def master_weights(optimizer: torch.optim.Optimizer) -> Source:
    """Make a source of the float32 master weights that an optimizer keeps beside its parameters.

    They are looked for in the optimizer's state of the parameter (`master_param` and the like), in
    apex's `param_groups_master`, and as the parameter's attribute `main_param` (Megatron). Before
    the first step, when there are none yet, the parameter itself is averaged. Under FSDP1 without
    original parameters they are the masters of flat parameters, of which each name gets its piece.

    Raises:
        StateError: (from the source) the optimizer has stepped the parameter and keeps no such
            weights.
    """

    def source(fqn: str, param: torch.Tensor) -> torch.Tensor | None:
        for value in _candidates(optimizer, param):
            if isinstance(value, torch.Tensor):
                return value
        state = optimizer.state.get(param, {})
        if state:
            raise StateError(
                "usage",
                f"{type(optimizer).__name__} keeps no master weights of {fqn!r}: its state has"
                f" {sorted(state)}; leave source out, or write one that knows where they are",
            )
        return None

    return source


def _candidates(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> Iterator[Any]:
    state = optimizer.state.get(param, {})
    yield from (state.get(key) for key in _STATE_KEYS)
    # apex keeps masters in groups that run parallel to `param_groups`.
    masters = getattr(optimizer, "param_groups_master", ())
    for group, master_group in zip(optimizer.param_groups, masters, strict=False):
        for other, master in zip(group["params"], master_group["params"], strict=False):
            if other is param:
                yield master
    yield getattr(param, "main_param", None)
