"""Quantised weights in results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
