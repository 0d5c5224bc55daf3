"""The private names of torch that `ema_ckpt.ema.model.scan` uses exist: a new torch that renames one fails here first."""

from __future__ import annotations

import inspect

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, _init_utils, fully_shard
from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleTrainingState
from torch.distributed.tensor.parallel import ddp

from tests.distributed.launcher import run


def absent(*wanted: tuple[object, list[str]]) -> list[str]:
    return [
        f"{type(thing).__name__}.{name}"
        for thing, names in wanted
        for name in names
        if not hasattr(thing, name)
    ]


def look_at_fsdp2() -> list[str]:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    state = model._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    (weight, _) = groups[0].fsdp_params
    assert "_sharded_param_data" in vars(weight)
    return absent(
        (groups[0], ["wait_for_unshard", "_to_sharded", "fsdp_params"]),
        (weight, ["sharded_param", "_sharded_param_data", "_module_info", "mesh_info"]),
        (weight._module_info, ["module", "param_name", "shared_modules", "shared_param_names"]),
        (
            weight.mesh_info,
            ["replicate_process_group", "replicate_mesh_rank", "replicate_mesh_size"],
        ),
        (weight.sharded_param, ["_local_tensor", "_spec"]),
        (weight.sharded_param._spec, ["mesh", "placements", "shape"]),
    )


def look_at_fsdp1() -> list[str]:
    model = FullyShardedDataParallel(
        torch.nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True
    )
    model(torch.zeros(1, 4))
    flat = model._handle.flat_param
    assert "_local_shard" in vars(flat)
    assert list(model._modules) == ["_fsdp_wrapped_module"]
    tables = [
        "_param_infos",
        "_shared_param_infos",
        "_shard_param_infos",
        "_shapes",
        "_contiguities",
    ]
    return absent(
        (model, ["_handle", "process_group"]),
        (
            model._handle,
            [
                *("flat_param", "uses_sharded_strategy", "reshard", "post_reshard", "_prefetched"),
                *("_training_state", "_get_unpadded_shard", "rank", "world_size"),
            ],
        ),
        (flat, [*tables, "_param_extensions", "_params", "_local_shard", "_full_param_padded"]),
        (flat._param_infos[0], ["module", "param_name"]),
        (
            flat._shard_param_infos[0],
            ["in_shard", "offset_in_shard", "numel_in_shard", "intra_param_start_idx"],
        ),
        (flat._params[0], ["_fsdp_flattened"]),
    )


def test_names_of_fsdp2() -> None:
    assert run(2, look_at_fsdp2) == [[], []]
    assert hasattr(FSDPModule, "_get_fsdp_state")


def test_names_of_fsdp1() -> None:
    assert run(2, look_at_fsdp1) == [[], []]
    assert "free_unsharded_flat_param" in inspect.signature(FlatParamHandle.reshard).parameters
    assert "_full_prec_full_param_padded" in inspect.getsource(
        FlatParamHandle.init_flat_param_attributes
    )
    assert hasattr(HandleTrainingState, "SUMMON_FULL_PARAMS")
    assert "state._inter_node_pg = " in inspect.getsource(_init_utils)


def test_names_of_other_wrappers() -> None:
    wrapped = checkpoint_wrapper(torch.nn.Linear(1, 1))
    assert isinstance(wrapped, ActivationWrapper)
    assert list(wrapped._modules) == ["_checkpoint_wrapped_module"]
    compiled = torch.compile(torch.nn.Linear(1, 1), backend="eager")
    assert isinstance(compiled, torch._dynamo.eval_frame.OptimizedModule)
    assert list(compiled._modules) == ["_orig_mod"]
    assert torch.nn.Linear(1, 1)._non_persistent_buffers_set == set()
    assert inspect.isfunction(state_dict._init_optim_state)
    assert "_st_info" in inspect.getsource(ddp)


def test_names_outside_the_scan() -> None:
    from torch.distributed.tensor import placement_types
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.optim import lr_scheduler
    from torch.optim.optimizer import Optimizer, _foreach_supported_types

    assert inspect.isfunction(compute_local_shape_and_global_offset)
    assert placement_types._StridedShard(0, split_factor=2).split_factor == 2
    assert torch.Tensor in _foreach_supported_types
    assert "_wrapped_by_lr_sched" in inspect.getsource(lr_scheduler)
    assert "_opt_called" in inspect.getsource(lr_scheduler)
    assert hasattr(Optimizer.profile_hook_step(lambda: None), "__wrapped__")
    assert hasattr(torch.nn.Module(), "_parameters")
