"""Ranks that hold different layers, as the stages of a pipeline do: saved together, restored each its own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import ema_ckpt
from ema_ckpt import restore, save
from ema_ckpt.core.errors import SourceError, StateError
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.model.live_tree import live_tree
from ema_ckpt.ema.model.scan import scan_model
from tests.distributed.launcher import run
from tests.distributed.test_save_failures import bits

LAYERS = ("0", "1", "2")


class Stage(nn.Module):
    """Some layers of one model under the names that they have in the whole."""

    def __init__(self, layers: tuple[str, ...], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in layers})
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x).relu() * self.scale
        return x


def made(layers: tuple[str, ...], seed: int) -> dict[str, Any]:
    model = Stage(layers, seed)
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    groups = [{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.01}]
    return {"model": model, "optimizer": torch.optim.AdamW(groups), "ema": ShardedEMA(model, 0.9)}


def train(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        state["model"](torch.ones(3, 4)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["ema"].update()


def _resumed(root: str) -> list[Any]:
    layers = LAYERS[:2] if dist.get_rank() == 0 else LAYERS[2:]
    state = made(layers, 1)
    train(state, 2)
    save(Path(root) / "step_2", **state)
    before = bits(**state)
    train(state, 1)
    after = bits(**state)

    other = made(layers, 2)
    report = restore(root, **other)
    assert bits(**other) == before
    assert not report.missing
    assert not report.unexpected
    assert [group["lr"] for group in other["optimizer"].param_groups] == [0.1, 0.01]
    train(other, 1)
    assert bits(**other) == after

    # A name that no rank has is still refused, on all of them.
    if dist.get_rank():
        del state["model"].layers["2"]
        state["ema"] = None
    with pytest.raises(SourceError, match=r"layers\.2\.weight"):
        restore(root, model=state["model"])
    return [name for name in live_tree(scan_model(other["model"])) if name != "scale"]


def test_every_stage_resumes(tmp_path: Path) -> None:
    first, second = run(2, _resumed, str(tmp_path))
    whole = made(LAYERS, 3)
    report = restore(tmp_path, **whole)
    assert sorted(first + second) == sorted(
        name for name in live_tree(scan_model(whole["model"])) if name != "scale"
    )
    assert [len(group["params"]) for group in whole["optimizer"].param_groups] == [3, 3]
    assert not report.unexpected
    with warnings.catch_warnings(), ema_ckpt.open(tmp_path / "step_2") as stored:
        warnings.simplefilter("ignore")
        want = stored.state_dict("model")
    assert all(
        torch.equal(want[name], value) for name, value in whole["model"].state_dict().items()
    )


class Block(nn.Linear):
    """A layer with state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"steps": self.in_features + int(self.weight.requires_grad)}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"steps": self.in_features + 1}


class Whole(nn.Module):
    """Six layers, of which a stage has some; first and last name one tensor as their own."""

    def __init__(self, layers: range, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        blocks = {str(n): Block(4, 4) for n in range(6)}
        self.layers = nn.ModuleDict({str(n): blocks[str(n)] for n in layers})
        self.register_buffer("scale", torch.full((1,), 2.0))
        embed, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        if 0 in layers:
            self.embed = embed
        if 5 in layers:
            self.head = self.again = head


def part(rank: int, size: int) -> range:
    cut = [round(6 * n / size) for n in range(size + 1)]
    return range(cut[rank], cut[rank + 1])


def shifted(ema: ShardedEMA) -> None:
    """Move the live weights away from the average, so that the two are not mixed up."""
    with torch.no_grad():
        for value in ema.model.parameters():
            value.add_(1)
    ema.update()
    with torch.no_grad():
        for value in ema.model.parameters():
            value.add_(1)


def _gathered(kind: str, complete: bool) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    stages = size // 2 if kind == "sharded" else size
    stage = rank // 2 if kind == "sharded" else rank
    model = Whole(part(stage, stages))
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (stages, 2), mesh_dim_names=("pp", "dp"))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
    ema = ShardedEMA(model, 0.5)
    shifted(ema)
    full = ema.full_state_dict(complete=complete)
    assert bool(full) == (rank == 0)
    return full


@pytest.mark.parametrize(
    ("kind", "size"),
    [("plain", 2), pytest.param("plain", 4, marks=pytest.mark.slow), ("sharded", 4)],
)
def test_the_averages_of_all_stages_are_one_state_dict(kind: str, size: int) -> None:
    full = run(size, _gathered, kind, True)[0]
    whole = Whole(range(6))
    ema = ShardedEMA(whole, 0.5)
    shifted(ema)
    want = ema.full_state_dict()
    assert full.keys() == whole.state_dict().keys()
    assert full["head.weight"] is full["again.weight"]
    layers = [name for name in full if name.startswith("layers")]
    assert layers == [name for name in whole.state_dict() if name.startswith("layers")]
    for name, value in want.items():
        same = torch.equal(full[name], value) if torch.is_tensor(value) else full[name] == value
        assert same, name
    Whole(range(6), seed=1).load_state_dict(full, strict=True)
    only = run(size, _gathered, kind, False)[0]
    assert only.keys() == {n for n, _ in whole.named_parameters()}
    assert all(torch.equal(value, want[name]) for name, value in only.items())


def _colliding(kind: str) -> str:
    rank = dist.get_rank()
    model = nn.ModuleDict({f"own{rank}": nn.Linear(2, 2), "layer": nn.Linear(2, 2 + rank % 2)})
    if kind != "shapes":
        torch.manual_seed(rank if kind == "values" else 0)
        model["layer"] = nn.Linear(2, 2)
    if kind == "live":  # equal averages, another value of what is not averaged
        model["layer"].weight.requires_grad_(False).add_(rank)
    if kind == "replicas":
        model = nn.ModuleDict({"layer": DistributedDataParallel(model["layer"])})
    ema = ShardedEMA(model)
    ema.update()
    try:
        full = ema.full_state_dict()
    except StateError as error:
        return f"{error.code}: {error}"
    return ", ".join(full)


@pytest.mark.parametrize("kind", ["shapes", "values", "live"])
def test_one_name_of_different_tensors_is_refused(kind: str) -> None:
    for message in run(2, _colliding, kind):
        assert message.startswith("name-collision: ")
        assert "'layer.weight'" in message
        assert (
            "is float32 [3, 2] on rank 1, but float32 [2, 2] on rank 0" in message
            or "(ranks 0–1)" in message
        )


def test_replicas_and_equal_copies_are_one() -> None:
    assert run(2, _colliding, "equal")[0] == (
        "own0.weight, own0.bias, layer.weight, layer.bias, own1.weight, own1.bias"
    )
    assert run(2, _colliding, "replicas")[0] == "layer.weight, layer.bias"


class Layers(nn.Module):
    """As torchtitan cuts a model: a stage lacks what other stages have."""

    def __init__(self, layers: range, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        every = {str(number): nn.Linear(4, 4) for number in range(4)}
        self.layers = nn.ModuleDict({str(number): every[str(number)] for number in layers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x).relu()
        return x


def _scheduled(root: str, sharded: bool) -> dict[str, Any]:
    """Train through torch's own schedule, save, resume from another start; the whole averages."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")

    def begin(seed: int) -> tuple[Any, dict[str, Any]]:
        model = Layers(range(2 * stage, 2 * stage + 2), seed)
        if sharded:
            for layer in model.layers.values():
                fully_shard(layer, mesh=mesh["dp"])
        group = mesh.get_group("pp")
        pipe = PipelineStage(model, stage, 2, torch.device("cpu"), group=group)
        schedule = ScheduleGPipe(pipe, 2, loss_fn=lambda out, _: out.square().mean())
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        ema = ShardedEMA(model, 0.5)
        ema.attach(optimizer)
        return schedule, {"model": model, "optimizer": optimizer, "ema": ema}

    def steps(schedule: Any, state: dict[str, Any], count: int) -> None:
        for _ in range(count):
            x = torch.arange(16.0).view(4, 4) / 16
            if stage == 0:
                schedule.step(x)
            else:
                schedule.step(target=x)
            state["optimizer"].step()
            state["optimizer"].zero_grad()

    schedule, state = begin(0)
    steps(schedule, state, 2)
    save(Path(root) / "c", **state)
    steps(schedule, state, 2)
    again, other = begin(1)
    restore(Path(root) / "c", **other)
    steps(again, other, 2)
    assert bits(**other) == bits(**state)
    assert state["ema"].num_updates == other["ema"].num_updates == 4
    return state["ema"].full_state_dict()


@pytest.mark.parametrize(("size", "sharded"), [(2, False), (4, True)])
@pytest.mark.filterwarnings("ignore")
def test_torchs_own_schedule(size: int, sharded: bool, tmp_path: Path) -> None:
    full = run(size, _scheduled, str(tmp_path), sharded)[0]
    whole = Layers(range(4), 1)
    assert list(full) == list(whole.state_dict())
    whole.load_state_dict(full, strict=True)
    restored = Layers(range(4), 2)
    ema = ShardedEMA(restored, 0.5)
    restore(tmp_path / "c", model=restored, ema=ema)
    assert ema.num_updates == 2
    assert not torch.equal(ema.full_state_dict()["layers.3.weight"], full["layers.3.weight"])
