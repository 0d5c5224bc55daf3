"""Several checkpoints that belong together as one catalog: each part a tree of its role.

Files keep their names below the common directory, tensors their payloads; only names and paths are
put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from ema_ckpt.core.catalog import Catalog, Diagnostic, Files, Object, Payload, Reader, Tensor
from ema_ckpt.core.errors import SourceError, shown
from ema_ckpt.core.names import EMA, LIVE, OPTIMIZER, part_role, role_of
from ema_ckpt.discovery.found import Location
from ema_ckpt.formats.nesting import Nesting
from ema_ckpt.state_dicts.ties import recorded_ties
from ema_ckpt.state_dicts.tree import Tree, trees
from ema_ckpt.storage.files import open_files, safe_name

if TYPE_CHECKING:
    from ema_ckpt.formats.dcp.consistency import UnknownEntry

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
        known = trees(catalog)
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
    return replace(joined, extra={**joined.extra, "parts": roles})


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
    tensors = tuple(chain.from_iterable(_tensors(part, reader) for part in parts))
    objects = tuple(chain.from_iterable(_objects(part, reader) for part in parts))
    ties = _ties(parts)
    for dropped, kept in ties.items():
        reader.tie(dropped, kept)
    catalogs = [part.catalog for part in parts]
    worlds = [catalog.world_size for catalog in catalogs if catalog.world_size is not None]
    weights = next((catalog for catalog in catalogs if catalog.tensors), catalogs[0])
    return Catalog(
        path=path,
        resolved=found.resolved,
        format=weights.format,
        tensors=tensors,
        objects=objects,
        source=JoinedFiles(found.root, [(part.folder, part.catalog.source) for part in parts]),
        reader=reader,
        nested=nested,
        world_size=max(worlds, default=None),
        files={
            part.folder + file: nbytes
            for part in parts
            for file, nbytes in part.catalog.files.items()
        },
        digests=dict(chain.from_iterable(map(_digests, parts))),
        warnings=tuple(chain.from_iterable(map(_warnings, parts))),
        extra={
            "nesting": _nesting(parts),
            "ties": ties,
            "private": tuple(_private(parts)),
            "contradictions": partial(_contradictions, parts),
            "unread": tuple(_unread(parts)),
            "metadata": _text(parts),
        },
    )


def _tensors(part: _Part, reader: JoinedReader) -> Iterable[Tensor]:
    for tensor in part.catalog.tensors:
        path = part.place(tensor.path)
        name = ".".join(map(str, path))
        reader.add(name, part.catalog, tensor, part.folder)
        chunks = (
            tuple(c._replace(file=part.folder + c.file) for c in tensor.chunks)
            if part.folder
            else tensor.chunks
        )
        yield replace(
            tensor, name=name, path=path, chunks=chunks, storage=_storage(tensor, part.folder)
        )


def _storage(tensor: Tensor, folder: str) -> tuple[object, ...] | None:
    # Equal keys mean shared memory, so those of different parts must differ.
    return None if tensor.storage is None else (folder, *tensor.storage)


def _objects(part: _Part, reader: JoinedReader) -> Iterable[Object]:
    for item in part.catalog.objects:
        path = part.place(item.path)
        name = ".".join(map(str, path))
        reader.add(name, part.catalog, item, part.folder)
        yield replace(item, name=name, path=path, file=part.folder + item.file)


def _digests(part: _Part) -> Iterable[tuple[str, int]]:
    digests = part.catalog.digests
    for tensor in part.catalog.tensors if digests else ():
        if tensor.name in digests:
            yield ".".join(map(str, part.place(tensor.path))), digests[tensor.name]


def _warnings(part: _Part) -> Iterable[Diagnostic]:
    folder = part.folder.rstrip("/")
    return (
        Diagnostic(w.code, f"{folder}: {w.message}" if folder else w.message)
        for w in part.catalog.warnings
    )


def _nesting(parts: Sequence[_Part]) -> Nesting:
    keys: dict[Path, object] = {}
    tuples: set[Path] = set()
    for part in parts:
        nesting = part.catalog.extra.get("nesting")
        if isinstance(nesting, Nesting):
            keys.update((part.place(path), key) for path, key in nesting.keys.items())
            tuples.update(map(part.place, nesting.tuples))
    return Nesting(keys, frozenset(tuples))


def _private(parts: Sequence[_Part]) -> Iterable[tuple[Path, str, str]]:
    """What the rank files of a part hold for single ranks only."""
    for part in parts:
        found = part.catalog.extra.get("private")
        for path, file, reason in found if isinstance(found, tuple) else ():
            yield part.place(path), part.folder + file, reason


def _text(parts: Sequence[_Part]) -> dict[str, str]:
    """Text of the headers of safetensors parts; of two under one key, the first."""
    text: dict[str, str] = {}
    for part in parts:
        found, known = part.catalog.extra.get("metadata"), recorded_ties(part.catalog)
        for key, value in found.items() if isinstance(found, Mapping) else ():
            if key not in known:
                text.setdefault(key, value)
    return text


def _contradictions(parts: Sequence[_Part]) -> tuple[tuple[str, str], ...]:
    """What the metadata of a part says twice and differently."""
    told = [(part, part.catalog.extra.get("contradictions")) for part in parts]
    return tuple(
        (name, part.folder + text) for part, ask in told if callable(ask) for name, text in ask()
    )


def _unread(parts: Sequence[_Part]) -> Iterable[UnknownEntry]:
    """Entries of unknown classes."""
    for part in parts:
        found = part.catalog.extra.get("unread")
        for one in found if isinstance(found, tuple) else ():
            yield replace(one, file=part.folder + one.file if one.file else "")


def _ties(parts: Sequence[_Part]) -> dict[str, str]:
    """Names that a part dropped as equal to one that it kept; they follow the kept one's path."""
    ties: dict[str, str] = {}
    for part in parts:
        found = part.catalog.extra.get("ties")
        if not isinstance(found, Mapping) or not found:
            continue
        paths = {tensor.name: tensor.path for tensor in part.catalog.tensors}
        for dropped, kept in found.items():
            path = paths.get(kept, (kept,))
            home = ".".join(map(str, path[:-1]))
            last = dropped[len(home) + 1 :] if home and dropped.startswith(f"{home}.") else dropped
            moved = (part.place((*path[:-1], last)), part.place(path))
            ties[".".join(map(str, moved[0]))] = ".".join(map(str, moved[1]))
    return ties
