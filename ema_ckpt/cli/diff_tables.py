"""Tables of `diff`: findings, relative L2 of each module with a bar, tensors that differ most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.markup import escape
from rich.tree import Tree as RichTree

from ema_ckpt.analysis.compare import PairStats
from ema_ckpt.cli.output import markup, terminal
from ema_ckpt.core.text import counted
from ema_ckpt.ops.results.diff import DiffResult, DiffTensor

_DEPTH = 3
_MAX_CHILDREN = 40
_BAR_CELLS = 20
_INFORMATION = ("ema-partial",)
_HEADINGS = ("rel L2", "max |a-b|", "mean |a-b|", "cosine", "changed", "NaN, Inf of a", "of b")


def print_diff(result: DiffResult, top: int) -> None:
    """Print a summary, the findings, the modules and the `top` tensors by relative L2."""
    console = terminal()
    console.print(f"a: tree {markup(repr(result.tree_a))} of {markup(result.resolved_a)}")
    console.print(f"b: tree {markup(repr(result.tree_b))} of {markup(result.resolved_b)}")
    console.print(summary_line(result))
    for finding in result.findings:
        colour = "cyan" if finding.code in _INFORMATION else "yellow"
        console.print(f"[{colour}]{finding.code}[/{colour}]: {markup(finding.message)}")
    for mismatch in result.mismatched[:top]:
        shapes = f"{list(mismatch.a.shape)} and {list(mismatch.b.shape)}"
        console.print(f"shapes differ: {markup(mismatch.name)} {escape(shapes)}")
    if result.compared and result.identical < result.compared:
        console.print(module_tree(result))
        for line in top_lines(result.tensors, top):
            console.print(line)


def summary_line(result: DiffResult) -> str:
    """Return counts and totals in one line."""
    summary = result.summary
    numel = sum(tensor.numel for tensor in result.tensors)
    parts = [
        f"[bold]{counted(result.compared, 'tensor')}[/bold] compared, {result.identical} identical",
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


def _number(value: float, digits: str = ".3g") -> str:
    return "undefined" if math.isnan(value) else format(value, digits)


@dataclass(slots=True)
class _Module:
    """Node of the tree of names: statistics of the pairs below it, and its children."""

    stats: list[PairStats] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)


def module_tree(result: DiffResult) -> RichTree:
    """Return relative L2 of each module, to a depth, with a bar on a logarithmic scale."""
    root = _Module()
    for name, stats in result.pair_stats.items():
        node = root
        node.stats.append(stats)
        for part in name.split("."):
            node = node.children.setdefault(part, _Module())
            node.stats.append(stats)
    rows = [("all", root, 0), *_rows(root, 1)]
    values = [PairStats.total(node.stats).rel_l2 for _, node, _ in rows]
    logs = [math.log10(value) for value in values if value > 0]
    low = min(logs, default=0.0) - 0.2
    span = max(max(logs, default=0.0) - low, 1e-9)
    branch: list[RichTree] = []
    for (name, node, depth), value in zip(rows, values, strict=True):
        cells = max(round((math.log10(value) - low) / span * _BAR_CELLS), 1) if value > 0 else 0
        label = f"[blue]{'█' * cells}[/blue]{' ' * (_BAR_CELLS - cells)}"
        label += f" {_number(value):>9} {markup(name)}"
        if len(node.stats) > 1:
            label += f" [dim]{counted(len(node.stats), 'tensor')}[/dim]"
        del branch[depth:]
        branch.append(branch[-1].add(label) if branch else RichTree(label))
    return branch[0]


def _rows(module: _Module, depth: int) -> Iterator[tuple[str, _Module, int]]:
    """Yield the modules below one, in order; a chain of only children is one row."""
    for count, (name, child) in enumerate(module.children.items()):
        if count == _MAX_CHILDREN:
            rest = list(module.children.values())[count:]
            stats = [stats for other in rest for stats in other.stats]
            yield f"… {len(rest)} more", _Module(stats), depth
            return
        path, node = name, child
        while len(node.children) == 1:
            ((part, node),) = node.children.items()
            path = f"{path}.{part}"
        yield path, node, depth
        if depth < _DEPTH:
            yield from _rows(node, depth + 1)


def top_lines(tensors: Sequence[DiffTensor], top: int) -> Iterator[str]:
    """Yield aligned rows; undefined values come first, as one side holds NaN or Inf."""
    ranked = sorted(
        tensors, key=lambda t: math.inf if math.isnan(t.rel_l2) else t.rel_l2, reverse=True
    )[: max(top, 0)]
    rows = [_HEADINGS, *map(_cells, ranked)]
    names = ["tensor", *(markup(tensor.name) for tensor in ranked)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, name in zip(rows, names, strict=True):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        line = "  ".join([*cells, name])
        yield f"[dim]{line}[/dim]" if row is _HEADINGS else line


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
