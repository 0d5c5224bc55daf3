"""Read which box of which tensor one rank has, as sharded tensors pickle it, without torch.

A `DTensor` records mesh, placements and global shape (`torch/distributed/tensor/_dtensor_spec.py`),
a `ShardedTensor` the offsets of every shard (`torch/distributed/_shard/sharded_tensor/api.py`).
Their classes are only named in the pickle and never imported; torch 2.0 to 2.14 keep them in
different modules under one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeGuard

from ema_ckpt.core.box import Box, MeshCut, are_int64, placement_box, unravel
from ema_ckpt.core.dtypes import DType, by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.pickle.safe_globals import Global, Opaque
from ema_ckpt.formats.pickle.tensors import TensorRef
from ema_ckpt.formats.torch_file.lenient import Unreadable, strided_subclass

Ints = tuple[int, ...]
Fields = Mapping[str, object]
_HOME = "torch.distributed."
_MAX_DIMS = 64
_MAX_NESTED, _MAX_DEPTH = 16, 3  # of the axes of a mesh
_MAX_RANKS = 1 << 24


@dataclass(frozen=True, slots=True)
class ShardRef:
    """One rank's shards of a tensor of `shape`: boxes and their data; `ranks` share the tensor."""

    dtype: DType
    shape: Ints
    shards: tuple[tuple[Box, TensorRef], ...]
    ranks: int


class SubclassReader:
    """Reads `_rebuild_from_type_v2(function, class, args, state)`: a `ShardRef` if it is sharded.

    For one file, whose tensors mostly share one mesh.
    """

    def __init__(self) -> None:
        self._mesh: _Mesh | None = None

    def __call__(self, named: Global, args: tuple[object, ...]) -> object:
        match args:
            case [_, Global(module=module, name="DTensor"), _, state] if module.startswith(_HOME):
                read = self._read_dtensor
            case [_, Global(module=module, name="ShardedTensor"), _, state] if module.startswith(
                _HOME
            ):
                read = _read_sharded_tensor
            case _:
                return strided_subclass(named, args)
        try:
            return read(state)
        except SourceError as error:
            return Unreadable(named, "unsupported", str(error), args)

    def _read_dtensor(self, state: object) -> ShardRef:
        fields = _state_fields(state, "a DTensor")
        local, spec = fields.get("_local_tensor"), _fields(fields.get("_spec"), "DTensorSpec")
        mesh = self._read_mesh(_fields(spec.get("mesh"), "DeviceMesh"))
        match spec.get("tensor_meta"):  # a named tuple
            case Opaque(name="TensorMeta", args=(sizes, _, Global(module="torch", name=name))):
                shape, dtype = _ints(sizes), by_name(name)
            case _:
                raise _unsupported("a DTensor does not record its global shape and dtype")
        if not isinstance(local, TensorRef):
            raise _unsupported("the local part of a DTensor is no plain tensor")
        recorded = spec.get("placements")
        if not isinstance(recorded, tuple) or len(recorded) != len(mesh.sizes):
            problem = "does not record one placement for each dimension of its mesh"
            raise _unsupported(f"a DTensor {problem}")
        placements = [_placement(placement, len(shape)) for placement in recorded]
        if mesh.coordinate is None:
            return ShardRef(dtype, shape, (), prod(mesh.sizes))
        order = _shard_order(spec.get("shard_order"))
        box = placement_box(shape, mesh.sizes, mesh.coordinate, placements, order)
        if box is None:
            factors = [factor for _, factor in placements]
            problem = f"factors {factors} fit no dimensions of the mesh {mesh.sizes}"
            raise _unsupported(f"strided shards of {problem}")
        if local.shape != box.sizes or local.dtype != dtype:
            expected = f"{dtype.name} {list(box.sizes)} of {list(shape)}"
            local_form = f"{local.dtype.name} {list(local.shape)}"
            raise _unsupported(f"by its placements a rank has {expected}, it stored {local_form}")
        return ShardRef(dtype, shape, ((box, local),), prod(mesh.sizes))

    def _read_mesh(self, fields: Fields) -> _Mesh:
        """Read a mesh; the last one is kept."""
        mesh = self._mesh
        if mesh is None or mesh.fields is not fields:
            sizes = _mesh_sizes(fields)
            mesh = self._mesh = _Mesh(fields, sizes, _coordinate(fields, sizes))
        return mesh


class _Mesh(NamedTuple):
    """A device mesh, its fields as they are recorded, and where in it the rank that wrote stands.

    `coordinate` is None if it is outside.
    """

    fields: Fields
    sizes: Ints
    coordinate: Ints | None


def _unsupported(why: str) -> SourceError:
    return SourceError("unsupported", why)


def _placement(value: object, ndim: int) -> MeshCut:
    if not _is_from_torch(value):
        raise _unsupported("a DTensor has a placement of an unknown kind")
    if value.name == "Replicate":
        return None, 1
    if value.name not in ("Shard", "_StridedShard"):
        problem = f"a DTensor is placed as {value.name}, of which no rank has final values"
        raise _unsupported(f"{problem}; redistribute it first")
    fields = _state_fields(value.state, value.name)
    dim, factor = fields.get("dim", *value.args[:1]), fields.get("split_factor", 1)
    if type(dim) is not int or not -ndim <= dim < ndim or type(factor) is not int or factor < 1:
        raise _unsupported(f"a DTensor has a {value.name} without a dimension that it has")
    return dim % ndim, factor if value.name == "_StridedShard" else 1


def _shard_order(entries: object) -> dict[int, Ints] | None:
    """Read the mesh dimensions that cut each tensor dimension, outermost first, if recorded."""
    if not isinstance(entries, tuple) or not entries:
        return None
    order = {}
    for entry in entries:
        match entry:
            case Opaque(args=(int() as dim, mesh_dims)):
                order[dim] = _ints(mesh_dims)
            case _:
                raise _unsupported("a DTensor records the order of its shards in an unknown form")
    return order


def _coordinate(mesh: Fields, sizes: Ints) -> Ints | None:
    """Return where in its mesh the rank that wrote stands; None if it is outside."""
    recorded = mesh.get("_coordinate_on_dim")
    if recorded is None:
        ranks, rank = mesh.get("_flatten_mesh_list"), mesh.get("_rank")
        if not isinstance(ranks, tuple) or not are_int64((*ranks, rank)):
            return None
        if rank not in ranks or len(ranks) != prod(sizes):
            return None
        return unravel(ranks.index(rank), sizes)
    coordinate = _ints(recorded)
    if not Box(coordinate, (1,) * len(coordinate)).fits(sizes):
        raise _unsupported(f"a rank stands at {list(coordinate)} of a mesh of {list(sizes)}")
    return coordinate


def _mesh_sizes(mesh: Fields) -> Ints:
    grid, layout = mesh.get("mesh"), mesh.get("_layout")
    if isinstance(grid, TensorRef):  # torch up to 2.8
        return grid.shape
    if not _is_from_torch(layout):
        raise _unsupported("a DTensor does not record the shape of its mesh")
    fields = _state_fields(layout.state, "a mesh layout")
    axes, shape = fields.get("axes"), fields.get("shape")
    if isinstance(axes, tuple):  # torch 2.13: one flat layout an axis
        axis_states = [axis.state for axis in axes if isinstance(axis, Opaque)]
        shape = tuple([_state_fields(state, "an axis").get("shape") for state in axis_states])
    return tuple(map(_count_ranks, shape if isinstance(shape, tuple) else (shape,)))


def _count_ranks(shape: object, depth: int = 0) -> int:
    """Count the ranks along one axis, which may be flattened out of several."""
    if isinstance(shape, tuple) and len(shape) <= _MAX_NESTED and depth < _MAX_DEPTH:
        return prod([_count_ranks(inner, depth + 1) for inner in shape])
    if type(shape) is not int or not 0 < shape <= _MAX_RANKS:
        raise _unsupported("a DTensor does not record the shape of its mesh")
    return shape


def _read_sharded_tensor(state: object) -> ShardRef:
    match state:
        case (list() as local_shards, recorded, *_):
            metadata = _fields(recorded, "ShardedTensorMetadata")
        case _:
            raise _unsupported("a ShardedTensor is stored in an unknown form")
    listed = metadata.get("shards_metadata")
    if not isinstance(listed, list):
        raise _unsupported("a ShardedTensor does not record its shards")
    shape, shards = _ints(metadata.get("size")), []
    for shard in local_shards:
        fields = _fields(shard, "Shard")
        local, place = fields.get("tensor"), _fields(fields.get("metadata"), "ShardMetadata")
        box = Box(_ints(place.get("shard_offsets")), _ints(place.get("shard_sizes")))
        if not isinstance(local, TensorRef) or local.shape != box.sizes or not box.fits(shape):
            problem = "has a shard that does not fit its metadata"
            raise _unsupported(f"a ShardedTensor of {list(shape)} {problem}")
        shards.append((box, local))
    match metadata.get("tensor_properties"):
        case _ if shards:
            dtype = shards[0][1].dtype
        case Opaque(state=(Global(module="torch", name=dtype_name), *_)):
            dtype = by_name(dtype_name)
        case _:
            raise _unsupported("a ShardedTensor does not record its dtype")
    ranks = 1 + max(map(_owner, listed), default=0)
    return ShardRef(dtype, shape, tuple(shards), ranks)


def _owner(shard: object) -> int:
    placement = _fields(_fields(shard, "ShardMetadata").get("placement"), "_remote_device")
    rank = placement.get("_rank")
    return rank if type(rank) is int and 0 <= rank < _MAX_RANKS else 0


def _fields(value: object, name: str) -> Fields:
    """Return the attributes of an instance of torch's class `name`."""
    if not _is_from_torch(value) or value.name != name:
        raise _unsupported(f"expected a {name} of torch.distributed")
    return _state_fields(value.state, f"a {name}")


def _is_from_torch(value: object) -> TypeGuard[Opaque]:
    """Whether a value is an instance of one of torch.distributed's classes."""
    return isinstance(value, Opaque) and value.module.startswith(_HOME)


def _state_fields(state: object, subject: str) -> Fields:
    if isinstance(state, dict):
        return state
    # With __slots__ the state is a pair: attributes in __dict__, attributes in slots.
    fields: dict[str, object] = {}
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            fields.update(part)
        elif part is not None:
            raise _unsupported(f"{subject} is stored in an unknown form")
    return fields


def _ints(value: object) -> Ints:
    is_sequence = isinstance(value, list | tuple) and len(value) <= _MAX_DIMS
    if not is_sequence or not are_int64(value):  # type: ignore[arg-type]
        raise _unsupported("a sharded tensor has a shape, offsets or sizes that are no numbers")
    return tuple(value)  # type: ignore[arg-type]
