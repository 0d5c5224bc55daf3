"""A small model with awkward sizes, wrapped in every way that the manager supports."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

ROWS_IN = 5


class Block(nn.Module):
    """Two linear layers with a norm and a buffer between."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up = nn.Linear(7, wide)
        self.norm = nn.LayerNorm(wide)
        self.down = nn.Linear(wide, 7, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Model(nn.Module):
    """Dimensions of 1, 2, 3, 5, 7, 10 and 13, and a frozen layer."""

    def __init__(self, wide: tuple[int, int] = (13, 10)) -> None:
        super().__init__()
        self.enter = nn.Linear(ROWS_IN, 7)
        self.blocks = nn.ModuleList([Block(size) for size in wide])
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.leave = nn.Linear(7, 3)
        self.one = nn.Linear(3, 1)
        self.two = nn.Linear(1, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x.to(self.enter.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.two(self.one(self.leave(self.frozen(x))))


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's, beside a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(ROWS_IN, 7, bias=False)
        self.middle = nn.Linear(7, 7)
        self.head = nn.Linear(7, ROWS_IN, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().t().contiguous())
        self.back = nn.Linear(ROWS_IN, 7, bias=False)
        self.back.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.back(self.head(self.middle(self.embed(x))))


class Odd(nn.Module):
    """Shapes that leave some ranks with less or with nothing, and a parameter without elements."""

    SHAPES = ((6,), (5, 2), (4, 2, 2), (0, 8), (7, 3), (1,), (13, 1), (2, 3, 5), (3, 1, 1, 2))

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in self.SHAPES])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * torch.stack([weight.sin().sum() for weight in self.weights])


def make_model(wide: tuple[int, int] = (13, 10), kind: type[nn.Module] = Model) -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return kind(wide) if kind is Model else kind()


def batch(step: int) -> torch.Tensor:
    """The same batch on every rank, so that tensor-parallel ranks agree."""
    return torch.randn(4, ROWS_IN, generator=torch.Generator().manual_seed(1000 + step))


Wrap = Callable[[], nn.Module]


def _mesh(*sizes: int, names: str = "abc") -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names[: len(sizes)]))


def plain() -> nn.Module:
    return make_model()


def ddp() -> nn.Module:
    return DistributedDataParallel(make_model())


def in_bfloat16(wrap: Wrap) -> nn.Module:
    """A layout with parameters in bfloat16, beside which averages are float32."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return wrap()
    finally:
        torch.set_default_dtype(torch.float32)


def ddp_compiled_outside() -> nn.Module:
    return torch.compile(DistributedDataParallel(make_model()), backend="eager")


def ddp_compiled_inside() -> nn.Module:
    return DistributedDataParallel(torch.compile(make_model(), backend="eager"))


def fsdp2(
    reshard: bool = True,
    mesh: tuple[int, ...] | None = None,
    mixed: bool = False,
    offload: bool = False,
) -> nn.Module:
    """Each block and the root."""
    model = make_model()
    options: dict[str, object] = {
        "mesh": _mesh(*(mesh or (dist.get_world_size(),))),
        "reshard_after_forward": reshard,
    }
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, cast_forward_inputs=True
        )
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp2_tied() -> nn.Module:
    model = make_model(kind=Tied)
    return fully_shard(model, mesh=_mesh(dist.get_world_size()), ignored_params={model.scale})


def fsdp2_odd(*mesh: int) -> nn.Module:
    """torch 2.13 cannot train a parameter without elements under FSDP2, so that one is left alone."""
    model = make_model(kind=Odd)
    empty = {parameter for parameter in model.parameters() if not parameter.numel()}
    return fully_shard(model, mesh=_mesh(*(mesh or (dist.get_world_size(),))), ignored_params=empty)


def fsdp2_checkpointed() -> nn.Module:
    model, mesh = make_model(), _mesh(dist.get_world_size())
    for index, block in enumerate(model.blocks):
        model.blocks[index] = fully_shard(checkpoint_wrapper(block), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2_compiled() -> nn.Module:
    return torch.compile(fsdp2(), backend="eager")


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"up": ColwiseParallel(use_local_output=True), "down": RowwiseParallel()}
    for block in model.blocks:
        block.norm = nn.Identity()
        parallelize_module(block, mesh, plan)
    return model


def tp() -> nn.Module:
    return _tensor_parallel(make_model((12, 24)), _mesh(dist.get_world_size()))


def fsdp2_tp(*sizes: int, wide: tuple[int, int] = (12, 24)) -> nn.Module:
    """The last mesh dimension is tensor-parallel, those before it FSDP or HSDP."""
    mesh = _mesh(*sizes)
    names = mesh.mesh_dim_names or ()
    model = _tensor_parallel(make_model(wide), mesh[names[-1]])
    data = mesh[names[:-1]] if len(sizes) > 2 else mesh[names[0]]
    for block in model.blocks:
        fully_shard(block, mesh=data)
    return fully_shard(model, mesh=data)


def ddp_tp() -> nn.Module:
    """DDP over one dimension of a mesh, tensor-parallel over the other."""
    mesh = _mesh(2, dist.get_world_size() // 2)
    model = _tensor_parallel(make_model((12, 24)), mesh["b"])
    return DistributedDataParallel(model, device_mesh=mesh["a"])


def fsdp1(
    strategy: ShardingStrategy,
    original: bool,
    mesh: tuple[int, ...] | None = None,
    kind: type[nn.Module] = Model,
    mixed: bool = False,
) -> nn.Module:
    model = make_model(kind=kind)
    for (
        parameter
    ) in model.parameters():  # flat parameters without original ones are frozen whole or not at all
        parameter.requires_grad_(parameter.requires_grad or not original)
    precision = (
        MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True) if mixed else None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            use_orig_params=original,
            device_mesh=_mesh(*mesh) if mesh else None,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            mixed_precision=precision,
            ignored_states=[p for p in model.parameters() if not p.dim()] or None,
        )


def flat(**options: object) -> Wrap:
    return partial(fsdp1, **options)  # type: ignore[arg-type]


LAYOUTS: dict[int, dict[str, Wrap]] = {
    1: {"plain": plain, "fsdp2": fsdp2},
    2: {
        "ddp": ddp,
        "ddp-compiled-outside": ddp_compiled_outside,
        "ddp-compiled-inside": ddp_compiled_inside,
        "fsdp2": fsdp2,
        "fsdp2-stays-unsharded": partial(fsdp2, reshard=False),
        "fsdp2-tied-ignored": fsdp2_tied,
        "fsdp2-checkpointed": fsdp2_checkpointed,
        "fsdp2-compiled": fsdp2_compiled,
        "tp": tp,
        "fsdp1-full": flat(strategy=ShardingStrategy.FULL_SHARD, original=True),
        "fsdp1-full-flat": flat(strategy=ShardingStrategy.FULL_SHARD, original=False),
        "fsdp1-tied-flat": flat(strategy=ShardingStrategy.FULL_SHARD, original=False, kind=Tied),
        "fsdp1-tied": flat(strategy=ShardingStrategy.FULL_SHARD, original=True, kind=Tied),
    },
    3: {
        "ddp": ddp,
        "fsdp2": fsdp2,
        "fsdp2-mixed": partial(fsdp2, mixed=True),
        "fsdp2-offload": partial(fsdp2, offload=True),
        "fsdp1-grad-op": flat(strategy=ShardingStrategy.SHARD_GRAD_OP, original=True),
        "fsdp1-grad-op-flat": flat(strategy=ShardingStrategy.SHARD_GRAD_OP, original=False),
        "fsdp1-no-shard": flat(strategy=ShardingStrategy.NO_SHARD, original=True),
        "fsdp1-no-shard-flat": flat(strategy=ShardingStrategy.NO_SHARD, original=False),
        "fsdp1-mixed": flat(strategy=ShardingStrategy.FULL_SHARD, original=True, mixed=True),
        "fsdp1-mixed-grad-op-flat": flat(
            strategy=ShardingStrategy.SHARD_GRAD_OP, original=False, mixed=True
        ),
    },
    4: {
        "fsdp2": fsdp2,
        "hsdp-2x2": partial(fsdp2, mesh=(2, 2)),
        "fsdp2-tp-2x2": partial(fsdp2_tp, 2, 2),
        "fsdp2-tp-2x2-uneven": partial(fsdp2_tp, 2, 2, wide=(14, 6)),
        "fsdp1-hybrid": flat(strategy=ShardingStrategy.HYBRID_SHARD, original=True, mesh=(2, 2)),
        "fsdp1-hybrid-flat": flat(
            strategy=ShardingStrategy.HYBRID_SHARD, original=False, mesh=(2, 2)
        ),
    },
    6: {
        "hsdp-2x3": partial(fsdp2, mesh=(2, 3)),
        "hsdp-3x2": partial(fsdp2, mesh=(3, 2)),
        "fsdp2-tp-3x2": partial(fsdp2_tp, 3, 2),
    },
    8: {
        "hsdp-tp-2x2x2": partial(fsdp2_tp, 2, 2, 2),
        "hsdp-tp-2x2x2-uneven": partial(fsdp2_tp, 2, 2, 2, wide=(10, 6)),
    },
}

# The same wrappers around other shapes and dtypes; what these save does not fit into the layouts above.
OTHERS: dict[int, dict[str, Wrap]] = {
    2: {
        "ddp-bfloat16": partial(in_bfloat16, ddp),
        "fsdp2-bfloat16": partial(in_bfloat16, partial(fsdp2, reshard=False)),
        "fsdp1-bfloat16": partial(
            in_bfloat16, flat(strategy=ShardingStrategy.FULL_SHARD, original=True)
        ),
    },
    3: {
        "fsdp2-odd": fsdp2_odd,
        "fsdp1-odd": flat(strategy=ShardingStrategy.FULL_SHARD, original=True, kind=Odd),
        "fsdp1-odd-flat": flat(strategy=ShardingStrategy.FULL_SHARD, original=False, kind=Odd),
    },
    4: {
        "fsdp2-odd": fsdp2_odd,
        "hsdp-odd": partial(fsdp2_odd, 2, 2),
    },
}
