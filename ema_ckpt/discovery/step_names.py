"""Names of steps: `step_500`, `epoch=1-step=20-v1.ckpt`, `ep0-ba4-rank0.pt`, `0000002000`."""

from __future__ import annotations

import re

from ema_ckpt.core.names import TORCH_SUFFIXES
from ema_ckpt.formats.rank_files.names import family_of

_KEYS = "step checkpoint global_step iter iteration epoch ckpt ep ba".split()
# What Lightning's `{epoch}-{step}-{val_loss:.2f}` puts behind the step.
_METRIC = rf"-(?!(?:{'|'.join(_KEYS)})=)[^-=]+=-?(?:[\d.]+(?:e[-+]?\d+)?|inf|nan)"
# The last key of a name counts; Lightning writes `-v1` where a name is taken.
_KEYED = re.compile(
    rf"(?:^|.*[-_=])(?:{'|'.join(_KEYS)})[-_=]?(\d+)(?:{_METRIC})*(?:-v(\d+))?",
    re.ASCII | re.DOTALL,
)
_PLAIN = re.compile(rf"(?:{'|'.join(_KEYS)}|\d)[-_=]?\d", re.ASCII)
_BARE = re.compile(r"(\d{3,})()", re.ASCII)
_SUFFIXES = sorted((".safetensors", *TORCH_SUFFIXES), key=len, reverse=True)


def split_suffix(name: str) -> tuple[str, str]:
    """Split a name before the ending of a checkpoint file, which may be ""."""
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def label_of(name: str) -> str:
    """Return a name without ending and rank: `ep0-ba4` of `ep0-ba4-rank0.pt` or `…-rank*.pt`."""
    family = family_of(name.replace("*", "0"))
    return family.stem if family else split_suffix(name)[0]


def step_order(name: str) -> tuple[int, int] | None:
    """Parse number and version in the name of a step; steps are sorted by them. None for others."""
    label = label_of(name)
    match = _KEYED.fullmatch(label) or _BARE.fullmatch(label)
    return (int(match[1]), int(match[2] or 0)) if match else None


def is_plain_step(name: str) -> bool:
    """Whether the name of a step begins as such, and not with `best_`, and holds no metric."""
    return _PLAIN.match(name) is not None and re.search(_METRIC, name, re.ASCII) is None


def step_number(name: str) -> int | None:
    """Parse the number in the name of a step (`step_500`, `checkpoint-500`, `epoch=3-step=500`)."""
    order = step_order(name)
    return order[0] if order else None
