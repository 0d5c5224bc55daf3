"""Train with a sharded EMA, get killed, go on with another number of ranks, evaluate the average.

    torchrun --nproc-per-node 4 docs/examples/train_resume.py train demo/train --steps 60
    # kill it at any moment; then go on with two ranks, from the newest complete checkpoint:
    torchrun --nproc-per-node 2 docs/examples/train_resume.py train demo/train --steps 120
    ema-ckpt consolidate demo/train demo/average.safetensors
    python docs/examples/train_resume.py evaluate demo/average.safetensors

It runs on CPUs with gloo and on CUDA with NCCL.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ema_ckpt import HalfLife, ShardedEMA, latest, restore, rng_state, save

GLOBAL_BATCH = 48
SAVE_EVERY = 10


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 61), nn.SiLU(), nn.Linear(61, 61), nn.SiLU(), nn.Linear(61, 1)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step: it depends on the step alone, so a resumed run sees the same
    data.
    """
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(GLOBAL_BATCH, 8, generator=generator)
    noise = 0.3 * torch.randn(GLOBAL_BATCH, 1, generator=generator)
    return x, torch.sin(x.sum(1, keepdim=True)) + noise


def train(run: Path, steps: int) -> None:
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = make_model().to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    ema = ShardedEMA(model, HalfLife(8))
    ema.attach(optimizer)

    step = 0
    if latest(run) is not None:
        extra: dict[str, Any] = {"step": None, "schedule": schedule, "rng": rng_state()}
        report = restore(run, model=model, ema=ema, optimizer=optimizer, extra=extra)
        step = report.extra["step"]
        if rank == 0:
            found = Path(report.path).name
            print(f"resumed {found}, written by {report.world_size} ranks, on {world}", flush=True)

    saving = None
    while step < steps:
        x, y = (part.chunk(world)[rank].to(device) for part in batch(step))
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()  # moves the average too
        optimizer.zero_grad()
        schedule.step()
        step += 1
        if step % SAVE_EVERY == 0 or step == steps:
            if saving is not None:
                finish(saving)
            extra = {"step": step, "schedule": schedule, "rng": rng_state()}
            target = run / f"step_{step}"
            saving = save(
                target,
                model=model,
                ema=ema,
                optimizer=optimizer,
                extra=extra,
                async_save=True,
                overwrite=True,
            )
    if saving is not None:
        finish(saving)

    with torch.no_grad():
        x, y = (part.to(device) for part in batch(-1))
        live = (model(x) - y).square().mean().item()
        with ema.swap():
            average = (model(x) - y).square().mean().item()
    if rank == 0:
        print(
            f"step {step}: live {live:.6f}, average {average:.6f} after {ema.num_updates} updates",
            flush=True,
        )
    dist.destroy_process_group()


def finish(saving: Future[Path | str]) -> None:
    """Wait until a checkpoint is complete, and say so."""
    path = Path(saving.result())
    if dist.get_rank() == 0:
        print(f"saved {path.name}", flush=True)


def evaluate(file: Path) -> None:
    """The average in one process, from one file, without anything of the training run."""
    from safetensors.torch import load_file

    model = make_model()
    model.load_state_dict(load_file(file))
    x, y = batch(-1)
    with torch.no_grad():
        print(f"average {(model(x) - y).square().mean().item():.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    training = verbs.add_parser("train")
    training.add_argument("run", type=Path)
    training.add_argument("--steps", type=int, default=60)
    evaluating = verbs.add_parser("evaluate")
    evaluating.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.verb == "train":
        train(options.run, options.steps)
    else:
        evaluate(options.file)


if __name__ == "__main__":
    main()
