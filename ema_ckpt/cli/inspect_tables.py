"""Tables of `inspect`: trees, EMA settings, modules or shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from string import capwords

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree as RichTree

from ema_ckpt.cli.name_columns import wrap
from ema_ckpt.cli.object_lines import object_lines
from ema_ckpt.cli.output import markup, terminal
from ema_ckpt.core.names import OPTIMIZER
from ema_ckpt.core.text import counted, format_size
from ema_ckpt.ops.results.inspect import InspectResult, TensorEntry, TreeEntry

_MAX_ROWS = 200
_MAX_CHILDREN = 40
_MAX_PARTS = 200  # of a name: what follows is one, as functions here call themselves
_MAX_SHAPES = 4
_MAX_COUNTERS = 8
_SETTINGS = ("step", "decay", "num_updates", "n_averaged", "initted")


def print_inspected(
    result: InspectResult,
    tree: str | None,
    depth: int,
    shards: bool,
    values: Mapping[str, object],
) -> None:
    """Print trees, EMA settings, then modules (to `depth`) or shards, and objects with `values`.

    With `tree`, only what belongs to that tree.
    """
    console = terminal()
    if tree is not None:
        result = narrow(result, tree)
    result = with_weights(result)
    _print_head(console, result)
    if shards:
        for line in shard_lines(result.tensors):
            console.print(line)
    else:
        console.print(module_tree(result, depth), soft_wrap=False)
    if result.objects:
        console.print("objects" if values else "objects (values are not read from a URL)")
        for line in object_lines([item.name for item in result.objects], values):
            console.print(escape("  " + wrap(line, console.width - 2, "      ")))


def with_weights(result: InspectResult) -> InspectResult:
    """Show each quantised weight as one tensor of its values' shape, in place of its parts."""
    stored = {tensor.name: tensor for tensor in result.tensors}
    shown, hidden = dict[str, TensorEntry](), set[str]()
    for weight in result.quantized or ():
        # The parts of a tensor subclass are not listed.
        codes = stored.get(weight.parts["codes"]) or stored[weight.name]
        head = codes.name[: len(codes.name) - len(codes.fqn)]
        sizes = [stored[name].nbytes for name in weight.parts.values() if name in stored]
        shown[codes.name] = replace(
            codes,
            name=weight.name,
            fqn=weight.name.removeprefix(head),
            shape=weight.shape,
            dtype=f"{codes.dtype} ({weight.scheme})",
            nbytes=sum(sizes) if sizes else codes.nbytes,
        )
        hidden.update(weight.parts.values())
    tensors = [
        shown.get(t.name, t) for t in result.tensors if t.name in shown or t.name not in hidden
    ]
    return replace(result, tensors=tuple(tensors))


def _print_head(console: Console, result: InspectResult) -> None:
    """Print what the checkpoint is, its trees and the settings of its averages."""
    size = f"{result.format}, {format_size(result.nbytes)}"
    world = f", saved by {counted(result.world_size, 'rank')}" if result.world_size else ""
    console.print(f"[bold]{markup(result.resolved)}[/bold]: {size}{world}")
    console.print(tree_table(result))
    for name, settings in result.ema.items():
        recorded = {key: value for key, value in settings.items() if value is not None}
        if recorded.get("schedule") == {"kind": "constant", "decay": recorded.get("decay")}:
            recorded["schedule"] = "constant"
        text = ", ".join(f"{key} {_setting(value)}" for key, value in recorded.items())
        text = markup(text) or "no settings recorded"
        console.print(f"EMA {markup(repr(name))}: {text}")
    schemes = Counter([weight.scheme for weight in result.quantized or ()])
    for scheme, count in schemes.items():
        console.print(
            f"{counted(count, 'quantised weight')} ({markup(scheme)}), written as stored, or as "
            "values with --dequantize"
        )


def _setting(value: object) -> str:
    """Format a setting of an EMA; a schedule as the call that makes it."""
    if not isinstance(value, Mapping):
        return str(value)
    kind = capwords(str(value.get("kind", "schedule")), "-").replace("-", "")
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
    trees = [entry for entry in result.trees if entry.name in owners]
    settings = {name: values for name, values in result.ema.items() if name in owners}
    objects = []
    if any(is_path_of(tree, entry.name) for entry in trees):
        for item in result.objects:
            if owner_of(item.name, result.trees) in owners:
                objects.append(item)
    else:  # a path below a tree
        trees = [row_of_part(entry, tree, result.tensors) for entry in trees]
        for item in result.objects:
            if item.name.startswith(f"{tree}."):
                objects.append(item)
    return replace(result, trees=tuple(trees), objects=tuple(objects), ema=settings)


def owning_trees(result: InspectResult, tree: str) -> set[str]:
    """Return the names of the trees that `tree` is, contains, or lies in."""
    owners = {tensor.tree for tensor in result.tensors}
    inside = set()
    for entry in result.trees:
        if entry.name == tree:
            return owners | {tree}
        if entry.name.startswith(f"{tree}."):
            inside.add(entry.name)
    return owners | inside


def is_path_of(path: str, name: str) -> bool:
    """Check whether a path is a tree's name, its last components, or a prefix of it."""
    return f".{name}".endswith(f".{path}") or name.startswith(f"{path}.")


def owner_of(name: str, trees: tuple[TreeEntry, ...]) -> str:
    """Return the innermost tree that an object of this full name is in."""
    owners = [tree.name for tree in trees if name.startswith(f"{tree.name}.")]
    return max(owners, key=len, default="")


def row_of_part(whole: TreeEntry, name: str, tensors: tuple[TensorEntry, ...]) -> TreeEntry:
    """Return the row of a part of a tree."""
    numel, nbytes = 0, 0
    dtypes = Counter[str]()
    for tensor in tensors:
        numel += prod(tensor.shape)
        nbytes += tensor.nbytes
        dtypes[tensor.dtype] += 1
    return TreeEntry(name, whole.role, len(tensors), numel, nbytes, dtypes)


def tree_table(result: InspectResult) -> Table:
    """Return the table of trees."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("tree", "role", "tensors", "elements", "bytes", "dtypes"):
        is_text = heading in ("tree", "role", "dtypes")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for tree in result.trees:
        sizes = (str(tree.tensors), f"{tree.numel:,}", format_size(tree.nbytes))
        dtypes = ", ".join(f"{name} × {count}" for name, count in tree.dtypes.items())
        table.add_row(*map(markup, (repr(tree.name), tree.role, *sizes, dtypes)))
    return table


@dataclass(slots=True)
class _Module:
    """Node of the tree of names: the tensors below it, and its children."""

    tensors: list[TensorEntry] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)

    def add(self, tensor: TensorEntry, parts: Sequence[str]) -> None:
        """Add a tensor at the end of a path."""
        self.tensors.append(tensor)
        if parts:
            self.children.setdefault(parts[0], _Module()).add(tensor, parts[1:])


def module_tree(result: InspectResult, depth: int) -> RichTree:
    """Return modules to `depth` levels below each tree, with shapes and bytes; counters last."""
    root = RichTree("tensors", hide_root=True)
    roles = {entry.name: entry.role for entry in result.trees}
    trees: dict[str, list[TensorEntry]] = {}
    for tensor in result.tensors:
        trees.setdefault(tensor.tree, []).append(tensor)
    for name, tensors in trees.items():
        module, counters = _Module(), []
        for tensor in tensors:
            if is_counter(tensor, roles.get(name, "")):
                counters.append(tensor)
            else:
                module.add(tensor, tensor.fqn.split(".", _MAX_PARTS))
        branch = root.add(f"{markup(name or '(root)')} {_totals(module.tensors)}")
        _add_modules(branch, module, depth)
        if counters:
            branch.add(f"[dim]counters: {markup(counter_text(counters))}[/dim]")
    return root


def _add_modules(branch: RichTree, module: _Module, depth: int) -> None:
    """Add the modules below one; a chain of only children is one row."""
    if depth <= 0:
        return
    for count, (name, child) in enumerate(module.children.items()):
        if count == _MAX_CHILDREN and len(module.children) > count + 1:
            branch.add(f"[dim]… {len(module.children) - count} more[/dim]")
            return
        path, node = name, child
        while len(node.children) == 1 and len(node.tensors) == 1:
            ((part, node),) = node.children.items()
            path = f"{path}.{part}"
        is_last = depth == 1 or not node.children
        row = branch.add(f"{markup(path)} {_totals(node.tensors, shapes=is_last)}")
        _add_modules(row, node, depth - 1)


def _totals(tensors: Sequence[TensorEntry], shapes: bool = False) -> str:
    """Return the dtype and shape of one tensor, or counts, bytes and the commonest shapes."""
    nbytes = format_size(sum(tensor.nbytes for tensor in tensors))
    if len(tensors) == 1:
        return f"{tensors[0].dtype} [cyan]{_dims(tensors[0].shape)}[/cyan], [dim]{nbytes}[/dim]"
    text = f"[dim]{counted(len(tensors), 'tensor')}, {nbytes}[/dim]"
    if not shapes:
        return text
    # Without spaces a shape stays on one line.
    counts = Counter(_dims(tensor.shape).replace(" ", "") for tensor in tensors).most_common()
    shown = [f"{count} of [cyan]{shape}[/cyan]" for shape, count in counts[:_MAX_SHAPES]]
    if len(counts) > _MAX_SHAPES:
        shown.append(f"{sum(count for _, count in counts[_MAX_SHAPES:])} of other shapes")
    return f"{text}: {', '.join(shown)}"


def is_counter(tensor: TensorEntry, role: str) -> bool:
    """Check whether a scalar counts or sets something: it is no weight of its own."""
    if tensor.shape:
        return False
    is_real = "float" in tensor.dtype
    return role == OPTIMIZER or not is_real or tensor.fqn.rpartition(".")[2] in _SETTINGS


def counter_text(counters: Sequence[TensorEntry]) -> str:
    """Name counters; those of one kind, as the step of each parameter, are counted."""
    kinds: dict[str, list[str]] = {}
    for tensor in counters:
        kinds.setdefault(tensor.fqn.rpartition(".")[2], []).append(tensor.fqn)
    texts = []
    for kind, names in kinds.items():
        texts.append(names[0] if len(names) == 1 else f"{len(names)} × {kind}")
    shown = ", ".join(texts[:_MAX_COUNTERS])
    hidden = len(texts) - _MAX_COUNTERS
    return f"{shown}, … {hidden} more" if hidden > 0 else shown


def shard_lines(tensors: tuple[TensorEntry, ...]) -> Iterator[str]:
    """Yield tensors, and below each its chunks: rows, or offsets and sizes, and the file."""
    for tensor in tensors[:_MAX_ROWS]:
        shape = f"{tensor.dtype} [cyan]{_dims(tensor.shape)}[/cyan]"
        yield f"{markup(tensor.name)} {shape}, [dim]{format_size(tensor.nbytes)}[/dim]"
        boxes = [(_dims(chunk.offsets), _dims(chunk.sizes)) for chunk in tensor.chunks]
        at = max((len(offsets) for offsets, _ in boxes), default=0)
        size = max((len(sizes) for _, sizes in boxes), default=0)
        for (offsets, sizes), chunk in zip(boxes, tensor.chunks, strict=True):
            where = f"{sizes.rjust(size)} at {offsets.rjust(at)}"
            yield f"    {where if tensor.shape else 'whole'}  {markup(chunk.file)}"
    hidden = len(tensors) - _MAX_ROWS
    if hidden > 0:
        yield f"… {hidden} more; narrow with --match or --tree, or use --json"


def _dims(numbers: tuple[int, ...]) -> str:
    return " × ".join(map(str, numbers)) or "scalar"
