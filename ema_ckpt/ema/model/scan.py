"""Which elements of a model this rank holds: its parameters and buffers as local shards under
canonical names.

With `watch` the only module that touches private names of torch; `tests/ema/test_private_names.py`
asserts them. What is found is always what the optimizer steps, whether or not a wrapper shows
something else at the moment: FSDP2's `FSDPParam.sharded_param`, FSDP1's `_local_shard` (before the
first forward `flat_param.data`).
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ema_ckpt.core.box import whole
from ema_ckpt.core.errors import StateError, UsageError
from ema_ckpt.ema.model.shards import ReplicaGroup, Shard, TrackedShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Edge = tuple[dict[str, Any], str, object]


@dataclass(frozen=True, slots=True, eq=False)
class ModelShards:
    """All parameters and buffers of a model on this rank, tied ones once, in the order of
    `named_parameters()`.

    `edges` are the registrations of its modules, (children of the parent, name, child).
    """

    parameters: tuple[TrackedShard, ...]
    buffers: tuple[TrackedShard, ...]
    edges: tuple[Edge, ...]


def scan_model(model: nn.Module) -> ModelShards:
    """Find every parameter and buffer of `model` as this rank holds it. Runs no collective.

    Raises:
        StateError: a parameter is on `meta`, emptied by another framework, not initialised, or laid
            out in a way that cannot be described by boxes.
    """
    managed = _managed(model)
    parameters: dict[Hashable, TrackedShard] = {}
    buffers: dict[Hashable, TrackedShard] = {}
    names: dict[Hashable, list[str]] = {}
    edges: list[Edge] = []
    for prefix, module, ddp in _walk(model, "", None):
        edges += [(module._modules, name, child) for name, child in module._modules.items()]
        for token, held in chain(
            _parameters(module, prefix, ddp, managed), _buffers(module, prefix)
        ):
            names.setdefault(token, []).append(held.shard.fqn)
            (parameters if held.shard.is_parameter else buffers).setdefault(token, held)
    return ModelShards(
        _with_aliases(parameters, names), _with_aliases(buffers, names), tuple(edges)
    )


def reshard(model: nn.Module) -> None:
    """Make every FSDP module forget its gathered parameters, so that the next forward gathers the
    shards anew.

    Without it a swap right after a forward is lost: roots, and all modules with
    `reshard_after_forward=False` or `SHARD_GRAD_OP`, stay unsharded after a forward without
    backward. Runs no collective.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _fsdp2_groups(module):
                # The public reshard() does nothing to a module whose last forward ended in an
                # exception.
                group.wait_for_unshard()
                group._to_sharded()
        elif isinstance(module, FullyShardedDataParallel):
            _reshard_flat(module._handle)
    torch.clear_autocast_cache()


def is_state_init() -> bool:
    """Whether the caller runs inside the dummy step by which torch creates the state of a fresh
    optimizer.

    `get_optimizer_state_dict` and `set_optimizer_state_dict` make it, with zero gradients and
    learning rate 0.
    """
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if module is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not module._init_optim_state.__code__:
        frame = frame.f_back
    return frame is not None


@dataclass(frozen=True, slots=True, eq=False)
class _Ddp:
    """The DDP wrapper around a module: who holds copies, and of which canonical names it does not
    see to that.
    """

    replica: ReplicaGroup
    ignored: frozenset[str]


def canonical_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(canonical prefix, module) for each module in the order of `model.state_dict()`, as often as
    it is registered.
    """
    return ((prefix, module) for prefix, module, _ in _walk(model, "", None))


def _walk(
    module: nn.Module, prefix: str, ddp: _Ddp | None
) -> Iterator[tuple[str, nn.Module, _Ddp | None]]:
    """(canonical prefix, module, the DDP around it) for each module, as often as it is
    registered.
    """
    from torch.nn.parallel import DistributedDataParallel

    yield prefix, module, ddp
    inner = _wrapped_child(module)
    if isinstance(module, DistributedDataParallel):
        ignored = frozenset(prefix + _clean(name) for name in module.parameters_to_ignore)
        ddp = _Ddp(_replica(module.process_group), ignored)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, prefix if name == inner else f"{prefix}{name}.", ddp)


def _wrapped_child(module: nn.Module) -> str | None:
    """The child's name that is no part of a canonical name, if `module` is a wrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(module, DistributedDataParallel):
        return "module"
    if isinstance(module, FullyShardedDataParallel):
        return "_fsdp_wrapped_module"
    if isinstance(module, ActivationWrapper):
        return "_checkpoint_wrapped_module"
    # Importing the compiler costs seconds, and nothing is compiled as long as nobody has.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return (
        "_orig_mod"
        if compiler is not None and isinstance(module, compiler.OptimizedModule)
        else None
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Managed:
    """Who manages the parameters that a wrapper has replaced, by id of the module and name there.

    A manager is an `FSDPParam`, or an FSDP1 module with an index into its flat parameter.
    """

    by_module: dict[int, dict[str, Any]]
    flats: frozenset[int]  # ids of the flat parameters


def _managed(model: nn.Module) -> _Managed:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    found: dict[int, dict[str, Any]] = {}
    flats: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for fsdp_param in _fsdp2_params(module):
                info = fsdp_param._module_info
                found.setdefault(id(info.module), {})[info.param_name] = fsdp_param
                for shared, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    found.setdefault(id(shared), {})[name] = fsdp_param
        elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flats.add(id(module._handle.flat_param))
            _add_flat(found, module)
    return _Managed(found, frozenset(flats))


def _fsdp2_params(module: Any) -> list[Any]:
    return [fsdp_param for group in _fsdp2_groups(module) for fsdp_param in group.fsdp_params]


def _fsdp2_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    # Older releases have one group per module, not a list of them.
    groups = (
        state._fsdp_param_groups
        if hasattr(state, "_fsdp_param_groups")
        else [state._fsdp_param_group]
    )
    return [group for group in groups if group is not None]


def _add_flat(found: dict[int, dict[str, Any]], fsdp: Any) -> None:
    flat = fsdp._handle.flat_param
    for index, info in enumerate(flat._param_infos):
        found.setdefault(id(info.module), {})[info.param_name] = (fsdp, index)
    for info in flat._shared_param_infos:
        found.setdefault(id(info.module), {})[info.param_name] = found[id(info.prim_module)][
            info.prim_param_name
        ]


def _parameters(
    module: nn.Module, prefix: str, ddp: _Ddp | None, managed: _Managed
) -> Iterator[tuple[Hashable, TrackedShard]]:
    """(identity, parameter) for each parameter registered in `module` itself."""
    managers = managed.by_module.get(id(module), {})
    for name in dict.fromkeys(chain(module._parameters, managers)):
        fqn, manager, live = prefix + name, managers.get(name), module._parameters.get(name)
        if isinstance(manager, tuple):
            yield (id(manager[0]), manager[1]), _flat_held(fqn, *manager)
        elif manager is not None:
            yield id(manager), _fsdp2_held(fqn, manager)
        elif live is not None and id(live) not in managed.flats:
            yield id(live), _plain_held(fqn, module._parameters, name, live, ddp)
    for name, live in vars(module).items() if ddp is not None else ():
        # DDP over a slice of a mesh swaps its parameters for DTensors before each forward, and
        # torch 2.13 leaves them behind as plain attributes afterwards
        # (torch.distributed.tensor.parallel.ddp).
        if isinstance(live, torch.Tensor) and hasattr(live, "_local_tensor") and live.requires_grad:
            yield id(live), _plain_held(prefix + name, vars(module), name, live, ddp)


def _buffers(module: nn.Module, prefix: str) -> Iterator[tuple[Hashable, TrackedShard]]:
    for name, live in module._buffers.items():
        if live is not None:
            shard = _whole_shard(prefix + name, live, is_parameter=False)
            persistent = name not in module._non_persistent_buffers_set
            yield (
                id(live),
                TrackedShard(
                    shard, live, False, persistent, module._buffers, name, live, _pointer(live)
                ),
            )


def _plain_held(
    fqn: str, place: dict[str, Any], name: str, live: torch.Tensor, ddp: _Ddp | None
) -> TrackedShard:
    _refuse_placeholder(fqn, live)
    replica = None if ddp is None or fqn in ddp.ignored else ddp.replica
    # DDP over a slice of a mesh shows DTensors as local tensors before a forward.
    if hasattr(live, "_st_info"):
        shard = _dtensor_shard(fqn, live._st_info, live.detach(), replica, True)
    else:
        shard = _whole_shard(fqn, live, is_parameter=True, replica=replica)
    return TrackedShard(shard, live, live.requires_grad, True, place, name, live, _pointer(live))


def _whole_shard(
    fqn: str, live: torch.Tensor, *, is_parameter: bool, replica: ReplicaGroup | None = None
) -> Shard:
    """The shard of a tensor that no data-parallel wrapper has cut: a plain one, or a DTensor of
    tensor parallelism.
    """
    if hasattr(live, "_local_tensor"):
        dtensor: Any = live
        return _dtensor_shard(fqn, dtensor._spec, dtensor._local_tensor, replica, is_parameter)
    shape = tuple(live.shape)
    boxes = (whole(shape),) if live.numel() else ()
    return Shard(fqn, (), shape, live.dtype, live.detach(), boxes, is_parameter, replica)


def _fsdp2_held(fqn: str, fsdp_param: Any) -> TrackedShard:
    sharded = fsdp_param.sharded_param
    info = fsdp_param.mesh_info
    replica = None
    if hasattr(info, "replicate_mesh_size"):
        replica = ReplicaGroup(
            info.replicate_process_group, info.replicate_mesh_rank, info.replicate_mesh_size
        )
    shard = _dtensor_shard(fqn, sharded._spec, sharded._local_tensor, replica, True)
    storage = fsdp_param._sharded_param_data  # exchanged together with what `sharded_param` holds
    return TrackedShard(
        shard,
        sharded,
        sharded.requires_grad,
        True,
        vars(fsdp_param),
        "_sharded_param_data",
        storage,
        None,
    )


def _dtensor_shard(
    fqn: str, spec: Any, local: torch.Tensor, replica: ReplicaGroup | None, is_parameter: bool
) -> Shard:
    from ema_ckpt.ema.model.placement import dtensor_boxes

    _refuse_placeholder(fqn, local)
    mesh, shape, placements = spec.mesh, tuple(spec.shape), tuple(spec.placements)
    coordinate = mesh.get_coordinate()
    boxes = (
        ()
        if coordinate is None
        else dtensor_boxes(shape, tuple(mesh.shape), coordinate, placements)
    )
    if sum(box.numel for box in boxes) != local.numel():
        raise StateError(
            "usage",
            f"{fqn!r}: this rank holds {local.numel()} elements of shape {shape}, but {placements} on a mesh of"
            f" {tuple(mesh.shape)} give it {sum(box.numel for box in boxes)}; make DTensors with shape= and stride=",
        )
    return Shard(
        fqn, (), shape, local.dtype, local.detach(), boxes, is_parameter, replica, mesh, placements
    )


def _flat_held(fqn: str, fsdp: Any, index: int) -> TrackedShard:
    from ema_ckpt.ema.model.placement import flat_boxes

    handle = fsdp._handle
    flat, info, shape = (
        handle.flat_param,
        handle.flat_param._shard_param_infos[index],
        handle.flat_param._shapes[index],
    )
    if not flat._contiguities[index] or flat._param_extensions[index] is not None:
        raise StateError(
            "usage", f"{fqn!r}: FSDP1 lays this tensor out in its own order; use fully_shard for it"
        )
    shards = getattr(flat, "_local_shard", None)
    memory = flat.data if shards is None else shards
    start, offset, numel = (info.intra_param_start_idx, info.offset_in_shard, info.numel_in_shard)
    local = memory[offset : offset + numel] if info.in_shard else memory[:0]
    _refuse_placeholder(fqn, local)
    boxes = flat_boxes(tuple(shape), start, numel) if info.in_shard else ()
    shard = Shard(fqn, (), tuple(shape), local.dtype, local, boxes, True, _flat_replica(fsdp))
    owner = flat if flat._params is None else flat._params[index]
    pointed = flat if shards is None else None
    within = (offset if info.in_shard else 0, memory.numel()) if owner is flat else None
    return TrackedShard(
        shard, owner, owner.requires_grad, True, vars(flat), "_local_shard", shards, pointed, within
    )


def _flat_replica(fsdp: Any) -> ReplicaGroup | None:
    """The declared replicas of an FSDP1 module: all ranks under NO_SHARD, the outer group of a
    hybrid strategy.
    """
    if not fsdp._handle.uses_sharded_strategy:
        return _replica(fsdp.process_group)
    inter_node = getattr(fsdp, "_inter_node_pg", None)
    return None if inter_node is None else _replica(inter_node)


def _reshard_flat(handle: Any) -> None:
    if handle is None or not hasattr(handle.flat_param, "_local_shard"):
        return  # before the first forward there is nothing but the shard
    handle.reshard(free_unsharded_flat_param=handle.uses_sharded_strategy)
    handle.post_reshard()
    handle._prefetched = False
    for name in ("_full_param_padded", "_full_prec_full_param_padded"):
        # reshard() frees only the precision of the present training mode.
        if handle.uses_sharded_strategy and hasattr(handle.flat_param, name):
            getattr(handle.flat_param, name).untyped_storage().resize_(0)


def _replica(group: ProcessGroup) -> ReplicaGroup:
    return ReplicaGroup(group, group.rank(), group.size())


def _pointer(live: torch.Tensor) -> torch.Tensor | None:
    return None if hasattr(live, "_local_tensor") or live.is_meta else live


def _refuse_placeholder(fqn: str, live: torch.Tensor) -> None:
    if nn.parameter.is_lazy(live):
        raise StateError(
            "usage", f"{fqn!r} is not initialised yet: run one forward before making the manager"
        )
    if live.is_meta:
        raise StateError(
            "usage", f"{fqn!r} is on the meta device: materialise first, then make the manager"
        )
    if hasattr(live, "_fsdp_flattened"):
        raise StateError(
            "usage",
            f"{fqn!r} is a piece of a flat parameter whose FSDP wrapper is not part of this model: give the wrapped"
            " model to the manager, with ema.rebind(wrapped) if it exists already",
        )
    if hasattr(live, "ds_id") or hasattr(live, "ds_shape"):
        raise StateError(
            "usage",
            f"{fqn!r} is an empty placeholder of ZeRO stage 3: there is no shard to average here; use fully_shard,"
            " or stage 1 or 2",
        )


def _clean(name: str) -> str:
    for prefix in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(prefix, "")
    return name


def _with_aliases(
    found: dict[Hashable, TrackedShard], names: dict[Hashable, list[str]]
) -> tuple[TrackedShard, ...]:
    held = []
    for token, first in found.items():
        aliases = tuple(name for name in dict.fromkeys(names[token]) if name != first.shard.fqn)
        held.append(
            replace(first, shard=replace(first.shard, aliases=aliases)) if aliases else first
        )
    fqns = [h.shard.fqn for h in held]
    if len(set(fqns)) < len(fqns):
        twice = next(fqn for fqn in fqns if fqns.count(fqn) > 1)
        raise UsageError(
            "name-collision", f"two tensors of the model have the canonical name {twice!r}"
        )
    return tuple(held)
