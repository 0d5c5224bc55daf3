"""Sharded tensors as one rank pickles them: which box of which tensor the rank holds, read without
torch.

A `DTensor` records mesh, placements and global shape (`torch/distributed/tensor/_dtensor_spec.py`),
a `ShardedTensor` the offsets of every shard (`torch/distributed/_shard/sharded_tensor/api.py`).
Their classes are only named in the pickle and never imported; torch 2.0 to 2.14 keep them in
different modules under one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ema_ckpt.core.box import Box, MeshCut, placement_box
from ema_ckpt.core.dtypes import DType, by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.pickle.safe_globals import Global, Opaque
from ema_ckpt.formats.pickle.tensors import TensorRef
from ema_ckpt.formats.torch_file.lenient import Unreadable, strided_subclass

Ints = tuple[int, ...]
_HOME = "torch.distributed."
_MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class ShardRef:
    """What one rank holds of a tensor of `shape`: boxes and the strided data in them; `ranks` share
    it in all.
    """

    dtype: DType
    shape: Ints
    pieces: tuple[tuple[Box, TensorRef], ...]
    ranks: int


@dataclass(frozen=True, slots=True)
class _Mesh:
    """Sizes of a device mesh, and where in it the rank that wrote stands; None if it is outside."""

    sizes: Ints
    coordinate: Ints | None


def read_subclass(found: Global, args: tuple[object, ...]) -> object:
    """What `_rebuild_from_type_v2(function, class, args, state)` stands for: a `ShardRef` if it is
    sharded.
    """
    match args:
        case [_, Global(module=module, name="DTensor"), _, state] if module.startswith(_HOME):
            read = _dtensor
        case [_, Global(module=module, name="ShardedTensor"), _, state] if module.startswith(_HOME):
            read = _sharded_tensor
        case _:
            return strided_subclass(found, args)
    try:
        return read(state)
    except SourceError as error:
        return Unreadable(found, "unsupported", str(error), args)


def _fail(why: str) -> SourceError:
    return SourceError("unsupported", why)


# DTensor.


def _dtensor(state: object) -> ShardRef:
    fields = _fields_of(state, "a DTensor")
    local, spec = fields.get("_local_tensor"), _fields(fields.get("_spec"), "DTensorSpec")
    mesh = _mesh(_fields(spec.get("mesh"), "DeviceMesh"))
    shape, dtype = _global_form(spec.get("tensor_meta"))
    if not isinstance(local, TensorRef):
        raise _fail("the local part of a DTensor is no plain tensor")
    found = spec.get("placements")
    if not isinstance(found, tuple) or len(found) != len(mesh.sizes):
        raise _fail("a DTensor does not record one placement for each dimension of its mesh")
    placements = [_placement(one, len(shape)) for one in found]
    ranks = prod(mesh.sizes)
    if mesh.coordinate is None:
        return ShardRef(dtype, shape, (), ranks)
    order = _order(spec.get("shard_order"))
    box = placement_box(shape, mesh.sizes, mesh.coordinate, placements, order)
    if box is None:
        factors = [factor for _, factor in placements]
        raise _fail(
            f"strided shards of factors {factors} fit no dimensions of the mesh {mesh.sizes}"
        )
    if local.shape != box.sizes or local.dtype != dtype:
        held = f"{local.dtype.name} {list(local.shape)}"
        raise _fail(
            f"by its placements a rank holds {dtype.name} {list(box.sizes)} of {list(shape)}, it has {held}"
        )
    return ShardRef(dtype, shape, ((box, local),), ranks)


def _global_form(meta: object) -> tuple[Ints, DType]:
    # TensorMeta is a named tuple (shape, stride, dtype); the dtype is a global.
    if isinstance(meta, Opaque) and meta.name == "TensorMeta" and len(meta.args) == 3:
        shape, _, dtype = meta.args
        if isinstance(dtype, Global) and dtype.module == "torch":
            return _ints(shape), by_name(dtype.name)
    raise _fail("a DTensor does not record its global shape and dtype")


def _placement(value: object, ndim: int) -> MeshCut:
    if not isinstance(value, Opaque) or not value.module.startswith(_HOME):
        raise _fail("a DTensor has a placement of an unknown kind")
    if value.name == "Replicate":
        return None, 1
    if value.name not in ("Shard", "_StridedShard"):
        raise _fail(
            f"a DTensor is placed as {value.name}, of which no rank holds final values; redistribute it first"
        )
    fields = _fields_of(value.state, value.name) if value.state is not None else {}
    dim, factor = fields.get("dim", next(iter(value.args), None)), fields.get("split_factor", 1)
    if type(dim) is not int or not -ndim <= dim < ndim or type(factor) is not int or factor < 1:
        raise _fail(f"a DTensor has a {value.name} without a dimension that it has")
    return dim % ndim, factor if value.name == "_StridedShard" else 1


def _order(entries: object) -> dict[int, Ints] | None:
    """The mesh dimensions that cut each tensor dimension, outermost first, where a DTensor records
    that.
    """
    if not isinstance(entries, tuple) or not entries:
        return None
    order = {}
    for entry in entries:
        if not isinstance(entry, Opaque) or len(entry.args) != 2 or type(entry.args[0]) is not int:
            raise _fail("a DTensor records the order of its shards in an unknown form")
        order[entry.args[0]] = _ints(entry.args[1])
    return order


def _mesh(fields: Mapping[str, object]) -> _Mesh:
    sizes = _mesh_sizes(fields)
    coordinate = fields.get("_coordinate_on_dim")
    if coordinate is None:
        ranks, rank = fields.get("_flatten_mesh_list"), fields.get("_rank")
        if not isinstance(ranks, tuple) or rank not in ranks or len(ranks) != prod(sizes):
            return _Mesh(sizes, None)
        coordinate = _unravel(ranks.index(rank), sizes)
    found = _ints(coordinate)
    if len(found) != len(sizes) or any(
        not 0 <= at < size for at, size in zip(found, sizes, strict=True)
    ):
        raise _fail(f"a rank stands at {list(found)} of a mesh of {list(sizes)}")
    return _Mesh(sizes, found)


def _mesh_sizes(fields: Mapping[str, object]) -> Ints:
    mesh, layout = fields.get("mesh"), fields.get("_layout")
    if isinstance(mesh, TensorRef):  # torch up to 2.8
        return mesh.shape
    if not isinstance(layout, Opaque) or not layout.module.startswith(_HOME):
        raise _fail("a DTensor does not record the shape of its mesh")
    inner = _fields_of(layout.state, "a mesh layout")
    axes = inner.get("axes")
    if isinstance(axes, tuple):  # torch 2.13: one flat layout an axis
        return tuple(
            _count(_fields_of(axis.state, "an axis").get("shape"))
            for axis in axes
            if isinstance(axis, Opaque)
        )
    shape = inner.get("shape")
    return tuple(map(_count, shape)) if isinstance(shape, tuple) else (_count(shape),)


def _count(shape: object) -> int:
    """Ranks along one axis, which may be flattened out of several."""
    if isinstance(shape, tuple) and len(shape) <= _MAX_DIMS:
        return prod(map(_count, shape))
    if type(shape) is not int or not 0 < shape <= 1 << 24:
        raise _fail("a DTensor does not record the shape of its mesh")
    return shape


def _unravel(index: int, sizes: Ints) -> Ints:
    place: list[int] = []
    for size in reversed(sizes):
        index, at = divmod(index, size)
        place.insert(0, at)
    return tuple(place)


# ShardedTensor.


def _sharded_tensor(state: object) -> ShardRef:
    if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[0], list):
        raise _fail("a ShardedTensor is stored in an unknown form")
    metadata = _fields(state[1], "ShardedTensorMetadata")
    listed = metadata.get("shards_metadata")
    if not isinstance(listed, list):
        raise _fail("a ShardedTensor does not record its shards")
    shape, pieces = _ints(metadata.get("size")), []
    for shard in state[0]:
        fields = _fields(shard, "Shard")
        local, where = fields.get("tensor"), _fields(fields.get("metadata"), "ShardMetadata")
        box = Box(_ints(where.get("shard_offsets")), _ints(where.get("shard_sizes")))
        if not isinstance(local, TensorRef) or local.shape != box.sizes or not box.fits(shape):
            raise _fail(
                f"a ShardedTensor of {list(shape)} has a shard that does not fit its metadata"
            )
        pieces.append((box, local))
    dtype = pieces[0][1].dtype if pieces else _dtype_of(metadata.get("tensor_properties"))
    return ShardRef(dtype, shape, tuple(pieces), 1 + max(map(_owner, listed), default=0))


def _owner(shard: object) -> int:
    placement = _fields(_fields(shard, "ShardMetadata").get("placement"), "_remote_device")
    rank = placement.get("_rank")
    return rank if type(rank) is int and 0 <= rank < 1 << 24 else 0


def _dtype_of(properties: object) -> DType:
    if isinstance(properties, Opaque) and isinstance(properties.state, tuple) and properties.state:
        first = properties.state[0]
        if isinstance(first, Global) and first.module == "torch":
            return by_name(first.name)
    raise _fail("a ShardedTensor does not record its dtype")


# Stand-ins of any class.


def _fields(value: object, name: str) -> Mapping[str, object]:
    """The attributes of an instance of torch's class `name`."""
    if not isinstance(value, Opaque) or value.name != name or not value.module.startswith(_HOME):
        raise _fail(f"expected a {name} of torch.distributed")
    return _fields_of(value.state, f"a {name}")


def _fields_of(state: object, what: str) -> Mapping[str, object]:
    # With __slots__ the state is a pair: attributes in __dict__, attributes in slots.
    parts = state if isinstance(state, tuple) else (state,)
    fields: dict[str, object] = {}
    for part in parts:
        if part is not None and not isinstance(part, dict):
            raise _fail(f"{what} is stored in an unknown form")
        fields.update((str(key), value) for key, value in (part or {}).items())
    return fields


def _ints(value: object) -> Ints:
    if (
        isinstance(value, list | tuple)
        and len(value) <= _MAX_DIMS
        and all(type(one) is int for one in value)
    ):
        return tuple(value)
    raise _fail("a sharded tensor has a shape, offsets or sizes that are no numbers")
