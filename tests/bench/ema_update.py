"""One update of the average beside its rivals, on CPU: median milliseconds, and how often ours is as fast.

    python -m tests.bench.ema_update [--numel 500_000_000] [--threads 2] [--repeats 15]

Rivals run on the same plain tensors, interleaved with ours, each at least as often. Those of a package that is not
installed are left out.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ema_ckpt.ema.manager import ShardedEMA

DECAY = 0.9999
Update = Callable[[], object]


class Bag(nn.Module):
    """Parameters and nothing else."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        )


def foreach_lerp(model: nn.Module) -> Update:
    """The bare operation on plain float32 tensors."""
    params = [p.detach() for p in model.parameters()]
    shadows = [p.float().clone() for p in params]
    return lambda: torch._foreach_lerp_(shadows, params, 1 - DECAY)


def lerp_float(model: nn.Module) -> Update:
    """`e.lerp_(p.float())` per tensor."""
    pairs = [(p.detach().float().clone(), p.detach()) for p in model.parameters()]

    def update() -> None:
        for shadow, param in pairs:
            shadow.lerp_(param.float(), 1 - DECAY)

    return update


def mul_add(model: nn.Module) -> Update:
    """`e.mul_(d).add_(p, alpha=1 - d)` per tensor as it is registered, DTensors too: NeMo's and torchtitan's form."""
    pairs = [(p.detach().clone(), p) for p in model.parameters()]

    def update() -> None:
        for shadow, param in pairs:
            shadow.mul_(DECAY).add_(param.detach(), alpha=1 - DECAY)

    return update


def averaged_model(model: nn.Module) -> Update:
    """`torch.optim.swa_utils.AveragedModel` in its multi-tensor form."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(model)
    return lambda: averaged.update_parameters(model)


def diffusers_ema(model: nn.Module) -> Update:
    """`diffusers.training_utils.EMAModel` with its foreach form."""
    from diffusers.training_utils import EMAModel

    averaged = EMAModel(model.parameters(), decay=DECAY, foreach=True)
    return lambda: averaged.step(model.parameters())


def timm_ema(model: nn.Module) -> Update:
    """`timm.utils.ModelEmaV3`."""
    from timm.utils import ModelEmaV3

    averaged = ModelEmaV3(model, decay=DECAY)
    return lambda: averaged.update(model)


def ema_pytorch(model: nn.Module) -> Update:
    """`ema_pytorch.EMA`, moved at each call."""
    from ema_pytorch import EMA

    averaged = EMA(model, beta=DECAY, update_every=1, update_after_step=-1)
    averaged.update()
    return averaged.update


def ours(model: nn.Module) -> Update:
    """`ShardedEMA.update`."""
    return ShardedEMA(model, DECAY).update


RIVALS = [foreach_lerp, lerp_float, mul_add, averaged_model, diffusers_ema, timm_ema, ema_pytorch]


def compare(
    title: str, model: nn.Module, rivals: list[Callable[[nn.Module], Update]], repeats: int
) -> None:
    """Print the median of each rival, measured in pairs with ours."""
    mine = ours(model)
    print(f"\n{title}")
    for make in rivals:
        try:
            rival = make(model)
        except ImportError as error:
            print(f"  {make.__name__:16} not installed ({error.name})")
            continue
        times: dict[str, list[float]] = {"rival": [], "ours": []}
        for _ in range(repeats + 1):
            for name, update in (("rival", rival), ("ours", mine)):
                times[name].append(_timed(update))
        theirs, own = (statistics.median(values[1:]) * 1e3 for values in times.values())
        print(
            f"  {make.__name__:16} {theirs:10.3f} ms   ours {own:10.3f} ms   {theirs / own:6.2f} × as fast"
        )
        del rival
        gc.collect()


def _timed(update: Update) -> float:
    started = time.perf_counter()
    update()
    return time.perf_counter() - started


def large_shapes(numel: int) -> list[tuple[int, ...]]:
    """Shapes of a transformer of about `numel` parameters."""
    layer = [(6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,)]
    return layer * max(1, numel // sum(torch.Size(shape).numel() for shape in layer))


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2 on one rank."""
    return fully_shard(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--numel", type=int, default=500_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"torch {torch.__version__}, {options.threads} threads")
    for numel in (16, 1024):
        tiny = [(numel,)] * 600
        compare(
            f"600 tensors of {numel}, float32",
            Bag(tiny, torch.float32),
            RIVALS,
            20 * options.repeats,
        )
        compare(
            f"600 tensors of {numel}, bfloat16",
            Bag(tiny, torch.bfloat16),
            [lerp_float],
            20 * options.repeats,
        )
        compare(
            f"600 tensors of {numel}, float32 DTensors",
            sharded(Bag(tiny, torch.float32)),
            [mul_add],
            options.repeats,
        )
    shapes = large_shapes(options.numel)
    large = Bag(shapes, torch.float32)
    total = sum(p.numel() for p in large.parameters())
    compare(
        f"{total:,} parameters, float32",
        large,
        [foreach_lerp, mul_add, averaged_model],
        options.repeats,
    )
    del large
    gc.collect()
    compare(
        f"{total:,} parameters, bfloat16",
        Bag(shapes, torch.bfloat16),
        [lerp_float],
        options.repeats,
    )


if __name__ == "__main__":
    main()
