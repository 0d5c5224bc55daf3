"""Quantised weights in results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ema_ckpt.reading.quantized.schemes import QuantizedTensor


@dataclass(frozen=True, slots=True)
class QuantizedEntry:
    """A weight stored with scales beside it.

    Attributes:
        name: of the weight. scheme: as the reference of schemes lists it.
        shape: of its values. block: values along each dim that share a scale.
        parts: stored names of what holds it, by role: `codes`, `scale`, …
    """

    name: str
    scheme: str
    shape: tuple[int, ...]
    block: tuple[int, ...]
    parts: Mapping[str, str]


def described(weights: Sequence[QuantizedTensor]) -> tuple[QuantizedEntry, ...] | None:
    """Describe quantised weights for a result; None if there are none."""
    entries = []
    for weight in weights:
        layout = weight.layout
        parts = {role: part.name for role, part in weight.parts.items()}
        entry = QuantizedEntry(
            weight.name, weight.scheme, layout.logical_shape, layout.block, parts
        )
        entries.append(entry)
    return tuple(entries) or None
