"""`ema_ckpt.save` beside a bare `dcp.save` of the same tensors: `python -m tests.bench.save_speed [PAIRS] [MB] [--ddp]`.

Two FSDP2 ranks, or two replicas under DDP, write model and average in turn, the order drawn anew for each pair; the median ratio counts.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ema_ckpt import save
from ema_ckpt.ema.manager import ShardedEMA
from tests.distributed.launcher import run


def measure(parent: str, pairs: int, megabytes: int, ddp: bool) -> list[tuple[float, float]]:
    """Seconds of (ours, bare) for each pair."""
    width = 1024
    layers = max(1, megabytes * 1_000_000 // (4 * width * width))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    if ddp:
        model = DistributedDataParallel(model)
    else:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    ema = ShardedEMA(model, 0.999)
    order = random.Random(0)
    found = []
    for number in range(pairs + 1):
        seconds = {}
        for kind in order.sample(["ours", "bare"], 2):
            path = Path(parent, f"{number}-{kind}")
            dist.barrier()
            started = time.perf_counter()
            if kind == "ours":
                save(path, model=model, ema=ema)
            else:
                dcp.save(
                    {"model": get_model_state_dict(model), "ema": ema.state_dict()},
                    checkpoint_id=path,
                )
            dist.barrier()
            seconds[kind] = time.perf_counter() - started
            if dist.get_rank() == 0:
                shutil.rmtree(path)
                os.sync()
            dist.barrier()
        found.append((seconds["ours"], seconds["bare"]))
    return found[1:]


def main() -> None:
    """Print the medians and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pairs", nargs="?", type=int, default=15, help="pairs of saves; 15 if not given"
    )
    parser.add_argument(
        "megabytes",
        nargs="?",
        type=int,
        default=256,
        metavar="MB",
        help="of the model; 256 if not given",
    )
    parser.add_argument(
        "--ddp", action="store_true", help="replicas: ours writes all live weights on rank 0"
    )
    options = parser.parse_args()
    pairs, megabytes = options.pairs, options.megabytes
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as parent:
        found = run(2, measure, parent, pairs, megabytes, options.ddp, timeout=600)[0]
    ratios = sorted(ours / bare for ours, bare in found)
    print(f"{pairs} pairs of 2 x {megabytes} MB on 2 ranks, torch {torch.__version__}")
    print(
        f"ema_ckpt.save {statistics.median(a for a, _ in found):.3f} s, dcp.save {statistics.median(b for _, b in found):.3f} s"
    )
    print(
        f"ratio: median {statistics.median(ratios):.3f}, quartiles {ratios[len(ratios) // 4]:.3f} and {ratios[3 * len(ratios) // 4]:.3f}"
    )


if __name__ == "__main__":
    main()
