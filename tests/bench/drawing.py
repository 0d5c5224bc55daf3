"""A line drawing as SVG: speed over workers, both on a scale of doublings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 760, 470
LEFT, TOP, RIGHT, BOTTOM = 60, 50, 250, 60
COLOURS = (
    "#1f6feb",
    "#d1242f",
    "#1a7f37",
    "#8250df",
    "#bf8700",
    "#0e7490",
    "#bc4c00",
    "#57606a",
    "#a40e6b",
)


class Curve(NamedTuple):
    """A name, its (workers, times as fast) points, and whether it is somebody else's."""

    name: str
    points: Sequence[tuple[int, float]]
    is_rival: bool = False


class _Scale(NamedTuple):
    """Places of values from `low` to `high` between two pixels, by logarithms."""

    low: float
    high: float
    first: float
    last: float

    def at(self, value: float) -> float:
        """Return the pixel of a value; what lies outside is put at the edge."""
        span = math.log2(self.high / self.low) or 1.0
        share = math.log2(min(max(value, self.low), self.high) / self.low) / span
        return self.first + share * (self.last - self.first)


def draw(curves: Sequence[Curve], workers: Sequence[int], machine: str) -> str:
    """Return the drawing; a dotted line is the limit: as many times as fast as there are workers."""
    values = [value for curve in curves for _, value in curve.points]
    low = 2.0 ** math.floor(math.log2(min([1.0, *values])))
    high = 2.0 ** math.ceil(math.log2(max([2.0, workers[-1], *values])))
    x = _Scale(workers[0], max(workers[-1], 2 * workers[0]), LEFT, WIDTH - RIGHT)
    y = _Scale(low, high, HEIGHT - BOTTOM, TOP)
    limit = [(count, count / workers[0]) for count in workers]
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img" font-family="sans-serif">',
        "<title>Speed over workers</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 22, "times as fast as with one worker", 14),
        *_axes(x, y, workers),
        _line(limit, x, y, "#8c959f", "2 5"),
        _text(LEFT, HEIGHT - 8, machine, 8),
    ]
    room = (HEIGHT - TOP - BOTTOM) / (len(curves) + 1)
    for index, curve in enumerate([*curves, Curve("limit: as many as workers", limit, True)]):
        is_limit = index == len(curves)
        colour = "#8c959f" if is_limit else COLOURS[index % len(COLOURS)]
        dashes = "2 5" if is_limit else "7 4" if curve.is_rival else ""
        if not is_limit:
            parts.append(_line(curve.points, x, y, colour, dashes))
        parts += _legend(curve, TOP + 10 + index * min(room, 22), colour, dashes)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(x: _Scale, y: _Scale, workers: Sequence[int]) -> list[str]:
    parts = []
    value = y.low
    while value <= y.high:
        place = y.at(value)
        parts.append(f'<path d="M{LEFT} {place:.1f}H{WIDTH - RIGHT}" stroke="#d8dee4"/>')
        parts.append(_text(LEFT - 8, place + 4, f"{value:g}", 12, "end"))
        value *= 2
    for count in workers:
        place = x.at(count)
        parts.append(f'<path d="M{place:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#d8dee4"/>')
        parts.append(_text(place, HEIGHT - BOTTOM + 18, str(count), 12, "middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - BOTTOM + 36, "workers", 12, "middle"))
    return parts


def _line(
    points: Sequence[tuple[float, float]], x: _Scale, y: _Scale, colour: str, dashes: str
) -> str:
    path = "L".join(f"{x.at(count):.1f} {y.at(value):.1f}" for count, value in points)
    style = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{style}/>'


def _legend(curve: Curve, place: float, colour: str, dashes: str) -> list[str]:
    start = WIDTH - RIGHT + 14
    style = f' stroke-dasharray="{dashes}"' if dashes else ""
    line = f'<path d="M{start} {place:.1f}h26" stroke="{colour}" stroke-width="2"{style}/>'
    last = f" ({curve.points[-1][1]:.1f})" if curve.points else ""
    return [line, _text(start + 32, place + 4, curve.name + last, 11)]


def _text(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="#24292f">{escape(text)}</text>'
