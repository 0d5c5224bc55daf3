"""Tables of `inspect`: trees, EMA settings, modules or shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite, prod

from rich.table import Table
from rich.tree import Tree as RichTree

from ema_ckpt.cli.output import markup, terminal
from ema_ckpt.core.text import counted, format_size
from ema_ckpt.ops.results.inspect import InspectResult, TensorEntry, TreeEntry

_MAX_ROWS = 200
_MAX_CHILDREN = 40


def print_inspected(result: InspectResult, tree: str | None, depth: int, shards: bool) -> None:
    """Print trees, EMA settings, then modules (to `depth`) or shards; of `tree` alone if given."""
    console = terminal()
    if tree is not None:
        result = narrow(result, tree)
    size = f"{result.format}, {format_size(result.nbytes)}"
    world = f", saved by {counted(result.world_size, 'rank')}" if result.world_size else ""
    console.print(f"[bold]{markup(result.resolved)}[/bold]: {size}{world}")
    console.print(tree_table(result))
    for name, settings in result.ema.items():
        recorded = {key: value for key, value in settings.items() if value is not None}
        text = ", ".join(f"{key} {_setting(value)}" for key, value in recorded.items())
        text = markup(text) or "no settings recorded"
        console.print(f"EMA {markup(repr(name))}: {text}")
    if shards:
        console.print(shard_table(result.tensors))
    else:
        console.print(module_tree(result, depth))
    if result.objects:
        names = ", ".join(markup(item.name) for item in result.objects[:20])
        more = f" and {len(result.objects) - 20} more" if len(result.objects) > 20 else ""
        console.print(f"objects: {names}{more}")


def _setting(value: object) -> str:
    """Format a setting of an EMA; a schedule as the call that makes it."""
    if not isinstance(value, Mapping):
        return str(value)
    kind = "".join(part.capitalize() for part in str(value.get("kind", "schedule")).split("-"))
    fields = [f"{key}={_short(field)}" for key, field in value.items() if key != "kind"]
    return f"{kind}({', '.join(fields)})"


def _short(value: object) -> str:
    """Format a number with its significant digits; of a decay, those of its distance to 1."""
    if not isinstance(value, float) or not isfinite(value):
        return repr(value)
    tolerance = 2e-4 * (min(abs(value), abs(1 - value)) or 1)
    for digits in range(4, 17):
        rounded = float(f"{value:.{digits}g}")
        if abs(rounded - value) <= tolerance:
            return repr(rounded)
    return repr(value)


def narrow(result: InspectResult, tree: str) -> InspectResult:
    """Reduce `result`, whose tensors are those of `tree`, to its trees, settings and objects."""
    owners = owning_trees(result, tree)
    trees = tuple(entry for entry in result.trees if entry.name in owners)
    settings = {name: values for name, values in result.ema.items() if name in owners}
    if any(is_path_of(tree, entry.name) for entry in trees):
        objects = tuple(o for o in result.objects if owner_of(o.name, result.trees) in owners)
    else:  # a path below a tree
        trees = tuple(row_of_part(entry, tree, result.tensors) for entry in trees)
        objects = tuple(o for o in result.objects if o.name.startswith(f"{tree}."))
    return replace(result, trees=trees, objects=objects, ema=settings)


def owning_trees(result: InspectResult, tree: str) -> set[str]:
    """Return the names of the trees that `tree` is, contains, or lies in."""
    names = [entry.name for entry in result.trees]
    owners = {tensor.tree for tensor in result.tensors}
    if tree in names:
        return owners | {tree}
    return owners | {name for name in names if name.startswith(f"{tree}.")}


def is_path_of(path: str, name: str) -> bool:
    """Check whether a path is a tree's name, its last components, or a prefix of it."""
    return f".{name}".endswith(f".{path}") or name.startswith(f"{path}.")


def owner_of(name: str, trees: tuple[TreeEntry, ...]) -> str:
    """Return the innermost tree that an object of this full name is in."""
    owners = [tree.name for tree in trees if name.startswith(f"{tree.name}.")]
    return max(owners, key=len, default="")


def row_of_part(whole: TreeEntry, name: str, tensors: tuple[TensorEntry, ...]) -> TreeEntry:
    """Return the row of a part of a tree."""
    numel, nbytes = sum(prod(t.shape) for t in tensors), sum(t.nbytes for t in tensors)
    dtypes = Counter(tensor.dtype for tensor in tensors)
    return TreeEntry(name, whole.role, len(tensors), numel, nbytes, dtypes)


def tree_table(result: InspectResult) -> Table:
    """Return the table of trees."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("tree", "role", "tensors", "elements", "bytes", "dtypes"):
        is_text = heading in ("tree", "role", "dtypes")
        table.add_column(heading, justify="left" if is_text else "right")
    for tree in result.trees:
        sizes = (str(tree.tensors), f"{tree.numel:,}", format_size(tree.nbytes))
        dtypes = ", ".join(f"{name} × {count}" for name, count in tree.dtypes.items())
        table.add_row(*map(markup, (repr(tree.name), tree.role, *sizes, dtypes)))
    return table


def module_tree(result: InspectResult, depth: int) -> RichTree:
    """Return modules to `depth` levels below each tree, with the bytes and tensors below them."""
    root = RichTree("tensors", hide_root=True)
    nodes: dict[tuple[str, ...], tuple[RichTree, list[int]]] = {}
    only: dict[tuple[str, ...], TensorEntry] = {}  # the tensor of a node, its last if it has more
    for tensor in result.tensors:
        parts = tensor.fqn.split(".")
        for level in range(min(len(parts), depth) + 1):
            key = (tensor.tree, *parts[:level])
            if key not in nodes:
                parent = nodes[key[:-1]][0] if level else root
                nodes[key] = (parent.add(""), [0, 0])
            totals = nodes[key][1]
            totals[0] += 1
            totals[1] += tensor.nbytes
            only[key] = tensor
    for key, (node, (count, nbytes)) in nodes.items():
        name = key[-1] if len(key) > 1 else (key[0] or "(root)")
        tensors = f"{counted(count, 'tensor')}, "
        if count == 1:
            tensors = f"{only[key].dtype} {_dims(only[key].shape)}, "
        node.label = f"{markup(name)} [dim]{tensors}{format_size(nbytes)}[/dim]"
    for node in [root, *(node for node, _ in nodes.values())]:
        hidden = len(node.children) - _MAX_CHILDREN
        if hidden > 1:
            del node.children[_MAX_CHILDREN:]
            node.add(f"[dim]… {hidden} more[/dim]")
    return root


def shard_table(tensors: tuple[TensorEntry, ...]) -> Table:
    """Return the table of tensors and their chunks."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("tensor", "dtype", "shape", "offsets", "sizes", "file"):
        table.add_column(heading)
    for tensor in tensors[:_MAX_ROWS]:
        first = (markup(tensor.name), tensor.dtype, _dims(tensor.shape))
        for chunk in tensor.chunks:
            table.add_row(*first, _dims(chunk.offsets), _dims(chunk.sizes), markup(chunk.file))
            first = ("", "", "")
    hidden = len(tensors) - _MAX_ROWS
    if hidden > 0:
        table.add_row(f"… {hidden} more; narrow with --match or --tree, or use --json")
    return table


def _dims(numbers: tuple[int, ...]) -> str:
    return " × ".join(map(str, numbers)) or "scalar"
