"""Writes the checkpoints that are benchmarked: `python checkpoints.py LAYOUT NBYTES TARGET [--hf] [--ema]`.

Eight gloo processes save one state dict {"model": {...}} through `torch.distributed.checkpoint`. Layouts:
`row` and `column` (all matrices split on dim 0 or dim 1), `2d` (tensor parallel 2, FSDP2 4 inside it) and
`small` (20 000 tensors of 64 x 16; `small:N` has N). With `--hf` the same tensors go through `HuggingFaceStorageWriter`, flat,
as torch's own consolidator wants them. With `--ema` a second tree of the same size lies beside the model, its
averages, each element a little off the live one.

Element i of tensor k holds `block[(i + 977 k) mod len(block)]` of a fixed random block, so that a reader can
check any of it without a second copy.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from pathlib import Path

WORLD = 8
TP = 2
HIDDEN = 1024
BLOCK = 1_000_003


def shapes(layout: str, nbytes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a decoder of about `nbytes` in float32, or of the small tensors."""
    kind, _, count = layout.partition(":")
    if kind == "small":
        return {f"blocks.{i // 10}.t{i % 10}": (64, 16) for i in range(int(count or 20_000))}
    h = HIDDEN
    layer = {"up": (4 * h, h), "gate": (4 * h, h), "down": (h, 4 * h), "norm": (h,)}
    layer |= dict.fromkeys(("q", "k", "v", "o"), (h, h))
    out: dict[str, tuple[int, ...]] = {"embed.weight": (32_000, h)}
    count = max(1, round((nbytes / 4 - 32_000 * h) / (16 * h * h + h)))
    for i in range(count):
        out |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return out


def block():
    """The fixed random block: float32, shape (BLOCK,)."""
    import torch

    return torch.randn(BLOCK, generator=torch.Generator().manual_seed(1))


def whole(base, k: int, shape: tuple[int, ...]):
    """Tensor number `k`: shape `shape`, float32."""
    import math

    count = math.prod(shape)
    start = 977 * k % BLOCK
    repeated = base.repeat((start + count) // BLOCK + 1)
    return repeated[start : start + count].reshape(shape)


def _sharded(layout: str, name: str, tensor, mesh):
    """`tensor` as the DTensor that this rank holds of it."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import Replicate, _StridedShard

    rank = int(os.environ["RANK"])
    if layout != "2d":
        dim = 1 if layout == "column" and tensor.ndim == 2 else 0
        local, placements = tensor.chunk(WORLD, dim)[rank], [Shard(dim)]
    else:
        dp, tp = divmod(rank, TP)
        rows = WORLD // TP
        if tensor.ndim == 1:
            local, placements = tensor.chunk(rows)[dp], [Shard(0), Replicate()]
        elif name.endswith(("o.weight", "down.weight")):
            local, placements = tensor.chunk(rows)[dp].chunk(TP, 1)[tp], [Shard(0), Shard(1)]
        else:
            local, placements = (
                tensor.chunk(TP)[tp].chunk(rows)[dp],
                [_StridedShard(0, split_factor=TP), Shard(0)],
            )
    return DTensor.from_local(
        local.contiguous().clone(),
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _save(rank: int, layout: str, nbytes: int, target: str, hugging_face: bool, ema: bool) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    if layout == "2d":
        mesh = init_device_mesh("cpu", (WORLD // TP, TP), mesh_dim_names=("dp", "tp"))
    else:
        mesh = init_device_mesh("cpu", (WORLD,))
    base = block()
    names = shapes(layout, nbytes)
    local = {
        n: _sharded(layout, n, whole(base, k, shape), mesh)
        for k, (n, shape) in enumerate(names.items())
    }
    if hugging_face:
        writer = dcp.HuggingFaceStorageWriter(target, save_distributed=True)
        dcp.save(local, storage_writer=writer)
    else:
        state = {"model": local, "ema": _averages(local)} if ema else {"model": local}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(target, sync_files=False))


def _averages(local):
    import torch

    torch.manual_seed(int(os.environ["RANK"]))
    weights = {name: tensor.clone() for name, tensor in local.items()}
    for tensor in weights.values():
        shard = tensor.to_local()
        shard.add_(torch.randn_like(shard), alpha=1e-3)
    return {"weights": weights, "num_updates": torch.tensor(1000)}


def _rank_main(rank: int, store: str, *job: object) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    code = 0
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD
        )
        _save(rank, *job)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def build(
    layout: str,
    nbytes: int,
    target: Path,
    hugging_face: bool = False,
    timeout: float = 600.0,
    *,
    ema: bool = False,
) -> None:
    """Save the checkpoint of `layout` to `target` from eight processes.

    Raises:
        SystemExit: a rank failed, or not all ended within `timeout` seconds.
    """

    import torch.distributed.checkpoint  # noqa: F401 - once here, and not in each of the forked ranks

    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        job = (f"{folder}/store", layout, nbytes, str(target), hugging_face, ema)
        ranks = [
            context.Process(target=_rank_main, args=(rank, *job), daemon=True)
            for rank in range(WORLD)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout)
        failed = [i for i, process in enumerate(ranks) if process.exitcode != 0]
        for process in ranks:
            process.kill()
    if failed:
        raise SystemExit(f"ranks {failed} failed while saving {target}")


if __name__ == "__main__":
    build(
        sys.argv[1],
        int(sys.argv[2]),
        Path(sys.argv[3]),
        "--hf" in sys.argv,
        ema="--ema" in sys.argv,
    )
