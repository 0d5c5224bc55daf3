"""A run that is saved half way, and another start that goes on from there: the bits must be the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ema_ckpt
from ema_ckpt import ShardedEMA

SAVED_AT, STEPS = 3, 5


class Follower:
    """Averages a trainer's model, attached to its optimizers; saves once, or restores at the start."""

    def __init__(self, folder: Path, resumes: bool) -> None:
        self.path, self.resumes = folder / f"step_{SAVED_AT}", resumes
        self.ema: Any = None
        self.optimizers: Any = None
        self.found: dict[str, torch.Tensor] = {}  # after the last step

    def begin(self, model: torch.nn.Module, optimizers: list[Any]) -> None:
        """Before the first step, with what the trainer has prepared."""
        self.model, self.optimizers = model, optimizers
        self.ema = ShardedEMA(model, 0.75)
        self.ema.attach(*optimizers)
        if self.resumes:
            report = ema_ckpt.restore(
                self.path, model=model, ema=self.ema, optimizer=self.optimizers
            )
            assert set(report.trees.values()) == {"restored"}
            assert self.ema.num_updates == SAVED_AT

    def stepped(self, steps: int) -> None:
        """After a batch, with the number of steps that the trainer has taken; each is one update."""
        assert self.ema.num_updates == steps
        if steps == SAVED_AT and not self.resumes and not self.path.exists():
            ema_ckpt.save(self.path, model=self.model, ema=self.ema, optimizer=self.optimizers)
        if steps == STEPS and not self.found:
            self.found = self.whole()

    def whole(self) -> dict[str, torch.Tensor]:
        """The averages and the live weights, whole, on rank 0."""
        trees = {"ema": self.ema.full_state_dict(), "live": live_weights(self.model)}
        return {f"{tree}.{n}": t.clone() for tree, found in trees.items() for n, t in found.items()}


def live_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The live weights whole, on rank 0, as an average that has just begun has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has never moved
        return ShardedEMA(model, 0.5).full_state_dict()


def run_and_resume(train: Callable[[Follower, int], None], folder: Path) -> None:
    """Train all steps, then the last ones from the checkpoint, and compare on rank 0.

    `train` makes everything anew (of another seed, the second time) and takes steps from the given one to the last.
    """
    through, resumed = Follower(folder, False), Follower(folder, True)
    train(through, 0)
    train(resumed, SAVED_AT)
    want, found = through.found, resumed.found
    assert through.ema.num_updates == resumed.ema.num_updates == STEPS
    assert found.keys() == want.keys()
    assert bool(want) == (not dist.is_initialized() or dist.get_rank() == 0)
    for name, value in want.items():
        assert torch.equal(found[name], value), name
