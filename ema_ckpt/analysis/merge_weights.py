"""Weights of checkpoints that are merged: those under which the sum stands for a decayed run.

Merging checkpoints of a run at a constant learning rate does what a decay would have done: with
w(x) the share of the learning rate at the share x of the decay, checkpoint i of n, the oldest
first, gets w(i/n) − w((i + 1)/n).

Source: WSM (Tian et al. 2025, arXiv:2507.17634), theorem 3.1; PMA (arXiv:2505.12082) for uniform
and exponential weights. Megatron-LM's `weighted_merge.py` has the same weights for `linear` and
`minus-sqrt`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ema_ckpt.core.errors import UsageError

_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "minus-sqrt": lambda x: 1 - math.sqrt(x),
}

SCHEMES = ("uniform", *_DECAYS, "ema:DECAY")
"""Names of the schemes."""


def merge_weights(scheme: str, count: int) -> list[float]:
    """Return the weights of `count` checkpoints, the oldest first; they sum to 1.

    `uniform` is their mean, and so is `linear`: a linear decay. `ema:0.9` starts an exponential
    average at the oldest and updates it with each of the others.

    Raises:
        UsageError: `usage`: no such scheme, or a decay that is not between 0 and 1.
    """
    name, colon, text = scheme.partition(":")
    if scheme in ("uniform", "linear"):
        return [1 / count] * count
    if scheme in _DECAYS:
        shares = [_DECAYS[scheme](index / count) for index in range(count)]
        return [now - later for now, later in zip(shares, [*shares[1:], 0.0], strict=True)]
    if name == "ema" and colon:
        decay = _parse_decay(text, scheme)
        factors = [1.0, *([1 - decay] * (count - 1))]
        return [factor * decay ** (count - 1 - i) for i, factor in enumerate(factors)]
    raise UsageError("usage", f"--scheme {scheme}: expected one of {', '.join(SCHEMES)}")


def _parse_decay(text: str, scheme: str) -> float:
    try:
        decay = float(text)
    except ValueError:
        decay = math.nan
    if not 0 <= decay < 1:
        message = f"--scheme {scheme}: expected a decay of at least 0 and below 1, as in ema:0.9"
        raise UsageError("usage", message)
    return decay
