"""A training run with gradients that depend on nothing but parameter name and step, the same in every layout."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.ema.schedules import Warmup
from ema_ckpt.resume.flatten import local_shards
from ema_ckpt.resume.optimizer_state import stepped_groups
from tests.distributed.layouts import (
    LAYOUTS,
    OTHERS,
    Model,
    Odd,
    Tied,
    Wrap,
    batch,
    in_bfloat16,
    make_model,
)

SCHEDULE = Warmup(0.9, inv_gamma=2.0, power=0.7)


@dataclass
class Run:
    """A model in some layout with its optimizer and average."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: ShardedEMA
    step: int = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            with torch.no_grad():
                set_gradients(self.model, self.optimizer, self.step)
            self.optimizer.step()
            self.optimizer.zero_grad()


@dataclass
class Truth:
    """Whole tensors after some steps, from one process and plain arithmetic."""

    weights: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]
    average: dict[str, torch.Tensor]
    decay: float


def start(wrap: Callable[[], nn.Module], blank: bool = False) -> Run:
    """Build a run; `blank` with other values everywhere, as a new process has them."""
    model = wrap()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if blank:
        with torch.no_grad():
            for held in scan_model(model).parameters:
                held.shard.local.fill_(0.5)
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-2, betas=(0.8, 0.95))
    ema = ShardedEMA(model, SCHEDULE)
    ema.attach(optimizer)
    return Run(model, optimizer, ema)


def gradient(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    seed = zlib.crc32(f"{name} {step}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def set_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for _, stepped in stepped_groups(scan_model(model), [optimizer]):
        for one in stepped:
            one.tensor.grad = torch.zeros_like(one.tensor, requires_grad=False)
            for tracked in one.parameters:
                full = gradient(tracked.shard.fqn, tracked.shard.shape, step)
                part = local_shards(one.part_of("grad", one.tensor.grad, tracked.shard))
                for box, view in part.shards:
                    view.copy_(full[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))])


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "standard": make_model,
    "tensor-parallel": lambda: without_norms(make_model((12, 24))),
    "tensor-parallel-14-6": lambda: without_norms(make_model((14, 6))),
    "tensor-parallel-10-6": lambda: without_norms(make_model((10, 6))),
    "tied": lambda: make_model(kind=Tied),
    "odd": lambda: make_model(kind=Odd),
    "bfloat16": partial(in_bfloat16, make_model),
}

WRAPS: dict[int, dict[str, Wrap]] = {
    world: {**LAYOUTS[world], **OTHERS.get(world, {})} for world in LAYOUTS
}


def batch_for(layout: str, step: int) -> torch.Tensor:
    return batch(step).to(torch.bfloat16 if family_of(layout) == "bfloat16" else torch.float32)


def without_norms(model: Model) -> Model:
    for block in model.blocks:
        block.norm = nn.Identity()
    return model


def family_of(layout: str) -> str:
    for family in ("tied", "odd", "bfloat16"):
        if family in layout:
            return family
    if "tp" not in layout:
        return "standard"
    if "uneven" not in layout:
        return "tensor-parallel"
    return "tensor-parallel-10-6" if "2x2x2" in layout else "tensor-parallel-14-6"


def truth(family: str, steps: int) -> Truth:
    model = FAMILIES[family]()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    names = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(names.values(), lr=1e-2, betas=(0.8, 0.95))
    average = {name: p.detach().float().clone() for name, p in names.items()}
    beta = 1.0
    for step in range(1, steps + 1):
        for name, parameter in names.items():
            parameter.grad = gradient(name, tuple(parameter.shape), step).to(parameter.dtype)
        optimizer.step()
        beta = min(0.9, max(0.0, 1 - (1 + max(0, step - 1) / 2.0) ** -0.7))
        for name, parameter in names.items():
            average[name].lerp_(parameter.detach().float(), 1 - beta)
    moments = {
        name: {k: v.clone() for k, v in optimizer.state[p].items()} for name, p in names.items()
    }
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Truth(weights, moments, average, beta)


def check(tree: dict[str, Any], whole: dict[str, Any], where: str) -> None:
    """Every piece that this rank holds, and every value, is that of the whole state."""
    for name, value in whole.items():
        if isinstance(value, dict):
            check(tree.get(name, {}), value, f"{where}.{name}")
        elif name in tree:
            for box, view in local_shards(tree[name]).shards:
                expected = value[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))]
                assert torch.equal(view, expected), (
                    f"{where}.{name} at {box}: {view} is not {expected}"
                )
