"""Tables of `diff`: findings, relative L2 of each module as a bar, tensors that differ most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from rich.markup import escape

from ema_ckpt.analysis.compare import PairStats
from ema_ckpt.cli.name_columns import elide, wrap
from ema_ckpt.cli.output import clean, markup, terminal
from ema_ckpt.core.text import counted
from ema_ckpt.ops.results.diff import DiffResult, DiffTensor
from ema_ckpt.ops.results.quantized import QuantizedEntry

_DEPTH = 3
_MAX_CHILDREN = 40
_BAR_CELLS = 20
_NUMBERS_WIDTH = 26  # right of the bar: the value, and how many tensors
_INFORMATION = ("ema-partial",)
_HEADINGS = (
    "rel L2",
    "max |a-b|",
    "mean |a-b|",
    "cosine",
    "changed",
    "NaN, Inf of a",
    "NaN, Inf of b",
)
_NO_VALUES = "0, 0"


def print_diff(result: DiffResult, top: int) -> None:
    """Print a summary, the findings, the modules and the `top` tensors by relative L2."""
    console = terminal()
    a, b = _as_values(result.dequantized_a), _as_values(result.dequantized_b)
    console.print(f"a: tree {markup(repr(result.tree_a))} of {markup(result.resolved_a)}{a}")
    console.print(f"b: tree {markup(repr(result.tree_b))} of {markup(result.resolved_b)}{b}")
    console.print(wrap(summary_line(result), console.width))
    for finding in result.findings:
        colour = "cyan" if finding.code in _INFORMATION else "yellow"
        text = wrap(f"{finding.code}: {clean(finding.message)}", console.width)
        console.print(f"[{colour}]{finding.code}[/{colour}]{escape(text[len(finding.code) :])}")
    for mismatch in result.mismatched[:top]:
        shapes = f"{list(mismatch.a.shape)} and {list(mismatch.b.shape)}"
        console.print(f"shapes differ: {markup(mismatch.name)} {escape(shapes)}")
    if result.compared and result.identical < result.compared:
        for line in module_table(result, console.width):
            console.print(line)
        console.print()
        for line in top_lines(result.tensors, top, console.width):
            console.print(line)


def _as_values(weights: Sequence[QuantizedEntry] | None) -> str:
    """Say that quantised weights were compared as values, and of which schemes."""
    if not weights:
        return ""
    schemes = ", ".join(dict.fromkeys(weight.scheme for weight in weights))
    return f"; {counted(len(weights), 'quantised weight')} ({schemes}) as values"


def summary_line(result: DiffResult) -> str:
    """Return counts in one line, and totals if there is a pair."""
    summary = result.summary
    numel = sum(tensor.numel for tensor in result.tensors)
    parts = ["no tensor compared"]
    if result.compared:
        parts = [
            f"{counted(result.compared, 'tensor')} compared, {_identical(result)}",
            f"relative L2 {_number(summary.rel_l2)}",
            f"max |a-b| {_number(summary.max_abs)}",
            f"cosine {_number(summary.cosine, '.6f')}",
            f"{summary.changed:,} of {counted(numel, 'element')} changed",
        ]
    if result.mismatched or result.only_in_a or result.only_in_b:
        shapes = counted(len(result.mismatched), "shape differs", "shapes differ")
        names = counted(len(result.only_in_a), "name")
        parts.append(f"{shapes}, {names} only in a, {len(result.only_in_b)} only in b")
    return "; ".join(parts)


def _identical(result: DiffResult) -> str:
    """Count the pairs of equal values, and those whose bytes or types differ all the same."""
    if result.same_bits is None:
        return f"{result.identical} identical"
    others = result.identical - result.same_bits
    return f"{result.identical} identical in value, {others} of them not in bits or dtype"


def _number(value: float, digits: str = ".3g") -> str:
    return "undefined" if math.isnan(value) else format(value, digits)


@dataclass(slots=True)
class _Module:
    """Node of the tree of names: statistics of the pairs below it, and its children."""

    stats: list[PairStats] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)


def module_table(result: DiffResult, width: int) -> Iterator[str]:
    """Yield relative L2 of each module, to a depth: name, bar on a logarithmic scale, number."""
    root = _Module()
    for name, stats in result.pair_stats.items():
        node = root
        node.stats.append(stats)
        for part in name.split("."):
            node = node.children.setdefault(part, _Module())
            node.stats.append(stats)
    rows = [("all", root, 0), *_rows(root, 1)]
    values = [PairStats.total(node.stats).rel_l2 for _, node, _ in rows]
    low, high = _scale(values)
    room = max(width - _BAR_CELLS - _NUMBERS_WIDTH, 20)
    names = elide([f"{'  ' * depth}{clean(name)}" for name, _, depth in rows], room)
    column = max(map(len, names))
    scale = f"relative L2, bars from {10**low:.1g} to {10**high:.1g}, logarithmic"
    yield f"[dim]{'module'.ljust(column)}  {scale}[/dim]"
    for name, (_, node, _), value in zip(names, rows, values, strict=True):
        cells = 0
        if value > 0:
            position = (math.log10(value) - low) / (high - low)
            cells = max(round(position * _BAR_CELLS), 1)
        bar = f"[blue]{'█' * cells}[/blue]{'·' * (_BAR_CELLS - cells)}"
        count = ""
        if len(node.stats) > 1:
            count = f" [dim]{counted(len(node.stats), 'tensor')}[/dim]"
        yield f"{escape(name.ljust(column))}  {bar} {_number(value):>9}{count}"


def _scale(values: Sequence[float]) -> tuple[float, float]:
    """Return the decades, as powers of ten, that the bars span: at least one."""
    logs = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
    low = math.floor(min(logs, default=0.0) - 0.05)
    return low, max(math.ceil(max(logs, default=0.0)), low + 1)


def _rows(module: _Module, depth: int) -> Iterator[tuple[str, _Module, int]]:
    """Yield the modules below one, in order; a chain of only children is one row."""
    for count, (name, child) in enumerate(module.children.items()):
        if count == _MAX_CHILDREN:
            rest = list(module.children.values())[count:]
            stats = list(chain.from_iterable(other.stats for other in rest))
            yield f"… {len(rest)} more", _Module(stats), depth
            return
        path, node = name, child
        while len(node.children) == 1:
            ((part, node),) = node.children.items()
            path = f"{path}.{part}"
        yield path, node, depth
        if depth < _DEPTH:
            yield from _rows(node, depth + 1)


def top_lines(tensors: Sequence[DiffTensor], top: int, width: int) -> Iterator[str]:
    """Yield aligned rows, the name left; undefined values come first, as one side holds NaN or Inf.

    Columns in which every row is zero are left out.
    """
    ranked = sorted(
        tensors, key=lambda t: math.inf if math.isnan(t.rel_l2) else t.rel_l2, reverse=True
    )[: max(top, 0)]
    if not ranked:
        return
    columns, widths = [], []
    for column in zip(_HEADINGS, *map(_cells, ranked), strict=True):
        if set(column[1:]) != {_NO_VALUES}:
            columns.append(column)
            widths.append(max(map(len, column)))
    names = elide([clean(t.name) for t in ranked], width - sum(widths) - 2 * len(widths))
    names = ["tensor", *names]
    name_width = max(map(len, names))
    for index, name in enumerate(names):
        cells = [texts[index].rjust(size) for texts, size in zip(columns, widths, strict=True)]
        line = escape("  ".join([name.ljust(name_width), *cells]))
        yield line if index else f"[dim]{line}[/dim]"


def _cells(tensor: DiffTensor) -> tuple[str, ...]:
    return (
        _number(tensor.rel_l2),
        _number(tensor.max_abs),
        _number(tensor.mean_abs),
        _number(tensor.cosine, ".6f"),
        f"{tensor.changed / tensor.numel:.1%}" if tensor.numel else "-",
        f"{tensor.nan_a}, {tensor.inf_a}",
        f"{tensor.nan_b}, {tensor.inf_b}",
    )
