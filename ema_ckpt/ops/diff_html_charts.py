"""Charts of a comparison as plain SVG: how tensors are spread over the scale, and curves over a
model's depth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from ema_ckpt.core.text import counted
from ema_ckpt.ops.results import DiffTensor

_WIDTH, _HEIGHT = 760, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 40
_MAX_CURVES = 8
_INDEX = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Curve:
    """Relative L2 over depth of tensors whose names differ in one layer index alone; `label` has a
    `*` for it.
    """

    label: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values in [low, high] to pixels in [start, stop]."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 1)


def curves(tensors: Sequence[DiffTensor]) -> tuple[Curve, ...]:
    """Curves of the names that have most layers, largest difference first."""
    found: dict[str, dict[int, float]] = {}
    for tensor in tensors:
        match = _INDEX.search(tensor.name)
        if match and tensor.rel_l2 > 0:
            label = f"{tensor.name[: match.start(1)]}*{tensor.name[match.end(1) :]}"
            found.setdefault(label, {})[int(match[1])] = tensor.rel_l2
    ranked = sorted(found.items(), key=lambda item: (-len(item[1]), -max(item[1].values())))
    return tuple(
        Curve(label, tuple(sorted(at.items()))) for label, at in ranked[:_MAX_CURVES] if len(at) > 1
    )


def histogram(tensors: Sequence[DiffTensor]) -> str:
    """Number of tensors by the decade of their relative L2, in quarter decades."""
    logs = [math.log10(t.rel_l2) for t in tensors if t.rel_l2 > 0]
    if not logs:
        return ""
    low, high = math.floor(min(logs)), max(math.floor(max(logs)) + 1, math.floor(min(logs)) + 1)
    counts: dict[int, list[str]] = {}
    for tensor in tensors:
        if tensor.rel_l2 > 0:
            counts.setdefault(math.floor((math.log10(tensor.rel_l2) - low) * 4), []).append(
                tensor.name
            )
    most = max(map(len, counts.values()))
    x, y = _Scale(low, high, _LEFT, _WIDTH - _RIGHT), _Scale(0, most, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_axes(x, range(low, high + 1), y, _ticks(most), "relative L2 of a tensor", "tensors")]
    for cell, names in sorted(counts.items()):
        left, right = x(low + cell / 4), x(low + (cell + 1) / 4)
        top = y(len(names))
        about = f"{counted(len(names), 'tensor')}: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"
        parts.append(
            f'<rect class="bar" x="{left + 1}" y="{top}" width="{max(right - left - 2, 1):.1f}" '
            f'height="{y(0) - top:.1f}"><title>{escape(about)}</title></rect>'
        )
    return _svg("Distribution of relative L2 over tensors", parts)


def depth_chart(found: Sequence[Curve]) -> str:
    """One line for each curve, relative L2 on a logarithmic scale over the layer's index."""
    if not found:
        return ""
    depths = [at for curve in found for at, _ in curve.points]
    logs = [math.log10(value) for curve in found for _, value in curve.points]
    low, high = math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1)
    x = _Scale(min(depths), max(*depths, min(depths) + 1), _LEFT + 8, _WIDTH - _RIGHT - 8)
    y = _Scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    step = max(1, -(-(max(depths) - min(depths)) // 12))
    marks = [(at, str(at)) for at in range(min(depths), max(depths) + 1, step)]
    decades = [(at, _decade(at)) for at in range(low, high + 1)]
    parts = [*_frame(x, marks, y, decades, "layer", "relative L2")]
    for number, curve in enumerate(found):
        path = " ".join(f"{x(at)},{y(math.log10(value))}" for at, value in curve.points)
        parts.append(
            f'<polyline class="line s{number}" points="{path}"><title>{escape(curve.label)}</title></polyline>'
        )
        for at, value in curve.points:
            about = escape(f"{curve.label}, layer {at}: {value:.3g}")
            centre = f'cx="{x(at)}" cy="{y(math.log10(value))}"'
            parts.append(
                f'<circle class="dot s{number}" {centre} r="3"><title>{about}</title></circle>'
            )
    return _svg("Relative L2 over depth", parts)


def _decade(exponent: float) -> str:
    return f"{10.0**exponent:g}"


def _ticks(most: int) -> list[int]:
    step = max(1, round(most / 4))
    return list(range(0, most + 1, step))


def _axes(
    x: _Scale, decades: Sequence[int], y: _Scale, counts: Sequence[int], below: str, beside: str
) -> Iterator[str]:
    return _frame(
        x, [(at, _decade(at)) for at in decades], y, [(n, str(n)) for n in counts], below, beside
    )


def _frame(
    x: _Scale,
    across: Sequence[tuple[float, str]],
    y: _Scale,
    upward: Sequence[tuple[float, str]],
    below: str,
    beside: str,
) -> Iterator[str]:
    """Grid lines, tick labels and the names of both axes."""
    base = _HEIGHT - _BOTTOM
    for at, text in upward:
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(at)}" y2="{y(at)}"/>'
        yield f'<text class="tick" x="{_LEFT - 6}" y="{y(at) + 4}" text-anchor="end">{text}</text>'
    for at, text in across:
        yield f'<text class="tick" x="{x(at)}" y="{base + 16}" text-anchor="middle">{text}</text>'
    yield f'<text class="axis" x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{below}</text>'
    middle = (_TOP + base) / 2
    turned = f'transform="rotate(-90 12 {middle})"'
    yield f'<text class="axis" x="12" y="{middle}" text-anchor="middle" {turned}>{beside}</text>'


def _svg(label: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">\n{body}\n</svg>'
