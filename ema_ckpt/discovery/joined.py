"""Join several checkpoints that belong together into one catalog: each part a tree of its role.

Files keep their names below the common directory, tensors their payloads; only names and paths
change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import Any

from ema_ckpt.core.catalog import (
    Catalog,
    Diagnostic,
    Files,
    ItemKind,
    ItemReader,
    Nesting,
    Object,
    Path,
    Payload,
    Problem,
    RankPrivate,
    Tensor,
    refuse_problems,
)
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER, role_of
from ema_ckpt.discovery.location import Location
from ema_ckpt.state_dicts.tree import Tree, list_trees
from ema_ckpt.storage.files import open_files

# Dictionaries whose name tells how an EMA is stored: without it the layout would be lost.
_LAYOUT_NAMES = frozenset({"shadow", "shadow_params", "ema_model"})
_CONFIG = "config.json"
_CONFIG_KEYS = frozenset(
    "decay min_decay optimization_step update_after_step use_ema_warmup inv_gamma power".split()
)
# Fields of which a joined catalog has what all its parts have, in their order.
_CHAINED = "tensors objects warnings problems left_out rank_private unknown_entries".split()
_MAX_CONFIG_NBYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of a joined checkpoint.

    Attributes:
        directory: where its files are, relative to the common directory: with a final `/`, or "".
        place: maps a path in the part to the path in the joined checkpoint.
    """

    catalog: Catalog
    directory: str
    place: Callable[[Path], Path]

    def file_name(self, file: str) -> str:
        """Name a file of the part as in the joined checkpoint; an entry without a file has ""."""
        return self.directory + file if file else ""

    def inner_name(self, file: str) -> str:
        """Name a file of the joined checkpoint as in the part."""
        return file.removeprefix(self.directory)

    def problems(self, names: Mapping[str, str]) -> Iterator[Problem]:
        """Tell the problems of the part as ones of the joined checkpoint, with its `names`."""
        for code, tensor, file, message in map(astuple, self.catalog.problems):
            place = file and self.file_name(file)
            yield Problem(code, names.get(tensor, tensor), place, self.directory + message)

    def warnings(self) -> Iterator[Diagnostic]:
        """Tell the warnings of the part with its directory before each."""
        prefix = f"{self.directory[:-1]}: " if self.directory else ""
        for warning in self.catalog.warnings:
            yield replace(warning, message=prefix + warning.message)


class JoinedFiles:
    """Files of all parts under one root; names of a part's files begin with its directory."""

    def __init__(self, root: str, parts: Sequence[tuple[str, Files]]) -> None:
        self.root = root
        # The longest directory first: `actor/model/` wins over `actor/`, and those over the root.
        self._parts = [*sorted(parts, key=lambda part: -len(part[0])), ("", open_files(root))]
        self._located: dict[str, tuple[Files, str]] = {}

    def _locate(self, name: str) -> tuple[Files, str]:
        if name not in self._located:
            directory, files = next(part for part in self._parts if name.startswith(part[0]))
            self._located[name] = files, name[len(directory) :]
        return self._located[name]

    def size(self, name: str) -> int:
        files, inner = self._locate(name)
        return files.size(inner)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        files, inner = self._locate(name)
        return files.read(inner, offset, nbytes)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        files, inner = self._locate(name)
        files.read_into(inner, offset, buffer)

    def listing(self) -> list[str]:
        return self._parts[-1][1].listing()

    def close(self) -> None:
        for _, files in self._parts:
            files.close()


class JoinedReader:
    """Passes each tensor and object on to the reader of the part that it comes from."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[_Part, Tensor]] = {}
        self.objects: dict[str, tuple[_Part, Object]] = {}
        self.item_files: dict[str, _Part] = {}

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        part, original = self.tensors[tensor.name]
        directory = part.directory
        if not directory:
            return part.catalog.reader.payloads(replace(original, chunks=tensor.chunks))
        chunks = [chunk._replace(file=part.inner_name(chunk.file)) for chunk in tensor.chunks]
        payloads = part.catalog.reader.payloads(replace(original, chunks=tuple(chunks)))
        return tuple(payload._replace(file=directory + payload.file) for payload in payloads)

    def recognise(
        self, kind: ItemKind, file: str, offset: int, item: memoryview | None = None
    ) -> Payload | None:
        part = self.item_files[file]
        reader = part.catalog.reader
        if not isinstance(reader, ItemReader):
            return None
        payload = reader.recognise(kind, part.inner_name(file), offset, item)
        return None if payload is None else payload._replace(file=file)

    def refuse_encoded(self, file: str, offset: int) -> None:
        part = self.item_files.get(file)
        if part is not None and isinstance(part.catalog.reader, ItemReader):
            part.catalog.reader.refuse_encoded(part.inner_name(file), offset)

    def load(self, item: Object) -> object:
        part, original = self.objects[item.name]
        if original.file == _CONFIG:
            return original.inline
        return part.catalog.reader.load(original)


def join_parts(
    location: Location, path: str, opened: Sequence[tuple[str, Location, Catalog]]
) -> Catalog:
    """Join the parts of a checkpoint into one catalog.

    Raises:
        SourceError: `name-collision` if two parts hold a tree of one name; what reading a
            `config.json` may raise.
    """
    parts = []
    roles: dict[str, str] = {}
    owners: dict[str, str] = {}
    for (name, part, catalog), role in zip(opened, location.roles, strict=True):
        trees = list_trees(catalog)
        weights = [tree for tree in trees if tree.tensors and tree.role in (LIVE, EMA, OPTIMIZER)]
        if len(weights) > 1:
            # A checkpoint of several trees: `model_and_optim`, or `net` with `net_ema`.
            names = [tree.name or name for tree in trees]
            place = _keep_trees(name, trees)
        else:
            roles[name] = role
            names = [name]
            place = _put_below(name, _content(role, trees, weights))
        _refuse_second_owner(location, name, names, owners)
        directory = part.root.removeprefix(location.root).strip("/")
        whole = _with_config(name, catalog) if role == EMA else catalog
        parts.append(_Part(whole, f"{directory}/" if directory else "", place))
    joined = _join(parts, location, path, nested=True)
    return replace(joined, part_roles=roles)


def _refuse_second_owner(
    location: Location, part: str, trees: Sequence[str], owners: dict[str, str]
) -> None:
    for tree in trees:
        owner = owners.setdefault(tree, part)
        if owner != part:
            message = f"the parts {owner!r} and {part!r} both hold a tree {tree!r}"
            message = f"{location.resolved}: {message}; open one of them"
            raise SourceError("name-collision", message)


def open_torch_index(
    source: Files, location: Location, path: str, *, lenient: bool = False
) -> Catalog:
    """Join the torch files that a `pytorch_model.bin.index.json` names.

    Args:
        lenient: list what is wrong with files and entries in `Catalog.problems`, and go on.

    Raises:
        SourceError: `index-mismatch` if index and files do not name the same tensors.
    """
    from ema_ckpt.formats.safetensors.index import (
        check_names,
        lacking_shards,
        names_by_file,
        open_indexed,
        read_index,
    )
    from ema_ckpt.formats.torch_file.reader import open_torchfile

    index = location.names[0]
    weight_map, _ = read_index(source, index)
    problems: list[Problem] = []
    files = names_by_file(weight_map)
    parts: list[_Part] = []
    for file, names in files.items():
        with open_indexed(file, names, problems):
            catalog = open_torchfile(source, (file,), path, location.resolved)
            problems += check_names(index, file, {tensor.name for tensor in catalog.tensors}, names)
            parts.append(_Part(catalog, "", lambda path: path))
    if not lenient or not parts:
        refuse_problems(problems)
    joined = _join(parts, location, path, nested=False)
    left_out, warnings = lacking_shards(index, files)
    return replace(
        joined,
        files=dict.fromkeys(files, 0) | dict(joined.files),
        problems=tuple(problems),
        warnings=(*warnings, *joined.warnings),
        left_out=(*joined.left_out, *left_out),
    )


def _keep_trees(part: str, trees: Sequence[Tree]) -> Callable[[Path], Path]:
    """Leave entries in the trees they have; put what lies in none below the part's name."""
    names = [tree.name for tree in trees if tree.name]

    def place(path: Path) -> Path:
        if len(path) > 1:
            return path
        dotted = str(path[0])
        for name in names:
            if dotted.startswith(f"{name}."):
                return (name, dotted[len(name) + 1 :])
        return (part, dotted)

    return place


def _put_below(part: str, content: str | None) -> Callable[[Path], Path]:
    """Put entries below the part's name, which replaces the dictionary `content`."""

    def place(path: Path) -> Path:
        if content is not None and path[0] == content and len(path) > 1:
            return (part, *path[1:])
        return (part, *path)

    return place


def _content(role: str, trees: Sequence[Tree], weights: Sequence[Tree]) -> str | None:
    """Name the one dictionary of its role that a part consists of, as in `{"model": …}`."""
    if not weights:
        return None
    tree = weights[0]
    if role_of(tree.name) is None or tree.name in _LAYOUT_NAMES:
        return None
    for tensor in tree.tensors:
        if len(tensor.path) < 2 or not isinstance(tensor.path[1], str):
            return None
    if tree.role == role:
        return tree.name
    # An EMA saved like a model is its content only if nothing beside it describes the average.
    is_alone = len(trees) == 1
    return tree.name if is_alone and (role, tree.role) == (EMA, LIVE) else None


def _with_config(part: str, catalog: Catalog) -> Catalog:
    """Add the settings in the `config.json` that diffusers' EMAModel writes beside an average."""
    source = catalog.source
    if _CONFIG not in source.listing() or source.size(_CONFIG) > _MAX_CONFIG_NBYTES:
        return catalog
    from ema_ckpt.formats.sidecar import load_json

    document = load_json(source.read(_CONFIG, 0, source.size(_CONFIG)), f"{part}/{_CONFIG}")
    if not isinstance(document, Mapping) or "optimization_step" not in document:
        return catalog
    taken = {item.name for item in chain[Tensor | Object](catalog.tensors, catalog.objects)}
    objects = [
        Object(key, (key,), _CONFIG, inline=value, is_inline=True)
        for key, value in document.items()
        if key in _CONFIG_KEYS and key not in taken
    ]
    return replace(catalog, objects=(*catalog.objects, *objects))


def _join(parts: Sequence[_Part], location: Location, path: str, *, nested: bool) -> Catalog:
    reader = JoinedReader()
    source = JoinedFiles(location.root, [(part.directory, part.catalog.source) for part in parts])
    catalogs = [_relocate(part, reader) for part in parts]
    weights = next((catalog for catalog in catalogs if catalog.tensors), catalogs[0])
    return replace(
        _merge(catalogs),
        path=path,
        resolved=location.resolved,
        format=weights.format,
        source=source,
        reader=reader,
        nested=nested,
    )


def _relocate(part: _Part, reader: JoinedReader) -> Catalog:
    """Rename everything in a part as it is called in the joined checkpoint; register it there."""
    catalog, directory, place = part.catalog, part.directory, part.place
    tensors = [_relocate_tensor(part, tensor, reader) for tensor in catalog.tensors]
    names = [original.name for original in catalog.tensors]
    moved = dict(zip(names, tensors, strict=True))
    new_names = dict(zip(names, [tensor.name for tensor in tensors], strict=True))
    keys = {place(path): key for path, key in catalog.nesting.keys.items()}
    item_files = dict.fromkeys(map(part.file_name, catalog.item_files), part)
    reader.item_files |= item_files
    return replace(
        catalog,
        tensors=tuple(tensors),
        objects=tuple(_relocate_object(part, item, reader) for item in catalog.objects),
        files={directory + file: nbytes for file, nbytes in catalog.files.items()},
        archives=frozenset(map(part.file_name, catalog.archives)),
        item_files=frozenset(item_files),
        digests={moved[name].name: crc for name, crc in catalog.digests.items()},
        warnings=tuple(part.warnings()),
        nesting=Nesting(keys, frozenset(map(place, catalog.nesting.tuples))),
        ties=_relocate_ties(part, reader),
        rank_private=tuple(
            RankPrivate(place(path), directory + file, reason)
            for path, file, reason in catalog.rank_private
        ),
        unknown_entries=tuple(
            entry._replace(file=part.file_name(entry.file)) for entry in catalog.unknown_entries
        ),
        problems=tuple(part.problems(new_names)),
        find_mismatches=lambda: [(n, directory + text) for n, text in catalog.find_mismatches()],
    )


def _relocate_tensor(part: _Part, tensor: Tensor, reader: JoinedReader) -> Tensor:
    path, chunks = part.place(tensor.path), tensor.chunks
    name = _dotted(path)
    reader.tensors[name] = part, tensor
    if part.directory:
        chunks = tuple(chunk._replace(file=part.directory + chunk.file) for chunk in chunks)
    # Equal keys mean shared memory, so those of different parts must differ.
    storage = None if tensor.storage is None else (part.directory, *tensor.storage)
    subclass = tensor.subclass
    if subclass is not None:
        inner = {key: _relocate_tensor(part, one, reader) for key, one in subclass.parts.items()}
        subclass = subclass._replace(parts=inner)
    return replace(tensor, name=name, path=path, chunks=chunks, storage=storage, subclass=subclass)


def _relocate_object(part: _Part, item: Object, reader: JoinedReader) -> Object:
    path = part.place(item.path)
    name = _dotted(path)
    reader.objects[name] = part, item
    return replace(item, name=name, path=path, file=part.directory + item.file)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _relocate_ties(part: _Part, reader: JoinedReader) -> dict[str, str]:
    """Rename the names that a part dropped as tied; they follow the path of the one it kept."""
    catalog = part.catalog
    paths = {tensor.name: tensor.path for tensor in catalog.tensors} if catalog.ties else {}
    ties: dict[str, str] = {}
    for dropped, kept in catalog.ties.items():
        path = paths.get(kept, (kept,))
        parent = _dotted(path[:-1])
        last = dropped.removeprefix(f"{parent}.") if parent else dropped
        name, kept_name = _dotted(part.place((*path[:-1], last))), _dotted(part.place(path))
        ties[name] = kept_name
        if kept_name in reader.tensors:
            reader.tensors.setdefault(name, reader.tensors[kept_name])
    return ties


def _merge(catalogs: Sequence[Catalog]) -> Catalog:
    """Put the contents of catalogs together, in their order."""
    files: dict[str, int] = {}
    digests: dict[str, int] = {}
    keys: dict[Path, object] = {}
    ties: dict[str, str] = {}
    header_text: dict[str, str] = {}
    world_sizes = []
    for catalog in catalogs:
        files.update(catalog.files)
        digests.update(catalog.digests)
        keys.update(catalog.nesting.keys)
        ties.update(catalog.ties)
        for key, text in catalog.header_text.items():
            header_text.setdefault(key, text)
        if catalog.world_size is not None:
            world_sizes.append(catalog.world_size)
    every = chain.from_iterable
    joined: dict[str, Any] = {}
    for field in _CHAINED:
        joined[field] = tuple(every(getattr(catalog, field) for catalog in catalogs))
    return replace(
        catalogs[0],
        **joined,
        world_size=max(world_sizes, default=None),
        files=files,
        digests=digests,
        nesting=Nesting(keys, frozenset(every(catalog.nesting.tuples for catalog in catalogs))),
        ties=ties,
        order=(),
        header_text=header_text,
        archives=frozenset(every(catalog.archives for catalog in catalogs)),
        item_files=frozenset(every(catalog.item_files for catalog in catalogs)),
        made_by=" ".join(catalog.made_by for catalog in catalogs).strip(),
        find_mismatches=lambda: list(every(catalog.find_mismatches() for catalog in catalogs)),
    )
