"""Several checkpoints that belong together as one catalog: each part a tree of its role.

Files keep their names below the common directory, tensors their payloads; only names and paths are
put together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from ema_ckpt.core.catalog import (
    Catalog,
    Diagnostic,
    Files,
    Nesting,
    Object,
    Payload,
    Reader,
    Tensor,
)
from ema_ckpt.core.errors import SourceError, shown
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER, part_role, role_of
from ema_ckpt.discovery.location import Location
from ema_ckpt.state_dicts.tree import Tree, list_trees
from ema_ckpt.storage.files import open_files, safe_name

Path = tuple[str | int, ...]

# Dictionaries whose name tells how an EMA is stored: without it the form would be lost.
_FORMS = frozenset({"shadow", "shadow_params", "ema_model"})
_AVERAGE_KEYS = frozenset(
    {
        "decay",
        "min_decay",
        "optimization_step",
        "update_after_step",
        "use_ema_warmup",
        "inv_gamma",
        "power",
    }
)
_MAX_CONFIG_NBYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Part:
    """One part: its catalog, its directory below the common one (with a `/`, or empty), where its
    entries go.
    """

    catalog: Catalog
    folder: str
    place: Callable[[Path], Path]


class JoinedFiles:
    """The files of all parts under one root; the names of a part's files begin with its
    directory.
    """

    def __init__(self, root: str, parts: Sequence[tuple[str, Files]]) -> None:
        self.root = root
        # The longest directory first, so that `actor/model/` wins over `actor/`, and the common one
        # last.
        self._parts = [*sorted(parts, key=lambda part: -len(part[0])), ("", open_files(root))]
        self._known: dict[str, tuple[Files, str]] = {}

    def _locate(self, name: str) -> tuple[Files, str]:
        found = self._known.get(name)
        if found is None:
            found = next(
                (files, name[len(folder) :])
                for folder, files in self._parts
                if name.startswith(folder)
            )
            self._known[name] = found
        return found

    def size(self, name: str) -> int:
        """Bytes of a file."""
        files, inner = self._locate(name)
        return files.size(inner)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes at `offset`."""
        files, inner = self._locate(name)
        return files.read(inner, offset, nbytes)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        files, inner = self._locate(name)
        files.read_into(inner, offset, buffer)

    def listing(self) -> list[str]:
        """Names directly inside the common directory, sorted."""
        return self._parts[-1][1].listing()

    def close(self) -> None:
        """Release what was opened."""
        for _, files in self._parts:
            files.close()


class JoinedReader:
    """Hands each entry to the reader of the part that it came from."""

    def __init__(self) -> None:
        self._origins: dict[str, tuple[Catalog, Tensor | Object, str]] = {}

    def add(self, name: str, catalog: Catalog, original: Tensor | Object, folder: str) -> None:
        """Remember that `name` is `original` of the part `catalog` in `folder`."""
        self._origins[name] = (catalog, original, folder)

    def tie(self, name: str, kept: str) -> None:
        """Let `name`, which a part dropped as tied, be read as `kept`."""
        if kept in self._origins:
            self._origins.setdefault(name, self._origins[kept])

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        """The payload of each chunk, in files named from the common directory."""
        catalog, original, folder = self._origins[tensor.name]
        if not isinstance(original, Tensor):
            raise SourceError("unreadable", f"{tensor.name!r} is no tensor", tensor=tensor.name)
        payloads = catalog.reader.payloads(original)
        return (
            tuple(payload._replace(file=folder + payload.file) for payload in payloads)
            if folder
            else payloads
        )

    def load(self, item: Object) -> object:
        """An object, read safely by its part."""
        catalog, original, _ = self._origins[item.name]
        return catalog.reader.load(original) if isinstance(original, Object) else None


def join_parts(
    found: Location, path: str, opened: Sequence[tuple[str, Location, Catalog]]
) -> Catalog:
    """Join the parts of a checkpoint into one catalog.

    Raises:
        SourceError: `name-collision` if two parts hold a tree of one name; what reading a
            `config.json` may raise.
    """
    parts, roles, owners = [], {}, dict[str, str]()
    for name, part, catalog in opened:
        role = part_role(name) or LIVE
        known = list_trees(catalog)
        if _holds_several(known):
            names, placed = [tree.name or name for tree in known], _hoist(name, known)
        else:
            roles[name] = role
            names, placed = [name], _below(name, _content(role, known))
        _refuse_second_owner(names, name, owners, found)
        parts.append(
            _Part(_with_config(name, role, catalog), _folder(part.root, found.root), placed)
        )
    joined = _join(parts, found, path, nested=True)
    return replace(joined, part_roles=roles)


def _refuse_second_owner(
    names: Sequence[str], part: str, owners: dict[str, str], found: Location
) -> None:
    for name in names:
        other = owners.setdefault(name, part)
        if other != part:
            message = f"{found.resolved}: the parts {other!r} and {part!r} both hold a tree {name!r}; open one of them"
            raise SourceError("name-collision", message)


def _folder(root: str, above: str) -> str:
    inner = root[len(above) :].strip("/") if root.startswith(above) else ""
    return f"{inner}/" if inner else ""


def _holds_several(known: Sequence[Tree]) -> bool:
    """Whether a part is no part but a checkpoint of several trees (`model_and_optim`, or `net` with
    `net_ema`).
    """
    return sum(bool(tree.tensors) and tree.role in (LIVE, EMA, OPTIMIZER) for tree in known) > 1


def _hoist(name: str, known: Sequence[Tree]) -> Callable[[Path], Path]:
    """Entries keep the trees they have; what lies in none gets the part's name."""
    names = [tree.name for tree in known if tree.name]

    def place(path: Path) -> Path:
        if len(path) > 1:
            return path
        dotted = str(path[0])
        tree = next((tree for tree in names if dotted.startswith(f"{tree}.")), None)
        return (tree, dotted[len(tree) + 1 :]) if tree else (name, dotted)

    return place


def _content(role: str, known: Sequence[Tree]) -> str | None:
    """The one dictionary of its role that a part consists of, as in `{"model": …}`; None if it is
    no such part.
    """
    weights = [tree for tree in known if tree.tensors and tree.role in (LIVE, EMA, OPTIMIZER)]
    if len(weights) != 1:
        return None
    tree = weights[0]
    nested = all(
        len(tensor.path) > 1 and isinstance(tensor.path[1], str) for tensor in tree.tensors
    )
    if not nested or role_of(tree.name) is None or tree.name in _FORMS:
        return None
    # An EMA saved like a model is its content only if nothing beside it describes the average.
    fits = tree.role == role or (role == EMA and tree.role == LIVE and len(known) == 1)
    return tree.name if fits else None


def _below(name: str, content: str | None) -> Callable[[Path], Path]:
    def place(path: Path) -> Path:
        return (
            (name, *path[1:])
            if content is not None and path[0] == content and len(path) > 1
            else (name, *path)
        )

    return place


def _with_config(name: str, role: str, catalog: Catalog) -> Catalog:
    """Add what diffusers' EMAModel writes of an average into the `config.json` beside its
    weights.
    """
    if role != EMA or "config.json" not in catalog.source.listing():
        return catalog
    nbytes = catalog.source.size("config.json")
    if nbytes > _MAX_CONFIG_NBYTES:
        return catalog
    from ema_ckpt.formats.sidecar import load_json

    document = load_json(catalog.source.read("config.json", 0, nbytes), f"{name}/config.json")
    if not isinstance(document, Mapping) or "optimization_step" not in document:
        return catalog
    held = {item.name for item in chain[Tensor | Object](catalog.tensors, catalog.objects)}
    found = {
        key: value for key, value in document.items() if key in _AVERAGE_KEYS and key not in held
    }
    objects = [
        Object(key, (key,), "config.json", inline=value, is_inline=True)
        for key, value in found.items()
    ]
    return replace(catalog, objects=(*catalog.objects, *objects), reader=_Inline(catalog.reader))


@dataclass(frozen=True, slots=True)
class _Inline:
    """A reader whose catalog got further objects, read already."""

    reader: Reader

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        """The payload of each chunk."""
        return self.reader.payloads(tensor)

    def load(self, item: Object) -> object:
        """An object; those out of `config.json` are plain values."""
        return item.inline if item.file == "config.json" else self.reader.load(item)


def open_torch_index(source: Files, found: Location, path: str) -> Catalog:
    """Join the torch files that a `pytorch_model.bin.index.json` names.

    Raises:
        SourceError: `index-mismatch` if index and files do not name the same tensors.
    """
    from ema_ckpt.formats.sidecar import load_json
    from ema_ckpt.formats.torch_file.reader import open_torchfile

    index = found.names[0]
    document = load_json(source.read(index, 0, source.size(index)), index)
    weight_map = document.get("weight_map") if isinstance(document, Mapping) else None
    if not isinstance(weight_map, Mapping) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise SourceError(
            "index-mismatch", f"{index}: no weight_map from names to files", file=index
        )
    parts = []
    for file in dict.fromkeys(weight_map.values()):
        catalog = open_torchfile(source, (safe_name(file),), path, found.resolved)
        expected = {name for name, other in weight_map.items() if other == file}
        odd = sorted(expected ^ {tensor.name for tensor in catalog.tensors})
        if odd:
            message = f"{index}: {file} and the index differ in {shown(odd)}"
            raise SourceError("index-mismatch", message, tensor=odd[0], file=file)
        parts.append(_Part(catalog, "", lambda place: place))
    return _join(parts, found, path, nested=False)


def _join(parts: Sequence[_Part], found: Location, path: str, *, nested: bool) -> Catalog:
    reader = JoinedReader()
    source = JoinedFiles(found.root, [(part.folder, part.catalog.source) for part in parts])
    catalogs = [_relocate(part, reader) for part in parts]
    weights = next((catalog for catalog in catalogs if catalog.tensors), catalogs[0])
    empty = replace(
        weights,
        path=path,
        resolved=found.resolved,
        tensors=(),
        objects=(),
        source=source,
        reader=reader,
        nested=nested,
        world_size=None,
    )
    return _merge(empty, catalogs)


def _relocate(part: _Part, reader: JoinedReader) -> Catalog:
    """Rename everything in a part to what it is called in the joined checkpoint; tell `reader`."""
    catalog, folder, place = part.catalog, part.folder, part.place
    tensors, digests = [], {}
    for tensor in catalog.tensors:
        path = place(tensor.path)
        name = _dotted(path)
        reader.add(name, catalog, tensor, folder)
        chunks = tensor.chunks
        if folder:
            chunks = tuple(chunk._replace(file=folder + chunk.file) for chunk in chunks)
        # Equal keys mean shared memory, so those of different parts must differ.
        storage = None if tensor.storage is None else (folder, *tensor.storage)
        tensors.append(replace(tensor, name=name, path=path, chunks=chunks, storage=storage))
        if tensor.name in catalog.digests:
            digests[name] = catalog.digests[tensor.name]
    objects = []
    for item in catalog.objects:
        path = place(item.path)
        reader.add(_dotted(path), catalog, item, folder)
        objects.append(replace(item, name=_dotted(path), path=path, file=folder + item.file))
    return replace(
        catalog,
        tensors=tuple(tensors),
        objects=tuple(objects),
        files={folder + file: nbytes for file, nbytes in catalog.files.items()},
        digests=digests,
        warnings=tuple(_prefixed(warning, folder) for warning in catalog.warnings),
        nesting=_relocated_nesting(catalog.nesting, place),
        ties=_relocated_ties(catalog, place, reader),
        header_text={k: text for k, text in catalog.header_text.items() if k not in catalog.ties},
        rank_private=tuple(
            state._replace(path=place(state.path), file=folder + state.file)
            for state in catalog.rank_private
        ),
        unknown_entries=tuple(
            entry._replace(file=folder + entry.file) if entry.file else entry
            for entry in catalog.unknown_entries
        ),
        find_mismatches=partial(_prefixed_mismatches, catalog, folder),
    )


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _prefixed(warning: Diagnostic, folder: str) -> Diagnostic:
    return replace(warning, message=f"{folder[:-1]}: {warning.message}") if folder else warning


def _prefixed_mismatches(catalog: Catalog, folder: str) -> list[tuple[str, str]]:
    return [(name, folder + message) for name, message in catalog.find_mismatches()]


def _relocated_nesting(nesting: Nesting | None, place: Callable[[Path], Path]) -> Nesting | None:
    if nesting is None:
        return None
    keys = {place(path): key for path, key in nesting.keys.items()}
    return Nesting(keys, frozenset(map(place, nesting.tuples)))


def _relocated_ties(
    catalog: Catalog, place: Callable[[Path], Path], reader: JoinedReader
) -> dict[str, str]:
    """Names that a part dropped as tied follow the path of the one that it kept."""
    ties: dict[str, str] = {}
    paths = {tensor.name: tensor.path for tensor in catalog.tensors} if catalog.ties else {}
    for dropped, kept in catalog.ties.items():
        path = paths.get(kept, (kept,))
        home = _dotted(path[:-1])
        last = dropped[len(home) + 1 :] if home and dropped.startswith(f"{home}.") else dropped
        name = _dotted(place((*path[:-1], last)))
        ties[name] = _dotted(place(path))
        reader.tie(name, ties[name])
    return ties


def _merge(empty: Catalog, catalogs: Sequence[Catalog]) -> Catalog:
    """Put the contents of `catalogs` together, in their order, into the catalog `empty`."""
    files: dict[str, int] = {}
    digests: dict[str, int] = {}
    keys: dict[Path, object] = {}
    tuples: set[Path] = set()
    ties: dict[str, str] = {}
    header_text: dict[str, str] = {}
    for catalog in catalogs:
        files.update(catalog.files)
        digests.update(catalog.digests)
        ties.update(catalog.ties)
        if catalog.nesting is not None:
            keys.update(catalog.nesting.keys)
            tuples.update(catalog.nesting.tuples)
        for key, text in catalog.header_text.items():
            header_text.setdefault(key, text)
    worlds = [catalog.world_size for catalog in catalogs if catalog.world_size is not None]
    return replace(
        empty,
        tensors=tuple(chain.from_iterable(catalog.tensors for catalog in catalogs)),
        objects=tuple(chain.from_iterable(catalog.objects for catalog in catalogs)),
        world_size=max(worlds, default=None),
        files=files,
        digests=digests,
        warnings=tuple(chain.from_iterable(catalog.warnings for catalog in catalogs)),
        nesting=Nesting(keys, frozenset(tuples)),
        ties=ties,
        order=(),
        header_text=header_text,
        rank_private=tuple(chain.from_iterable(catalog.rank_private for catalog in catalogs)),
        unknown_entries=tuple(chain.from_iterable(catalog.unknown_entries for catalog in catalogs)),
        find_mismatches=lambda: [m for catalog in catalogs for m in catalog.find_mismatches()],
    )
