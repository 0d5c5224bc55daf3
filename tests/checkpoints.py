"""Small real checkpoints, written by torch and safetensors."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import warnings
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter


def weights(seed: float = 0.0) -> dict[str, torch.Tensor]:
    """Two tensors whose values tell where they came from."""
    return {"layer.w": torch.arange(6.0).reshape(2, 3) + seed, "b": torch.full((2,), 7.0) + seed}


def ema(seed: float = 0.5, updates: int = 3) -> dict[str, object]:
    """The state dict of an EMA in this package's form."""
    return {
        "weights": weights(seed),
        "num_updates": torch.tensor(updates),
        "samples_seen": torch.tensor(0),
        "config": '{"version": 1, "decay": 0.999, "schedule": {"kind": "constant", "decay": 0.999}}',
    }


def save_dcp(path: Path, tree: dict[str, object]) -> Path:
    """Save with torch's DCP, in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it saves without a process group
        dcp.save(tree, checkpoint_id=path, no_dist=True)
    return path


def save_replicas(path: Path, tree: dict[str, object], ranks: int) -> Path:
    """Save as `ranks` processes do that all hold the same plain tensors: DCP spreads these over the ranks' files."""
    writer = FileSystemWriter(path)
    writer.set_up_storage_writer(is_coordinator=True)
    planners = [DefaultSavePlanner() for _ in range(ranks)]
    plans = []
    for rank, planner in enumerate(planners):
        planner.set_up_planner(tree, is_coordinator=rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    shared, metadata = planners[0].create_global_plan(plans)
    results = []
    for planner, plan in zip(planners, writer.prepare_global_plan(shared), strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).value())
    writer.finish(metadata, results)
    return path


@cache
def _template() -> Path:
    folder = Path(mkdtemp(prefix="ema-ckpt-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return save_dcp(folder / "dcp", {"model": weights(), "ema": ema()})


def dcp_at(path: Path) -> Path:
    """A complete DCP checkpoint of a model and its EMA."""
    shutil.copytree(_template(), path, copy_function=shutil.copyfile)  # written now
    return path


def safetensors_at(path: Path, seed: float = 0.0) -> Path:
    """One safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights(seed), path)
    return path


def torch_at(path: Path, tree: object = None) -> Path:
    """One torch file, a flat state dict unless another is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(weights() if tree is None else tree, path)
    return path


def touch(path: Path, text: str = "x") -> Path:
    """A file that is no checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def digests_of_files(path: Path) -> dict[str, str]:
    """SHA-256 of a file, by an empty name, or of all files below a directory, by their names in it."""
    found = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return {
        str(p.relative_to(path)) if p != path else "": hashlib.sha256(p.read_bytes()).hexdigest()
        for p in found
    }
