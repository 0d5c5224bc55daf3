"""SVG charts of a comparison: a histogram of relative L2, and curves over a model's depth."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain

from ema_ckpt.core.display import inert
from ema_ckpt.core.text import counted
from ema_ckpt.ops.results.diff import DiffTensor

_WIDTH, _HEIGHT = 760, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 12, 12, 52
_BASE = _HEIGHT - _BOTTOM
MAX_CURVES = 8
_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Curve:
    """Relative L2 over the layers of one kind of tensor; `label` has a `*` for the layer index."""

    label: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Linear map from values in [low, high] to pixels in [start, stop]."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 1)


def curves(tensors: Sequence[DiffTensor]) -> tuple[Curve, ...]:
    """Return a curve for each kind of tensor: those with most layers first, then by difference."""
    layers: dict[str, dict[int, float]] = {}
    for tensor in tensors:
        match = _LAYER.search(tensor.name)
        if match and tensor.rel_l2 > 0:
            label = f"{tensor.name[: match.start(1)]}*{tensor.name[match.end(1) :]}"
            layers.setdefault(label, {})[int(match[1])] = tensor.rel_l2
    ranked = sorted(layers.items(), key=lambda item: (-len(item[1]), -max(item[1].values())))
    return tuple(
        Curve(label, tuple(sorted(points.items()))) for label, points in ranked if len(points) > 1
    )


def histogram(tensors: Sequence[DiffTensor]) -> str:
    """Return a chart of the number of tensors by relative L2, in quarter decades."""
    logs = {t.name: math.log10(t.rel_l2) for t in tensors if t.rel_l2 > 0}
    if not logs:
        return ""
    low = math.floor(min(logs.values()))
    high = max(math.floor(max(logs.values())) + 1, low + 1)
    bins: dict[int, list[str]] = {}
    for name, log in logs.items():
        bins.setdefault(math.floor((log - low) * 4), []).append(name)
    most = max(map(len, bins.values()))
    x, y = _Scale(low, high, _LEFT, _WIDTH - _RIGHT), _Scale(0, most, _BASE, _TOP)
    counts = [(n, str(n)) for n in range(0, most + 1, max(1, round(most / 4)))]
    parts = [*_axes(x, _decades(low, high), y, counts, "relative L2 of a tensor", "tensors")]
    for index, names in sorted(bins.items()):
        left, right = x(low + index / 4), x(low + (index + 1) / 4)
        top = y(len(names))
        more = " …" if len(names) > 5 else ""
        about = escape(inert(f"{counted(len(names), 'tensor')}: {', '.join(names[:5])}{more}"))
        parts.append(
            f'<rect class="bar" x="{left + 1}" y="{top}" width="{max(right - left - 2, 1):.1f}" '
            f'height="{y(0) - top:.1f}"><title>{about}</title></rect>'
        )
    return _svg("Distribution of relative L2 over tensors", parts)


def depth_chart(lines: Sequence[Curve]) -> str:
    """Return a chart of at most MAX_CURVES curves, relative L2 on a logarithmic scale."""
    if not lines:
        return ""
    layers, logs = [], []
    for layer, value in chain.from_iterable(curve.points for curve in lines):
        layers.append(layer)
        logs.append(math.log10(value))
    low, first = math.floor(min(logs)), min(layers)
    high, last = max(math.ceil(max(logs)), low + 1), max(layers)
    x = _Scale(first, max(last, first + 1), _LEFT + 8, _WIDTH - _RIGHT - 8)
    y = _Scale(low, high, _BASE, _TOP)
    step = max(1, -(-(last - first) // 12))
    marks = [(layer, str(layer)) for layer in range(first, last + 1, step)]
    parts = [*_axes(x, marks, y, _decades(low, high), "layer", "relative L2")]
    for number, curve in enumerate(lines):
        label = escape(inert(curve.label))
        places = [(layer, value, x(layer), y(math.log10(value))) for layer, value in curve.points]
        path = " ".join(f"{across},{up}" for _, _, across, up in places)
        line = f'<polyline class="line s{number}" points="{path}">'
        parts.append(f"{line}<title>{label}</title></polyline>")
        for layer, value, across, up in places:
            dot = f'<circle class="dot s{number}" cx="{across}" cy="{up}" r="3">'
            parts.append(f"{dot}<title>{label}, layer {layer}: {value:.3g}</title></circle>")
    return _svg("Relative L2 over depth", parts)


def _decades(low: int, high: int) -> list[tuple[int, str]]:
    return [(exponent, f"{10.0**exponent:g}") for exponent in range(low, high + 1)]


def _axes(
    x: _Scale,
    x_ticks: Sequence[tuple[int, str]],
    y: _Scale,
    y_ticks: Sequence[tuple[int, str]],
    x_label: str,
    y_label: str,
) -> Iterator[str]:
    """Yield grid lines, tick labels and the names of both axes."""
    for value, text in y_ticks:
        up = y(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up}" y2="{up}"/>'
        yield f'<text class="tick" x="{_LEFT - 6}" y="{up + 4}" text-anchor="end">{text}</text>'
    for value, text in x_ticks:
        place = f'x="{x(value)}" y="{_BASE + 20}"'
        yield f'<text class="tick" {place} text-anchor="middle">{text}</text>'
    place = f'x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}"'
    yield f'<text class="axis" {place} text-anchor="middle">{x_label}</text>'
    middle = (_TOP + _BASE) / 2
    place = f'x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})"'
    yield f'<text class="axis" {place}>{y_label}</text>'


def line_sample(number: int) -> str:
    """Return what a curve looks like, for the legend."""
    line = f'<line class="line s{number}" x1="0" x2="36" y1="5" y2="5"/>'
    return f'<svg class="sample" viewBox="0 0 36 10" aria-hidden="true">{line}</svg>'


def _svg(label: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">\n{body}\n</svg>'
