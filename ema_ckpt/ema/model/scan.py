"""Scan of a model: its parameters and buffers as the local shards that the optimizer steps.

With `change_detector` the only module that uses private names of torch;
`tests/ema/test_private_names.py` asserts them. Shards are those behind the wrappers, whatever a
wrapper shows at the moment: FSDP2's `FSDPParam.sharded_param`, FSDP1's `_local_shard` (before the
first forward `flat_param.data`).
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ema_ckpt.core.box import Box, flat_range_boxes, whole
from ema_ckpt.core.errors import StateError, UsageError, about
from ema_ckpt.ema.model.placement import local_boxes
from ema_ckpt.ema.model.shards import ModelShards, ModuleLink, ReplicaGroup, Shard, TrackedShard
from ema_ckpt.ema.model.tensor_kinds import plain_values, refuse_unreadable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Functions that make the state of a fresh optimizer by a step: torch's, and torchtitan 0.3's.
_STATE_INIT = ("_init_optim_state", "init_optim_state")
_FABRIC = "_forward_module"  # of Lightning Fabric's `_FabricModule`
_WRAPPER_NAMES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def scan_model(model: nn.Module) -> ModelShards:
    """Find every parameter and buffer of `model` as this rank holds it. Runs no collective.

    Raises:
        StateError: a parameter is on `meta`, emptied by another framework, not initialised, or has
            no boxes.
        UsageError: two tensors have one canonical name, or `model` is no module.
    """
    _refuse_other_than_module(model)
    managed = _managed_parameters(model)
    parameters: dict[Hashable, TrackedShard] = {}
    buffers: dict[Hashable, TrackedShard] = {}
    names: dict[Hashable, list[str]] = {}
    links: list[ModuleLink] = []
    modules = list(_walk(model, "", None))
    for prefix, module, ddp in modules:
        for identity, tracked in chain(
            _parameters(module, prefix, ddp, managed), _buffers(module, prefix)
        ):
            names.setdefault(identity, []).append(tracked.shard.fqn)
            kind = parameters if tracked.shard.is_parameter else buffers
            first = kind.setdefault(identity, tracked)
            if first is not tracked and tracked.shard.is_parameter:
                # Another name of a tied tensor, which another tensor may get later.
                links.append((tracked.container, tracked.key, tracked.expected))
    for _, module, _ in modules:
        links += [(module._modules, name, child) for name, child in module._modules.items()]
    return ModelShards(
        _with_aliases(parameters, names),
        _with_aliases(buffers, names),
        tuple((prefix, module) for prefix, module, _ in modules),
        tuple(links),
    )


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of all FSDP modules: the next forward gathers the shards anew.

    Without it a swap right after a forward is lost: roots, and all modules with
    `reshard_after_forward=False` or `SHARD_GRAD_OP`, stay unsharded after a forward without
    backward. Runs no collective.

    Raises:
        StateError: inside FSDP1's `summon_full_params`, which writes its memory back at its end.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    _refuse_other_than_module(model)
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            _refuse_summoned(module._handle)
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


def keep_after_summon(model: nn.Module) -> None:
    """Have FSDP1's `summon_full_params`, if it goes on, write back what the shards hold now."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in model.modules():
        handle: Any = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if not _is_summoned(handle) or not handle.uses_sharded_strategy:
            continue
        flat = handle.flat_param
        # With `rank0_only` the other ranks have nothing but their shards.
        if flat.data_ptr() != flat._local_shard.data_ptr():
            part, _ = handle._get_unpadded_shard(flat, handle.rank, handle.world_size)
            part.detach().copy_(flat._local_shard[: part.numel()])


def is_state_init() -> bool:
    """Return whether the caller runs in the dummy step of `get_` or `set_optimizer_state_dict`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in _STATE_INIT:
        frame = frame.f_back
    return frame is not None


def _refuse_other_than_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            "usage",
            f"model is a torch.nn.Module; found {type(model).__name__}: give the module that is"
            " trained, not its state_dict() or parameters()",
        )


class _Ddp(NamedTuple):
    """The DDP wrapper around a module."""

    replica: ReplicaGroup
    ignored: frozenset[str]  # canonical names that it does not keep equal


def _walk(
    module: nn.Module, prefix: str, ddp: _Ddp | None
) -> Iterator[tuple[str, nn.Module, _Ddp | None]]:
    """Yield (canonical prefix, module, the DDP around it), as often as a module is registered."""
    from torch.nn.parallel import DistributedDataParallel

    yield prefix, module, ddp
    inner = _wrapped_child(module)
    if isinstance(module, DistributedDataParallel):
        ignored = frozenset(prefix + _canonical(name) for name in module.parameters_to_ignore)
        ddp = _Ddp(_replica(module.process_group), ignored)
    for name, child in module._modules.items():
        # Fabric registers the module a second time, without the wrapper of its strategy.
        is_again = inner == _FABRIC and name != inner
        if child is not None and not is_again:
            yield from _walk(child, prefix if name == inner else f"{prefix}{name}.", ddp)


def _wrapped_child(module: nn.Module) -> str | None:
    """Return the child's name that is no part of a canonical name, if `module` is a wrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(module, DistributedDataParallel):
        return "module"
    if isinstance(module, FullyShardedDataParallel):
        return "_fsdp_wrapped_module"
    if isinstance(module, ActivationWrapper):
        return "_checkpoint_wrapped_module"
    if isinstance(module, nn.DataParallel):
        return "module"
    if type(module).__name__ == "_FabricModule" and _FABRIC in module._modules:
        return _FABRIC
    # Importing the compiler costs seconds, and without it nothing is compiled yet.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        return "_orig_mod"
    return None


def _canonical(name: str) -> str:
    for wrapper_name in _WRAPPER_NAMES:
        name = name.replace(wrapper_name, "")
    return name


class _ManagedParameters(NamedTuple):
    """Parameters that a wrapper has replaced."""

    # By id of the module and name there: an `FSDPParam`, or an FSDP1 module and an index into its
    # flat parameter.
    managers: dict[int, dict[str, Any]]
    flat_ids: frozenset[int]  # of the flat parameters


def _managed_parameters(model: nn.Module) -> _ManagedParameters:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    managers: dict[int, dict[str, Any]] = {}
    flat_ids: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for owner, name, fsdp_param in _fsdp2_managed(module):
                managers.setdefault(id(owner), {})[name] = fsdp_param
        elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flat: Any = module._handle.flat_param
            flat_ids.add(id(flat))
            for index, info in enumerate(flat._param_infos):
                managers.setdefault(id(info.module), {})[info.param_name] = (module, index)
            for info in flat._shared_param_infos:
                first = managers[id(info.prim_module)][info.prim_param_name]
                managers.setdefault(id(info.module), {})[info.param_name] = first
    return _ManagedParameters(managers, frozenset(flat_ids))


def _fsdp2_managed(module: Any) -> Iterator[tuple[nn.Module, str, Any]]:
    groups = [group.fsdp_params for group in _fsdp2_groups(module)]
    for fsdp_param in chain.from_iterable(groups):
        info = fsdp_param._module_info
        yield info.module, info.param_name, fsdp_param
        for owner, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            yield owner, name, fsdp_param


def _fsdp2_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:  # older releases have one group per module
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _parameters(
    module: nn.Module, prefix: str, ddp: _Ddp | None, managed: _ManagedParameters
) -> Iterator[tuple[Hashable, TrackedShard]]:
    """Yield (identity, parameter) for each parameter registered in `module` itself."""
    managers = managed.managers.get(id(module), {})
    for name in dict.fromkeys(chain(module._parameters, managers)):
        fqn, manager, live = prefix + name, managers.get(name), module._parameters.get(name)
        if isinstance(manager, tuple):
            yield (id(manager[0]), manager[1]), _fsdp1_parameter(fqn, *manager)
        elif manager is not None:
            yield id(manager), _fsdp2_parameter(fqn, manager)
        elif live is not None and id(live) not in managed.flat_ids:
            yield id(live), _plain_parameter(fqn, module._parameters, name, live, ddp)
    if ddp is None:
        return
    # DDP over a slice of a mesh swaps its parameters for DTensors before each forward, and torch
    # 2.13 leaves them behind as plain attributes after it (torch.distributed.tensor.parallel.ddp).
    for name, left in vars(module).items():
        is_dtensor = isinstance(left, torch.Tensor) and hasattr(left, "_local_tensor")
        if is_dtensor and left.requires_grad:
            yield id(left), _plain_parameter(prefix + name, vars(module), name, left, ddp)


def _buffers(module: nn.Module, prefix: str) -> Iterator[tuple[Hashable, TrackedShard]]:
    for name, live in module._buffers.items():
        if live is not None:
            shard, memory = _whole_shard(prefix + name, live, is_parameter=False), _addressed(live)
            kept = name not in module._non_persistent_buffers_set
            tracked = TrackedShard(shard, live, module._buffers, name, live, memory, kept)
            yield id(live), tracked


def _plain_parameter(
    fqn: str, container: dict[str, Any], name: str, live: torch.Tensor, ddp: _Ddp | None
) -> TrackedShard:
    _refuse_placeholder(fqn, live)
    replica = None if ddp is None or fqn in ddp.ignored else ddp.replica
    # DDP over a slice of a mesh shows DTensors as local tensors before a forward.
    if hasattr(live, "_st_info"):
        shard = _dtensor_shard(fqn, live._st_info, live.detach(), replica, True)
    else:
        shard = _whole_shard(fqn, live, is_parameter=True, replica=replica)
    return TrackedShard(shard, live, container, name, live, _addressed(live))


def _whole_shard(
    fqn: str, live: torch.Tensor, *, is_parameter: bool, replica: ReplicaGroup | None = None
) -> Shard:
    """Return the shard of a tensor that no FSDP has cut: plain, or a tensor parallel DTensor."""
    if hasattr(live, "_local_tensor"):
        dtensor: Any = live
        return _dtensor_shard(fqn, dtensor._spec, dtensor._local_tensor, replica, is_parameter)
    if live.is_nested:  # it has no shape
        refuse_unreadable(fqn, live)
    shape = tuple(live.shape)
    boxes = (whole(shape),) if live.numel() else ()
    return Shard(fqn, (), shape, live.dtype, plain_values(live), boxes, is_parameter, replica)


def _dtensor_shard(
    fqn: str, spec: Any, local: torch.Tensor, replica: ReplicaGroup | None, is_parameter: bool
) -> Shard:
    _refuse_placeholder(fqn, local)
    mesh, shape, placements = spec.mesh, tuple(spec.shape), tuple(spec.placements)
    try:
        boxes = local_boxes(shape, mesh, placements, local)
    except StateError as error:
        raise about(error, tensor=fqn) from None
    local = plain_values(local)
    return Shard(fqn, (), shape, local.dtype, local, boxes, is_parameter, replica, mesh, placements)


def _fsdp2_parameter(fqn: str, fsdp_param: Any) -> TrackedShard:
    sharded, info = fsdp_param.sharded_param, fsdp_param.mesh_info
    replica = None
    if hasattr(info, "replicate_mesh_size"):
        replica = ReplicaGroup(
            info.replicate_process_group, info.replicate_mesh_rank, info.replicate_mesh_size
        )
    shard = _dtensor_shard(fqn, sharded._spec, sharded._local_tensor, replica, True)
    key = "_sharded_param_data"  # exchanged together with what `sharded_param` holds
    container = vars(fsdp_param)
    return TrackedShard(shard, sharded, container, key, container[key], None)


def _fsdp1_parameter(fqn: str, fsdp: Any, index: int) -> TrackedShard:
    flat = fsdp._handle.flat_param
    info, shape = flat._shard_param_infos[index], tuple(flat._shapes[index])
    if not flat._contiguities[index] or flat._param_extensions[index] is not None:
        raise StateError(
            "usage", f"{fqn!r}: FSDP1 lays this tensor out in its own order; use fully_shard for it"
        )
    sharded = getattr(flat, "_local_shard", None)
    memory: Any = sharded
    pointed = None
    if sharded is None:
        memory, pointed = flat.data, flat
    start, local = 0, memory[:0]
    boxes: tuple[Box, ...] = ()
    if info.in_shard:
        start = info.offset_in_shard
        local = memory[start : start + info.numel_in_shard]
        first = info.intra_param_start_idx
        boxes = flat_range_boxes(shape, first, first + info.numel_in_shard)
    _refuse_placeholder(fqn, local)
    replica = _fsdp1_replica(fsdp)
    shard = Shard(fqn, (), shape, local.dtype, local, boxes, True, replica)
    owner = flat if flat._params is None else flat._params[index]
    flat_range = (start, memory.numel()) if owner is flat else None
    return TrackedShard(
        shard, owner, vars(flat), "_local_shard", sharded, pointed, flat_range=flat_range
    )


def _fsdp1_replica(fsdp: Any) -> ReplicaGroup | None:
    """Return an FSDP1 module's replicas: all ranks of NO_SHARD, a hybrid strategy's outer group."""
    if not fsdp._handle.uses_sharded_strategy:
        return _replica(fsdp.process_group)
    inter_node = getattr(fsdp, "_inter_node_pg", None)
    return None if inter_node is None else _replica(inter_node)


def _is_summoned(handle: Any) -> bool:
    return handle is not None and handle._training_state.name == "SUMMON_FULL_PARAMS"


def _refuse_summoned(handle: Any) -> None:
    if _is_summoned(handle):
        raise StateError(
            "usage",
            "inside summon_full_params() of FSDP, which writes the parameters that it has gathered"
            " back into the shards at its end: leave it first; it may stand inside swap()",
        )


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


def _addressed(live: torch.Tensor) -> torch.Tensor | None:
    return None if hasattr(live, "_local_tensor") or live.is_meta else live


def _refuse_placeholder(fqn: str, live: torch.Tensor) -> None:
    problem = None
    if nn.parameter.is_lazy(live):
        problem = "is not initialised yet: run one forward before making the manager"
    elif live.is_meta:
        problem = "is on the meta device: materialise first, then make the manager"
    elif hasattr(live, "_fsdp_flattened"):
        problem = (
            "is a piece of a flat parameter whose FSDP wrapper is not part of this model: give the"
            " wrapped model to the manager, with ema.rebind(wrapped) if it exists already"
        )
    elif hasattr(live, "ds_id") or hasattr(live, "ds_shape"):
        problem = (
            "is an empty placeholder of ZeRO stage 3: there is no shard to average here; use"
            " fully_shard, or stage 1 or 2"
        )
    if problem is not None:
        raise StateError("usage", f"{fqn!r} {problem}")


def _with_aliases(
    tensors: dict[Hashable, TrackedShard], names: dict[Hashable, list[str]]
) -> tuple[TrackedShard, ...]:
    """Return the tensors with every name they are registered under; refuse a name of two."""
    named: dict[str, TrackedShard] = {}
    for identity, tracked in tensors.items():
        fqn = tracked.shard.fqn
        if fqn in named:
            raise UsageError(
                "name-collision", f"two tensors of the model have the canonical name {fqn!r}"
            )
        aliases = tuple(name for name in dict.fromkeys(names[identity]) if name != fqn)
        if aliases:
            tracked = replace(tracked, shard=replace(tracked.shard, aliases=aliases))  # noqa: PLW2901
        named[fqn] = tracked
    return tuple(named.values())
