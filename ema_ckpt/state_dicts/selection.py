"""From what a checkpoint holds to what a verb writes: trees, globs, casts and names.

The order is fixed: tree, wrapper prefixes stripped, match, exclude, keep-dtype, rename. Globs see
names as the verb would write them before any rename.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import NamedTuple

from ema_ckpt.core.arguments import texts
from ema_ckpt.core.catalog import Catalog, Object, Tensor
from ema_ckpt.core.dtypes import DType, by_name
from ema_ckpt.core.errors import UsageError
from ema_ckpt.core.names import (
    EMA,
    LIVE,
    OPTIMIZER,
    OTHER,
    WRAPPERS,
    canonical,
    glob_matcher,
    is_wrapped,
    parse_rename,
    rename_path,
    tree_role,
)
from ema_ckpt.core.nearest_names import nearest
from ema_ckpt.core.text import counted, shown
from ema_ckpt.core.write_plan import OutputObject, OutputTensor
from ema_ckpt.state_dicts.ema_weights import AVERAGED_MODEL, POSITIONS
from ema_ckpt.state_dicts.tree import Tree, find_trees

Path = tuple[str | int, ...]

_CASTS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_WILDCARDS = frozenset("*?[")


class SelectionOptions(NamedTuple):
    """Which tensors a writer takes and how it names and casts them.

    Attributes:
        exact: stored names of what is never cast: parts of quantised weights.
    """

    match: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    dtype: DType | None = None
    keep_dtype: tuple[str, ...] = ()
    keep_prefixes: bool = False
    exact: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Selection:
    """What is written, in stored order.

    Attributes:
        entries, objects: tensors and objects under the names they get.
        renamed: the new name of everything whose name changed, by its name before.
        filled: names in `entries` that come from the live tree because the EMA lacks them.
        exact: names in `entries` that would have been cast, but are parts of quantised weights.
        low: names in `entries` that were to be cast, and have eight bits or fewer, if no tensor
            is a part of a quantised weight.
    """

    entries: tuple[OutputTensor, ...] = ()
    objects: tuple[OutputObject, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    filled: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    low: tuple[str, ...] = ()


@dataclass(slots=True)
class _Row:
    """A tensor or object on its way through the steps; `dtype` is what a tensor is cast to."""

    before: str
    name: str
    path: Path
    source: Tensor | Object
    castable: bool
    dtype: DType | None = None


def cast_target(dtype: str) -> DType | None:
    """Parse `--dtype` into an element type, or None for `keep`.

    Raises:
        UsageError: `usage` for anything but `keep`, `fp32`, `bf16`, `fp16` and torch's names of
            these.
    """
    if dtype == "keep":
        return None
    name = _CASTS.get(dtype, dtype)
    if name not in _CASTS.values():
        raise UsageError("usage", f"--dtype {dtype!r}: expected keep, fp32, bf16 or fp16")
    return by_name(name)


def value_type(dequantize: str | None) -> DType | None:
    """Parse `--dequantize` into the type of the values, or None where nothing is asked for.

    Raises:
        UsageError: `usage` for anything but `bf16`, `fp32` and torch's names of these.
    """
    if dequantize is None:
        return None
    name = _CASTS.get(dequantize, dequantize)
    if name not in ("bfloat16", "float32"):
        raise UsageError("usage", f"--dequantize {dequantize!r}: expected bf16 or fp32")
    return by_name(name)


def options(
    *,
    match: Iterable[str] = (),
    exclude: Iterable[str] = (),
    rename: Iterable[str] | Mapping[str, str] = (),
    dtype: str = "keep",
    keep_dtype: Iterable[str] = (),
    keep_prefixes: bool = False,
) -> SelectionOptions:
    """Check the options of a command or caller; `rename` is `OLD=NEW` texts or a mapping.

    Raises:
        UsageError: `usage` for a rename without `=`, an unknown dtype, and what is no text.
    """
    rules: Iterable[tuple[str, str]]
    if isinstance(rename, Mapping):
        rules = zip(texts(rename, "--rename"), texts(rename.values(), "--rename"), strict=True)
    else:
        rules = map(parse_rename, texts(rename, "--rename"))
    return SelectionOptions(
        texts(match, "--match"),
        texts(exclude, "--exclude"),
        tuple(rules),
        cast_target(dtype),
        texts(keep_dtype, "--keep-dtype"),
        keep_prefixes,
    )


def missing_weights(ema: Tree, live: Tree) -> dict[str, Tensor]:
    """List weights of the live tree that the EMA lacks, wrapper prefixes aside, in stored order."""
    present = set(map(canonical, ema.weights))
    return {name: tensor for name, tensor in live.weights.items() if canonical(name) not in present}


def select_tree(
    tree: Tree, chosen: SelectionOptions, fill: Mapping[str, Tensor] | None = None
) -> Selection:
    """Select from one tree, under names without its prefix; `fill` adds weights that it lacks.

    Raises:
        UsageError: `empty-selection` if a glob or rename fits nothing or nothing is left;
            `name-collision`.
        SourceError: `unsupported` if the tree's weights cannot be named.
    """
    where, filled = f"tree {tree.name!r}", fill or {}
    if tree.layout == POSITIONS and tree.problem is None:
        averages = f"{counted(len(tree.named), 'average')} named after the parameters of"
        logging.getLogger("ema_ckpt").info(f"{where}: {averages} {tree.partner!r} in order")
    rows = []
    for before, tensor in {**tree.weights, **filled}.items():
        name = before if chosen.keep_prefixes else canonical(before)
        rows.append(_Row(before, name, (name,), tensor, tree.role != OPTIMIZER))
    if tree.entries and not rows:
        raise UsageError("empty-selection", f"{where} holds no tensor to write")
    selected = _write(_filter(rows, chosen, where), chosen, rows, where)
    added = set(map(id, filled.values()))
    names = tuple(tensor.name for tensor in selected.entries if id(tensor.source) in added)
    return replace(selected, filled=names)


def select_all(
    catalog: Catalog,
    trees: Sequence[Tree],
    chosen: SelectionOptions,
    only: Iterable[str] = (),
    *,
    strip: bool = True,
) -> Selection:
    """Select from all trees, or those that `only` names, under full stored names and nesting.

    The settings of an EMA (`num_updates`, `config`, …) go with its weights, whatever `only` and
    `match` say; an explicit `exclude` drops them. Without `strip` wrapper prefixes stay, as with
    `keep_prefixes`.

    Raises:
        UsageError: `unknown-tree`; `empty-selection` if a glob or rename fits nothing or nothing is
            left; `name-collision`.
    """
    where = catalog.resolved
    rows = list(_full_rows(catalog, trees, strip=strip and not chosen.keep_prefixes))
    candidates = rows
    names = texts(only, "--tree")
    if names:
        picked = chain.from_iterable(find_trees(trees, name, where) for name in names)
        wanted = set(map(id, chain.from_iterable(tree.entries for tree in picked)))
        candidates = [row for row in rows if id(row.source) in wanted]
    kept = {id(row.source) for row in _filter(candidates, chosen, where)}
    kept |= _settings_of(trees, rows, kept, chosen.exclude)
    return _write([row for row in rows if id(row.source) in kept], chosen, candidates, where)


def _settings_of(
    trees: Sequence[Tree], rows: Sequence[_Row], kept: set[int], exclude: Sequence[str]
) -> set[int]:
    """Find the settings of averages that are kept, unless they are excluded, by object id."""
    settings: set[int] = set()
    for tree in trees:
        if not kept.isdisjoint(map(id, tree.named.values())):
            settings.update(map(id, tree.settings.values()))
    excluded = _Globs(exclude)
    beside: set[int] = set()
    for row in rows:
        if id(row.source) in settings and not excluded.fits(row.name):
            beside.add(id(row.source))
    return beside


def _full_rows(catalog: Catalog, trees: Sequence[Tree], *, strip: bool) -> Iterator[_Row]:
    owners: dict[int, Tree] = {}
    settings: set[int] = set()
    for tree in trees:
        owners.update(dict.fromkeys(map(id, tree.entries), tree))
        settings.update(map(id, tree.settings.values()))
    starts = strip_starts(trees) if strip else {}
    for item in chain[Tensor | Object](catalog.tensors, catalog.objects):
        tree = owners[id(item)]
        castable = tree.role in (LIVE, EMA) and id(item) not in settings
        row = _Row(item.name, item.name, item.path, item, castable)
        if strip and is_wrapped(item.name) and _strips(tree):
            _strip(row, starts[tree.name])
        yield row


def strip_starts(trees: Sequence[Tree]) -> dict[str, int]:
    """How many characters at the start of full names keep their wrapper components, by tree.

    They are those of the tree's name, or of that of the tree around it if this has weights below
    the wrapper that the inner one lies below: one module was wrapped with both.
    """
    by_name = {tree.name: tree for tree in trees if _strips(tree)}
    starts: dict[str, int] = {}
    below: dict[tuple[str, str], bool] = {}  # whether a tree has weights below a wrapper
    for tree in sorted(trees, key=lambda tree: len(tree.name)):
        starts[tree.name] = len(tree.prefix)
        outer = _wrapped_around(tree, by_name) if tree.name in by_name else None
        if outer is None:
            continue
        place = _first_wrapper(tree.name, len(outer.prefix))
        if (outer.name, place) not in below:
            below[outer.name, place] = any(t.name.startswith(place) for t in outer.tensors)
        if below[outer.name, place]:
            starts[tree.name] = starts[outer.name]
    return starts


def _wrapped_around(tree: Tree, by_name: Mapping[str, Tree]) -> Tree | None:
    """Return the innermost tree that one lies in, if a wrapper is among what it lies below."""
    *parents, last = tree.name.split(".")
    if last in WRAPPERS or WRAPPERS.isdisjoint(parents):
        return None
    around = ["", *accumulate(parents, "{}.{}".format)]
    return next((by_name[name] for name in reversed(around) if name in by_name), None)


def _first_wrapper(name: str, start: int) -> str:
    """Return a tree's name up to the dot behind its first wrapper component; "" if it has none."""
    dot = name.find(".", start)
    while dot >= 0:
        if name[start:dot] in WRAPPERS:
            return name[: dot + 1]
        start, dot = dot + 1, name.find(".", dot + 1)
    return ""


def _strips(tree: Tree) -> bool:
    if tree.role == LIVE:
        # Live weights in an average's place are known by the `module` that they lie below.
        return tree.layout != AVERAGED_MODEL
    if tree.role == EMA:
        return True
    # Optimizer state names its parameters in `param_groups` too, which are values: both stay.
    return tree.role == OTHER and tree_role(tree.name) is None


def _strip(row: _Row, skip: int) -> None:
    """Drop wrapper components behind the first `skip` characters."""
    row.name = row.name[:skip] + canonical(row.name[skip:])
    if len(row.path) == 1:
        row.path = (row.name,)
        return
    path: list[str | int] = []
    reached = 0
    for element in row.path[:-1]:
        text = str(element)
        bare = text if isinstance(element, int) else _bare(text, max(skip - reached, 0))
        if bare is not None:
            path.append(element if bare == text else bare)
        reached += len(text) + 1
    last = row.path[-1]
    if isinstance(last, str):
        kept = max(skip - reached, 0)
        last = last[:kept] + canonical(last[kept:])
    row.path = (*path, last)


def _bare(text: str, kept: int) -> str | None:
    """Drop the wrapper components of a part of a name behind its first `kept` characters.

    Returns:
        what is left; None for nothing, which is not an empty key.
    """
    parts = [part for part in text[kept:].split(".") if part not in WRAPPERS]
    if parts:
        return text[:kept] + ".".join(parts)
    return text[:kept].removesuffix(".") if kept else None


class _Globs:
    """Several globs tested at once; plain names among them cost one look-up together."""

    def __init__(self, globs: Sequence[str]) -> None:
        plain = []
        self._tests: list[tuple[str, Callable[[str], bool]]] = []
        for glob in globs:
            if _WILDCARDS.isdisjoint(glob):
                plain.append(glob)
            else:
                self._tests.append((glob, glob_matcher(glob)))
        self._names = frozenset(plain)

    def fits(self, name: str) -> bool:
        if name in self._names or not self._tests:
            return name in self._names
        return any(test(name) for _, test in self._tests)

    def idle(self, names: Sequence[str]) -> list[str]:
        """List the globs that fit none of `names`."""
        idle = list(self._names.difference(names))
        for glob, test in self._tests:
            if not any(map(test, names)):
                idle.append(glob)
        return idle


def _filter(rows: Sequence[_Row], chosen: SelectionOptions, where: str) -> list[_Row]:
    names = [row.name for row in rows]
    refuse_idle("--match", chosen.match, names, where)
    refuse_idle("--exclude", chosen.exclude, names, where)
    matched, excluded = _Globs(chosen.match), _Globs(chosen.exclude)
    kept = []
    for row in rows:
        is_matched = not chosen.match or matched.fits(row.name)
        if is_matched and not excluded.fits(row.name):
            kept.append(row)
    if rows and not kept:
        message = f"{where}: --match and --exclude leave none of {counted(len(rows), 'name')}"
        raise UsageError("empty-selection", message)
    return kept


def refuse_idle(flag: str, globs: Sequence[str], names: Sequence[str], where: str) -> None:
    """Raise UsageError `empty-selection` if one of `globs`, given as `flag`, fits no name."""
    idle = _Globs(globs).idle(names) if globs else []
    if not idle:
        return
    near = nearest(idle[0], names)
    hint = f"names there are like {shown(near[:3])}" if near else "it holds nothing"
    message = f"{flag} {shown(idle)} fits none of {counted(len(names), 'name')} of {where}; {hint}"
    raise UsageError("empty-selection", message)


def _write(
    kept: Sequence[_Row], chosen: SelectionOptions, candidates: Sequence[_Row], where: str
) -> Selection:
    """Apply casts and `rename`, refuse collisions, and build what is written."""
    exact = _set_casts(kept, chosen, candidates, where)
    _rename(kept, chosen.rename, where)
    _refuse_collisions(kept, where, renamed=bool(chosen.rename))
    tensors, objects = [], []
    for row in kept:
        if isinstance(row.source, Object):
            objects.append(OutputObject(row.name, row.path, row.source))
        elif row.dtype is not None and row.source.dtype.is_castable:
            tensors.append(OutputTensor(row.name, row.path, row.source, row.dtype))
        else:
            tensors.append(OutputTensor(row.name, row.path, row.source, row.source.dtype))
    renamed = {row.before: row.name for row in kept if row.before != row.name}
    uncast = tuple([row.name for row in exact])
    low: list[str] = []
    if not chosen.exact:  # else they are the codes that the exact parts belong to
        low = [row.name for row in kept if row.dtype is not None and _is_low(row.source)]
    return Selection(tuple(tensors), tuple(objects), renamed, exact=uncast, low=tuple(low))


def _set_casts(
    kept: Sequence[_Row], chosen: SelectionOptions, candidates: Sequence[_Row], where: str
) -> list[_Row]:
    """Set what each row is cast to; return those that a cast would change, but are kept exact."""
    refuse_idle("--keep-dtype", chosen.keep_dtype, [row.name for row in candidates], where)
    spared = _Globs(chosen.keep_dtype)
    exact = []
    for row in kept:
        if not row.castable or spared.fits(row.name):
            continue
        row.dtype = chosen.dtype
        if row.source.name in chosen.exact and _is_cast(row):
            row.dtype = None
            exact.append(row)
    return exact


def _is_low(source: Tensor | Object) -> bool:
    return isinstance(source, Tensor) and source.dtype.kind == "low"


def _is_cast(row: _Row) -> bool:
    """Whether a row is a tensor whose numbers a cast would change."""
    if row.dtype is None or isinstance(row.source, Object):
        return False
    return row.source.dtype.is_castable and row.source.dtype != row.dtype


def _rename(rows: Sequence[_Row], rules: Sequence[tuple[str, str]], where: str) -> None:
    idle = []
    for old, new in rules:
        if not any(row.name.startswith(old) for row in rows):
            idle.append(f"{old}={new}")
    if idle:
        raise UsageError("empty-selection", f"--rename {shown(idle)}: no name of {where} begins so")
    for row in rows if rules else ():
        for old, new in rules:
            if row.name.startswith(old):
                row.path = rename_path(row.path, old, new)
                row.name = new + row.name[len(old) :]
                break
        if not row.name:
            raise UsageError("usage", f"--rename leaves {row.before!r} without a name")


def _refuse_collisions(rows: Sequence[_Row], where: str, *, renamed: bool) -> None:
    first: dict[str, str] = {}
    remedy = "change --rename" if renamed else "use --keep-prefixes or --rename"
    for row in rows:
        other = first.setdefault(row.name, row.before)
        if other != row.before:
            message = f"{other!r} and {row.before!r} would both be written as {row.name!r}"
            message = f"{where}: {message}; {remedy}"
            raise UsageError("name-collision", message, tensor=row.name)
    if not renamed:
        return
    leaves = {row.path for row in rows}
    for row in rows:
        for depth in range(1, len(row.path)):
            if row.path[:depth] in leaves:
                name = ".".join(map(str, row.path[:depth]))
                message = f"{where}: --rename would make {name!r} both a tensor and a dictionary"
                message += f" with {row.name!r}"
                raise UsageError("name-collision", message, tensor=row.name)
