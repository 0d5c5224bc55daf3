"""Tables on a terminal; the only module that draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite, prod

from rich.markup import escape
from rich.table import Table
from rich.tree import Tree as Drawn

from ema_ckpt.cli.text import clean, terminal
from ema_ckpt.core.text import counted, format_size
from ema_ckpt.ops.results import InspectResult, TensorEntry, TreeEntry

_MAX_ROWS = 200
_MAX_CHILDREN = 40


def _safe(text: str) -> str:
    return escape(clean(text))


def print_inspected(
    result: InspectResult, tree: str | None, depth: int | None, shards: bool
) -> None:
    """Trees, EMA settings, then modules (to `depth`) or tensors with their shards; all of it, or of
    `tree` alone.
    """
    console = terminal()
    result = result if tree is None else _narrowed(result, tree)
    world = f", saved by {counted(result.world_size, 'rank')}" if result.world_size else ""
    console.print(
        f"[bold]{_safe(result.resolved)}[/bold]: {result.format}, {format_size(result.nbytes)}{world}"
    )
    console.print(_trees(result))
    for name, settings in result.ema.items():
        known = ", ".join(
            f"{key} {_setting(value)}" for key, value in settings.items() if value is not None
        )
        console.print(f"EMA {_safe(repr(name))}: {_safe(known) or 'no settings recorded'}")
    if shards:
        console.print(_shards(result.tensors))
    else:
        console.print(_modules(result, 2 if depth is None else depth))
    if result.objects:
        names = ", ".join(_safe(item.name) for item in result.objects[:20])
        more = f" and {len(result.objects) - 20} more" if len(result.objects) > 20 else ""
        console.print(f"objects: {names}{more}")


def _setting(value: object) -> str:
    """A setting of an EMA; a schedule as the call that makes it."""
    if not isinstance(value, Mapping):
        return str(value)
    kind = "".join(part.capitalize() for part in str(value.get("kind", "schedule")).split("-"))
    return f"{kind}({', '.join(f'{key}={_short(field)}' for key, field in value.items() if key != 'kind')})"


def _short(value: object) -> str:
    """A number with the digits that matter: of a decay, those of its distance to 1."""
    if not isinstance(value, float) or not isfinite(value):
        return repr(value)
    tolerance = 2e-4 * (min(abs(value), abs(1 - value)) or 1)
    digits = next(
        (n for n in range(4, 17) if abs(float(f"{value:.{n}g}") - value) <= tolerance), 17
    )
    return repr(float(f"{value:.{digits}g}"))


def _narrowed(result: InspectResult, tree: str) -> InspectResult:
    """`result`, whose tensors are those of `tree`, with the trees and objects that belong to
    them.
    """
    known = [entry.name for entry in result.trees]
    inside = {tree} if tree in known else {name for name in known if name.startswith(f"{tree}.")}
    owners = inside | {tensor.tree for tensor in result.tensors}
    trees = tuple(entry for entry in result.trees if entry.name in owners)
    settings = {name: found for name, found in result.ema.items() if name in owners}
    if any(
        f".{entry.name}".endswith(f".{tree}") or entry.name.startswith(f"{tree}.")
        for entry in trees
    ):
        objects = tuple(item for item in result.objects if _owner(item.name, known) in owners)
    else:  # a path below a tree
        trees = tuple(_part(entry, tree, result.tensors) for entry in trees)
        objects = tuple(item for item in result.objects if item.name.startswith(f"{tree}."))
    return replace(result, trees=trees, objects=objects, ema=settings)


def _part(whole: TreeEntry, name: str, tensors: tuple[TensorEntry, ...]) -> TreeEntry:
    """The tensors of a part of a tree as a row of its own."""
    numel, nbytes = sum(prod(t.shape) for t in tensors), sum(t.nbytes for t in tensors)
    return TreeEntry(
        name, whole.role, len(tensors), numel, nbytes, Counter(t.dtype for t in tensors)
    )


def _owner(name: str, trees: list[str]) -> str:
    """The tree that an object of this full name is in: the innermost."""
    return max((tree for tree in trees if name.startswith(f"{tree}.")), key=len, default="")


def _trees(result: InspectResult) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("tree", "role", "tensors", "elements", "bytes", "dtypes"):
        table.add_column(
            heading, justify="left" if heading in ("tree", "role", "dtypes") else "right"
        )
    for tree in result.trees:
        dtypes = ", ".join(f"{name} × {count}" for name, count in tree.dtypes.items())
        row = (
            repr(tree.name),
            tree.role,
            str(tree.tensors),
            f"{tree.numel:,}",
            format_size(tree.nbytes),
            dtypes,
        )
        table.add_row(*map(_safe, row))
    return table


def _modules(result: InspectResult, depth: int) -> Drawn:
    """The names as a tree of modules: bytes and tensors below each, to `depth` levels below the
    tree.
    """
    root = Drawn("tensors", hide_root=True)
    drawn: dict[tuple[str, ...], tuple[Drawn, list[int]]] = {}
    for tensor in result.tensors:
        parts = tensor.fqn.split(".")
        for level in range(min(len(parts), depth) + 1):
            key = (tensor.tree, *parts[:level])
            if key not in drawn:
                above = drawn[key[:-1]][0] if level else root
                drawn[key] = (above.add(""), [0, 0])
            totals = drawn[key][1]
            totals[0] += 1
            totals[1] += tensor.nbytes
    for node, _ in [(root, None), *drawn.values()]:
        hidden = len(node.children) - _MAX_CHILDREN
        if hidden > 1:
            del node.children[_MAX_CHILDREN:]
            node.add(f"[dim]… {hidden} more[/dim]")
    for key, (node, (count, nbytes)) in drawn.items():
        name = key[-1] if len(key) > 1 else (key[0] or "(root)")
        what = "" if count == 1 else f"{counted(count, 'tensor')}, "
        node.label = f"{_safe(name)} [dim]{what}{format_size(nbytes)}[/dim]"
    return root


def _shards(tensors: tuple[TensorEntry, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("tensor", "dtype", "shape", "offsets", "sizes", "file"):
        table.add_column(heading)
    for tensor in tensors[:_MAX_ROWS]:
        first = (_safe(tensor.name), tensor.dtype, _dims(tensor.shape))
        for chunk in tensor.chunks:
            table.add_row(*first, _dims(chunk.offsets), _dims(chunk.sizes), _safe(chunk.file))
            first = ("", "", "")
    if len(tensors) > _MAX_ROWS:
        table.add_row(
            f"… {len(tensors) - _MAX_ROWS} more; narrow with --match or --tree, or take --json"
        )
    return table


def _dims(numbers: tuple[int, ...]) -> str:
    return " × ".join(map(str, numbers)) or "scalar"
