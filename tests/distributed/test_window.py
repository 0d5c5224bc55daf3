"""A window average that is saved in the middle of a window and resumed on another world size ends as if nothing happened."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ema_ckpt import ShardedEMA, Window, restore, save
from tests.distributed.launcher import run

N, CALLS = 5, 13


def weights_of(call: int) -> torch.Tensor:
    """The parameter after that many calls, the same on every world size."""
    generator = torch.Generator().manual_seed(call)
    return torch.randn(7, 4, generator=generator)


def train(path: str, first: int, last: int) -> dict[str, torch.Tensor]:
    """Set the parameter from call to call, average it, and save; return the whole average."""
    import torch.distributed as dist

    model = nn.Sequential(nn.Linear(4, 7, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    ema = ShardedEMA(model, Window(N))
    if first:
        restore(f"{path}/{first}", model=model, ema=ema)
    for call in range(first + 1, last + 1):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, {"0.weight": weights_of(call)}, options=options)
        ema.update()
    if last < CALLS:
        save(f"{path}/{last}", model=model, ema=ema)
    return ema.full_state_dict()


def test_a_window_goes_on_at_another_world_size(tmp_path: Path) -> None:
    whole = run(2, train, str(tmp_path), 0, CALLS)[0]["0.weight"]
    run(2, train, str(tmp_path), 0, 7)
    resumed = run(3, train, str(tmp_path), 7, CALLS)[0]["0.weight"]
    assert torch.equal(whole, resumed)
    window = [weights_of(call).double() for call in range(11, CALLS + 1)]  # calls 11, 12, 13
    mean = torch.stack(window).mean(0)
    assert (resumed.double() - mean).abs().max() <= 2 * torch.finfo(
        torch.float32
    ).eps * mean.abs().max()


def test_a_full_window_is_the_mean_of_its_updates(tmp_path: Path) -> None:
    found = run(2, train, str(tmp_path), 0, 10)[0]["0.weight"].double()
    mean = torch.stack([weights_of(call).double() for call in range(6, 11)]).mean(0)
    assert (found - mean).abs().max() <= 4 * torch.finfo(torch.float32).eps * mean.abs().max()
