"""Read `metadata.pkl` of torch_checkpointing: which rank has which box of which tensor, and where.

It is a pickle of plain containers (torch_checkpointing/distributed_metadata.py, version 2.0):

    {"metadata": {item: {"nested_path_to_metadata": {'["enc.weight"]': [
                             {"sharding_metadata": {"type", "data"}, "ranks": (0, 1)}, ...]},
                         "rank_to_layout_info": {0: layout, 1: None}}},
     "world_size": 2, "version": "2.0"}

A layout is `{"file_path", "serialization_format"}`; ranks without one have `<item>_<rank>.pt`.
Only items that were given a resharder are recorded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from reprlib import repr as brief  # bounded: a hostile value may nest without end
from typing import Any, NamedTuple

from ema_ckpt.core.box import Box, MeshCut, placement_box, unravel
from ema_ckpt.core.catalog import Files
from ema_ckpt.core.dtypes import DType, by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.pickle.machine import loads
from ema_ckpt.formats.sidecar import load_json

Ints = tuple[int, ...]
Path = tuple[str | int, ...]
TORCH, SAFETENSORS, JSON = "TorchSerialization", "SafetensorsSerialization", "JsonSerialization"
_VERSION = "2.0"
_MAX_NBYTES = 1 << 32
_MAX_DIMS = 64
_MAX_TEXT = 1 << 16
_ENTRY_NBYTES = 2  # at least, of a path, a group, a rank, a box or a placement in the file
_DEFAULT_FILE = re.compile(r"(.+)_(0|[1-9]\d*)\.pt", re.ASCII | re.DOTALL)
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


class Place(NamedTuple):
    """What one rank has of a tensor: boxes of it, each with its corner in the local tensor.

    `ranks` is the number of those that share the tensor, `local` the shape that the local one must
    have, if the boxes are all of it.
    """

    shape: Ints
    dtype: DType
    boxes: tuple[tuple[Box, Ints], ...]
    ranks: int
    local: Ints | None = None


class Group(NamedTuple):
    """Ranks that record the same of a tensor; `place` raises SourceError for what is not read."""

    ranks: frozenset[int]
    place: Callable[[int], Place]


def group_of(groups: Iterable[Group], rank: int) -> Group | None:
    """The group that `rank` is in, or None."""
    return next((group for group in groups if rank in group.ranks), None)


class ItemFile(NamedTuple):
    """The file of one rank for one item, and the name of its serialization."""

    item: str
    rank: int
    name: str
    serialization: str = TORCH


class Item(NamedTuple):
    """One item: its files by rank, and the groups of each path in it."""

    files: Mapping[int, ItemFile]
    groups: Mapping[Path, Sequence[Group]]

    def required_ranks(self) -> frozenset[int]:
        """Ranks that have something of it."""
        found: set[frozenset[int]] = set()
        for groups in self.groups.values():
            found.update(group.ranks for group in groups)
        return frozenset().union(*found)


class Metadata(NamedTuple):
    """The items that are recorded, by name, and the number of ranks."""

    file: str
    items: Mapping[str, Item]
    world_size: int


def is_metadata(first: bytes) -> bool:
    """Whether the first bytes of a file are those of such a pickle."""
    if not first.startswith(b"\x80") or b"\x08metadata" not in first[:32]:
        return False
    return b"nested_path_to_metadata" in first or b"world_size" in first  # without any item


def read_metadata(source: Files, file: str) -> Metadata:
    """Read the metadata of a checkpoint.

    Raises:
        SourceError: `unreadable`, `missing-file`, `unsupported` for another version. UnsafeError:
            `unsafe-pickle` for any global, as there is none in such a file.
    """
    nbytes = min(source.size(file), _MAX_NBYTES)
    document: Any = loads(source.read(file, 0, nbytes), {}, where=file)
    parser = _Groups(nbytes // _ENTRY_NBYTES + _MAX_DIMS)
    try:
        version = document.get("version", "1.0")
        if version != _VERSION:
            message = (
                f"{file}: version {brief(version)} of torch_checkpointing's metadata; expected"
            )
            raise SourceError("unsupported", f"{message} {_VERSION!r}", file=file)
        world_size = _count(document["world_size"])
        recorded = document["metadata"].items()
        items = {_text(name): _item(_text(name), value, file, parser) for name, value in recorded}
    except _MALFORMED as error:
        message = f"{file}: damaged, or no metadata of torch_checkpointing ({error!r})"
        raise SourceError("unreadable", message, file=file) from None
    return Metadata(file, items, world_size)


def files_of(metadata: Metadata, listing: Iterable[str]) -> list[ItemFile]:
    """List the files of a checkpoint: those recorded, and those of items that are not recorded.

    A rank that has nothing of an item may have no file.
    """
    present = set(listing)
    files = []
    for item in metadata.items.values():
        required = item.required_ranks()
        for rank, file in sorted(item.files.items()):
            if rank in required or file.name in present:
                files.append(file)
    for name in sorted(present):
        match = _DEFAULT_FILE.fullmatch(name)
        is_other = match is not None and match[1] not in metadata.items
        if match and is_other and int(match[2]) < metadata.world_size:
            files.append(ItemFile(match[1], int(match[2]), name))
    return files


def _item(name: str, value: Any, file: str, parser: _Groups) -> Item:
    files = {}
    parser.spend(len(value["rank_to_layout_info"]), len(value["nested_path_to_metadata"]))
    for rank, layout in value["rank_to_layout_info"].items():
        files[_count(rank)] = _item_file(name, _count(rank), layout)
    groups = {}
    for text, listed in value["nested_path_to_metadata"].items():
        parser.spend(len(listed), (len(name) + len(text)) // _MAX_DIMS)
        groups[_path(text, file)] = [parser.parse(group) for group in listed]
    return Item(files, groups)


def _item_file(item: str, rank: int, layout: Any) -> ItemFile:
    if layout is None:
        return ItemFile(item, rank, f"{item}_{rank}.pt")
    serialization = layout["serialization_format"]["type"]
    return ItemFile(item, rank, _text(layout["file_path"]), _text(serialization))


def _path(text: str, file: str) -> Path:
    parts = load_json(text, file)
    if not isinstance(parts, list) or not all(type(part) in (str, int) for part in parts):
        raise ValueError(f"the path {text!r}")
    return tuple(parts)


class _Groups:
    """Parses groups; what many paths refer to, the ranks and their mesh, once."""

    def __init__(self, most: int) -> None:
        self._known: dict[int, Any] = {}
        self._spare = most

    def spend(self, *counts: int) -> None:
        """Count what is parsed: references of a few bytes could be endless."""
        self._spare -= sum(counts)
        if self._spare < 0:
            raise ValueError("the same entries are listed over and over")

    def parse(self, group: Any) -> Group:
        ranks, sharding = group["ranks"], group["sharding_metadata"]
        kind, data = sharding["type"], sharding["data"]
        numbers: frozenset[int] = self._once(ranks, lambda: frozenset(map(_count, ranks)))
        if kind == "DTensorShardingMetadata":
            mesh = data["mesh_spec"]
            self.spend(len(data["placements"]))
            return Group(numbers, _placed_by_mesh(data, self._once(mesh, lambda: _mesh(mesh))))
        if kind == "default_tensor_v1":
            self.spend(len(data["global_offsets"]))
            return Group(numbers, _placed_by_offsets(data))
        kind = brief(kind)

        def refuse(_rank: int) -> Place:
            problem = f"its place is recorded as {kind}, a kind that is not read"
            raise SourceError("unsupported", f"{problem}; gather it before it is saved")

        return Group(numbers, refuse)

    def _once(self, value: Any, parse: Callable[[], Any]) -> Any:
        if id(value) not in self._known:
            self._known[id(value)] = parse()
        return self._known[id(value)]


class _Mesh(NamedTuple):
    sizes: Ints
    position: Mapping[int, int]  # of each rank, row-major


def _mesh(value: Any) -> _Mesh:
    sizes, ranks = _ints(value["mesh_shape"]), value["mesh_data"]
    position = {_count(rank): index for index, rank in enumerate(ranks)}
    if len(position) != len(ranks) or len(ranks) != prod(sizes):
        raise ValueError("a mesh that its ranks do not fill")
    return _Mesh(sizes, position)


def _placed_by_mesh(data: Any, mesh: _Mesh) -> Callable[[int], Place]:
    """Placements on a mesh of ranks, as a DTensor has."""
    shape, dtype = _ints(data["global_shape"]), _text(data["dtype"])
    cuts = [_cut(placement, len(shape)) for placement in data["placements"]]
    if len(cuts) != len(mesh.sizes):
        raise ValueError("placements that do not fit their mesh")

    def place(rank: int) -> Place:
        if rank not in mesh.position:
            raise SourceError("index-mismatch", f"rank {rank} is not in the mesh that it is on")
        coordinate = unravel(mesh.position[rank], mesh.sizes)
        box = placement_box(shape, mesh.sizes, coordinate, cuts)
        if box is None:
            problem = f"strided shards {cuts} fit no dimensions of the mesh {list(mesh.sizes)}"
            raise SourceError("unsupported", problem)
        boxes = ((box, (0,) * len(shape)),)
        return Place(shape, by_name(dtype), boxes, len(mesh.position), box.sizes)

    return place


def _placed_by_offsets(data: Any) -> Callable[[int], Place]:
    """Boxes of the global tensor, each with its corner in the local one."""
    shape, dtype = _ints(data["global_shape"]), _text(data["dtype"])
    corners = zip(data["global_offsets"], data["local_sizes"], data["local_offsets"], strict=True)
    boxes = [(Box(_ints(begin), _ints(sizes)), _ints(local)) for begin, sizes, local in corners]
    for box, local in boxes:
        if not box.fits(shape) or len(local) != len(shape):
            raise ValueError("boxes outside of their tensor")
    return lambda _rank: Place(shape, by_name(dtype), tuple(boxes), 1)


def _cut(placement: Any, ndim: int) -> MeshCut:
    kind = placement["type"]
    if kind == "Replicate":
        return None, 1
    if kind not in ("Shard", "StridedShard"):
        raise ValueError(f"a placement {brief(kind)}")
    dim, factor = placement["dim"], placement.get("split_factor", 1)
    if type(dim) is not int or not -ndim <= dim < ndim or type(factor) is not int or factor < 1:
        raise ValueError(f"a {kind} of dimension {brief(dim)}")
    return dim % ndim, factor


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError(f"{brief(value)} where a name is expected")
    return value


def _ints(value: Any) -> Ints:
    if not isinstance(value, list | tuple) or len(value) > _MAX_DIMS:
        raise ValueError("a shape that is none")
    return tuple(map(_count, value))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("no number where one is expected, or a huge one")
    return value
