"""A comparison on a terminal: findings, the tree of modules with a bar each, the tensors that
differ most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.markup import escape
from rich.tree import Tree as Drawn

from ema_ckpt.analysis.compare import PairStats
from ema_ckpt.cli.text import clean, terminal
from ema_ckpt.core.text import counted
from ema_ckpt.ops.diff_findings import Compared
from ema_ckpt.ops.results import DiffResult, DiffTensor

_DEPTH = 3
_MAX_CHILDREN = 40
_BAR_CELLS = 20
_INFORMATION = ("ema-partial",)


def print_diff(result: DiffResult, compared: Compared, top: int) -> None:
    """Print a summary, the findings, the modules and the `top` tensors by relative difference."""
    console = terminal()
    console.print(f"a: tree {_safe(repr(result.tree_a))} of {_safe(result.a)}")
    console.print(f"b: tree {_safe(repr(result.tree_b))} of {_safe(result.b)}")
    console.print(_summary(result))
    for finding in result.findings:
        colour = "cyan" if finding.code in _INFORMATION else "yellow"
        console.print(f"[{colour}]{finding.code}[/{colour}]: {_safe(finding.message)}")
    for mismatch in result.mismatched[:top]:
        shapes = f"{list(mismatch.a.shape)} and {list(mismatch.b.shape)}"
        console.print(f"shapes differ: {_safe(mismatch.name)} {escape(shapes)}")
    if result.compared and result.identical < result.compared:
        console.print(_modules(compared))
        for line in _top(result.tensors, top):
            console.print(line)


def _safe(text: str) -> str:
    return escape(clean(text))


def _summary(result: DiffResult) -> str:
    numel = sum(tensor.numel for tensor in result.tensors)
    summary = result.summary
    parts = [
        f"[bold]{counted(result.compared, 'tensor')}[/bold] compared, {result.identical} identical",
        f"relative L2 {_number(summary.rel_l2)}",
        f"max |a-b| {_number(summary.max_abs)}",
        f"cosine {_cosine(summary.cosine)}",
        f"{summary.changed:,} of {counted(numel, 'element')} changed",
    ]
    if result.mismatched or result.only_in_a or result.only_in_b:
        sides = (
            f"{counted(len(result.only_in_a), 'name')} only in a, {len(result.only_in_b)} only in b"
        )
        parts.append(
            f"{counted(len(result.mismatched), 'shape differs', 'shapes differ')}, {sides}"
        )
    return "; ".join(parts)


def _number(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.3g}"


def _cosine(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.6f}"


@dataclass(slots=True)
class _Module:
    """A node of the tree of names: the pairs below it, and the next components."""

    sums: list[PairStats] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)

    @property
    def rel_l2(self) -> float:
        return PairStats.total(self.sums).rel_l2


def _module_tree(compared: Compared) -> _Module:
    root = _Module()
    for name, sums in compared.sums.items():
        node = root
        node.sums.append(sums)
        for part in name.split("."):
            node = node.children.setdefault(part, _Module())
            node.sums.append(sums)
    return root


def _modules(compared: Compared) -> Drawn:
    """Relative L2 of each module, to a depth, with a bar on a logarithmic scale."""
    root = _module_tree(compared)
    shown = [("all", root, 0), *_walk(root, 1)]
    bars = _Bars([node.rel_l2 for _, node, _ in shown if node.rel_l2 > 0])
    drawn: list[Drawn] = []
    for name, node, depth in shown:
        value = node.rel_l2
        what = f" [dim]{counted(len(node.sums), 'tensor')}[/dim]" if len(node.sums) > 1 else ""
        label = f"{bars.draw(value)} {_number(value):>9} {_safe(name)}{what}"
        del drawn[depth:]
        drawn.append(drawn[-1].add(label) if drawn else Drawn(label))
    return drawn[0]


def _walk(module: _Module, depth: int) -> Iterator[tuple[str, _Module, int]]:
    """What lies below a module, in order; a chain of only children is one line."""
    for count, (part, child) in enumerate(module.children.items()):
        if count == _MAX_CHILDREN:
            rest = list(module.children.values())[count:]
            sums = [sums for other in rest for sums in other.sums]
            yield f"… {len(rest)} more", _Module(sums), depth
            return
        name, node = part, child
        while len(node.children) == 1:
            ((below, node),) = node.children.items()
            name = f"{name}.{below}"
        yield name, node, depth
        if depth < _DEPTH:
            yield from _walk(node, depth + 1)


class _Bars:
    """Bars for positive numbers on a logarithmic scale."""

    def __init__(self, values: Sequence[float]) -> None:
        logs = [math.log10(value) for value in values]
        self._low = min(logs, default=0.0) - 0.2
        self._span = max(max(logs, default=0.0) - self._low, 1e-9)

    def draw(self, value: float) -> str:
        """A bar of fixed width; none for zero and for what is undefined."""
        share = (math.log10(value) - self._low) / self._span if value > 0 else 0.0
        cells = max(round(share * _BAR_CELLS), int(value > 0))
        return f"[blue]{'█' * cells}[/blue]{' ' * (_BAR_CELLS - cells)}"


_HEADINGS = ("rel L2", "max |a-b|", "mean |a-b|", "cosine", "changed", "NaN, Inf of a", "of b")


def _top(tensors: Sequence[DiffTensor], top: int) -> Iterator[str]:
    """Aligned lines, the names last and in full. What is undefined comes first: one side holds NaN
    or Inf.
    """
    ranked = sorted(
        tensors, key=lambda t: math.inf if math.isnan(t.rel_l2) else t.rel_l2, reverse=True
    )
    rows = [_HEADINGS, *map(_cells, ranked[: max(top, 0)])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells, name in zip(
        rows, ["tensor", *(_safe(tensor.name) for tensor in ranked)], strict=False
    ):
        line = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        yield f"[dim]{line}  {name}[/dim]" if cells is _HEADINGS else f"{line}  {name}"


def _cells(tensor: DiffTensor) -> tuple[str, ...]:
    return (
        _number(tensor.rel_l2),
        _number(tensor.max_abs),
        _number(tensor.mean_abs),
        _cosine(tensor.cosine),
        f"{tensor.changed / tensor.numel:.1%}" if tensor.numel else "-",
        f"{tensor.nan_a}, {tensor.inf_a}",
        f"{tensor.nan_b}, {tensor.inf_b}",
    )
