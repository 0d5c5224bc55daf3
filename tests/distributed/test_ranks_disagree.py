"""Ranks that have updated differently, or hold different values under one name."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import ema_ckpt
from ema_ckpt import restore, save
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.ema.checkpoint.agreement import sum_of_words
from ema_ckpt.ema.manager import ShardedEMA
from tests.distributed.launcher import run


def _torn(parent: str) -> list[str]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    messages = []
    for case in ("updates", "samples", "settings"):
        model = nn.Linear(2, 2)
        ema = ShardedEMA(model, 0.9 if case != "settings" or rank else 0.8)
        ema.update(samples=4 if case != "samples" or rank else 3)
        if case == "updates" and rank == 0:
            ema.update(samples=0)
        with pytest.raises(EmaCkptError) as caught:
            save(Path(parent, case), model=model, ema={"slow": ema} if case == "samples" else ema)
        messages.append(str(caught.value))
    return messages


def test_averages_that_ranks_updated_differently_are_refused(tmp_path: Path) -> None:
    updates, samples, settings = run(2, _torn, str(tmp_path))[1]
    assert "num_updates of ema: rank 0: 2; rank 1: 1" in updates
    assert "samples_seen of ema.slow: rank 0: 3; rank 1: 4" in samples
    assert "settings of ema: rank 0: " in settings
    assert not list(tmp_path.iterdir())


def _message(call: Callable[[], object]) -> str:
    begun = time.monotonic()
    with pytest.raises(EmaCkptError) as caught:
        call()
    assert time.monotonic() - begun < 20
    return str(caught.value)


def _different_calls(parent: str) -> dict[str, str]:
    """Each call differs on rank 1; afterwards all ranks save and restore as ever."""
    one, root = dist.get_rank() == 1, Path(parent)
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    ema = ShardedEMA(model, 0.9)
    ema.update()
    state = {"model": model, "ema": ema, "timeout": 20}
    path = save(root / "step_1", **state)
    new, url = root / "new", f"memory://{parent}/new"
    odd: dict[str, Callable[[], object]] = {
        "async": lambda: save(new, **state, async_save=one),  # type: ignore[call-overload]
        "overwrite": lambda: save(path, **state, overwrite=one),
        "url": lambda: save(url if one else str(new), **state),
        "no path": lambda: save(None if one else new, **state),  # type: ignore[arg-type]
        "no average": lambda: save(new, model=model, ema=None if one else ema),
        "value": lambda: save(new, **state, extra={"a": {"b": 1} if one else 1}),
        "ema_path": lambda: restore(path, **state, ema_path=path if one else None),
        "strict": lambda: restore(path, **state, strict=one),
        "seed": lambda: restore(path, **state, missing_ema="never" if one else "seed"),  # type: ignore[arg-type]
        "timeout": lambda: restore(path, model=model, timeout="5"),  # type: ignore[arg-type]
    }
    messages = {name: _message(call) for name, call in odd.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    given = None if one else optimizer
    messages["optimizer"] = _message(lambda: restore(path, model=model, optimizer=given))
    save(root / "step_2", **state)
    assert restore(root, **state).path == root / "step_2"
    return messages


def test_calls_that_differ_between_ranks_are_told_at_once(tmp_path: Path) -> None:
    everyone = run(2, _different_calls, str(tmp_path))
    assert everyone[0] == everyone[1]
    found = everyone[0]
    assert found["async"] == (
        "save: the ranks give different async_save: rank 0: False; rank 1: True"
    )
    assert "different overwrite: rank 0: False; rank 1: True" in found["overwrite"]
    assert "the ranks name different targets" in found["url"]
    assert found["no path"] == "rank 1: a path is a str or os.PathLike of text; found NoneType"
    assert "covered; not stored whole: rows 2 to 3 of 4: the ranks' pieces" in found["no average"]
    assert "'extra.a' is a value on rank 0, and holds 'extra.a.b' on rank 1" in found["value"]
    assert "different ema_path: rank 0: None; rank 1: a path" in found["ema_path"]
    assert "different strict: rank 0: False; rank 1: True" in found["strict"]
    assert found["seed"].startswith("rank 1: missing_ema is 'error' or 'seed'")
    assert found["timeout"] == "restore: timeout is a number of seconds; found '5'"
    assert "optimizer" in found["optimizer"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]


def _ignoring(model: nn.Module, ignored: nn.Module, kind: str) -> nn.Module:
    """Wrap a model so that no wrapper keeps one of its modules equal on the ranks."""
    names = [name for name, module in model.named_modules() if module is ignored]
    if kind == "ddp":
        left_out = [f"{names[0]}.{name}" for name, _ in ignored.named_parameters()]
        DDP._set_params_and_buffers_to_ignore_for_model(model, left_out)
        return DDP(model)
    sizes = (dist.get_world_size(),) if kind == "fsdp2" else (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
    return fully_shard(model, mesh=mesh, ignored_params=set(ignored.parameters()))


def _replicas(parent: str, kind: str) -> list[str]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ignored = model[0]
    model = _ignoring(model, ignored, kind)
    with torch.no_grad():
        for parameter in ignored.parameters():
            parameter.fill_(float(rank + 1))
    optimizer = torch.optim.AdamW(model.parameters())
    ema = ShardedEMA(model, 0.5)
    for parameter in ignored.parameters():
        parameter.grad = torch.full_like(parameter, float(rank + 1))
    optimizer.step()
    ema.update()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save(Path(parent, "c"), model=model, ema=ema, optimizer=optimizer)
    return [str(warning.message) for warning in caught if "differ" in str(warning.message)]


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_all_of_one_name_comes_from_the_lowest_of_declared_replicas(
    tmp_path: Path, kind: str
) -> None:
    (said,), none = run(2, _replicas, str(tmp_path), kind)
    assert not none
    assert said.startswith("replicas-differ: ")
    for name in ("ema.weights.0.bias", "ema.weights.0.weight", "model.0.bias", "model.0.weight"):
        assert repr(name) in said
    assert "(ranks 0–1)" in said
    assert "1.weight" not in said
    with ema_ckpt.open(tmp_path / "c") as stored:
        for name in ("0.weight", "0.bias"):
            assert stored[f"model.{name}"].mean() < 1
            assert stored[f"ema.weights.{name}"].mean() < 1
            moment = stored[f"optimizer.state.{name}.exp_avg"]
            assert torch.equal(moment, torch.full_like(moment, 0.1))


class Experts(nn.Module):
    """Layers by name. torch 2.11 shards no container."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def _experts(parent: str, kind: str, spread: float) -> str:
    """Each rank has an expert of its own under one name; with `spread` 0 all are equal."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: nn.Module = Experts({"shared": nn.Linear(2, 2), "expert": nn.Linear(2, 2)})
    expert = model.get_submodule("expert")
    with torch.no_grad():
        expert.weight.add_(spread * (rank if kind != "halves" else rank * 2 // size))
    if kind == "stages":
        model.add_module(f"stage{rank}", nn.Linear(2, 2))
    elif kind == "halves":
        # Two groups of ranks shard it, each a value of its own.
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("half", "shard"))
        fully_shard(expert, mesh=mesh["shard"])
    elif kind != "plain":
        model = _ignoring(model, expert, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            save(Path(parent, kind), model=model)
        except EmaCkptError as error:
            return f"{error.code}: {error}"
    return ""


@pytest.mark.parametrize(
    ("kind", "size"), [("plain", 3), ("stages", 2), ("fsdp2", 2), ("hsdp", 4), ("halves", 4)]
)
def test_different_values_on_ranks_that_are_no_replicas_are_refused(
    tmp_path: Path, kind: str, size: int
) -> None:
    for message in run(size, _experts, str(tmp_path), kind, 1.0):
        assert message.startswith("name-collision: ")
        assert f"'model.expert.weight' (ranks 0–{size - 1})" in message
        assert "shared" not in message
        assert "bias" not in message
    assert not list(tmp_path.iterdir())
    assert run(size, _experts, str(tmp_path), kind, 0.0) == [""] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_the_sum_of_words_tells_values_and_places_apart(dtype: torch.dtype) -> None:
    values = torch.arange(9).remainder(2).to(dtype)
    others = [values.flip(0).roll(1), values[1:], torch.zeros_like(values)]
    for place in range(9):
        changed = values.clone()
        changed[place] = 1 - changed[place].to(torch.complex64).real
        others.append(changed)
    sums = [sum_of_words(other) for other in others]
    assert sum_of_words(values) not in sums
    assert len(set(sums)) == len(sums)
    assert sum_of_words(torch.cat([values, values])[9:]) == sum_of_words(values)


class OfMyRows(torch.optim.SGD):
    """Makes state of its own from this rank's rows of each parameter."""

    def keep(self, wide: int) -> None:
        for parameter in self.param_groups[0]["params"]:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            self.state[parameter]["mine"] = local.detach().mean().expand(wide).clone()


def _own_state(parent: str, wide: int) -> list[str]:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(2, 4), mesh=init_device_mesh("cpu", (2,)))
    optimizer = OfMyRows(model.parameters(), 0.1)
    optimizer.keep(wide)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save(Path(parent, f"c{wide}"), model=model, optimizer=optimizer)
    return [str(warning.message) for warning in caught if "differ" in str(warning.message)]


@pytest.mark.parametrize("wide", [3, 5000])
def test_state_that_each_rank_made_of_its_own_rows_is_named(tmp_path: Path, wide: int) -> None:
    (said,), _ = run(2, _own_state, str(tmp_path), wide)
    assert "'optimizer.state.bias.mine', 'optimizer.state.weight.mine' (ranks 0–1)" in said


class Nested(torch.optim.SGD):
    """Keeps its state one level deeper, as some Shampoos do."""

    def keep(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["deep"] = [torch.zeros_like(parameter)]


def _nested(parent: str) -> str:
    model = FullyShardedDataParallel(nn.Linear(2, 4), device_id=torch.device("cpu"))
    optimizer = Nested(model.parameters(), 0.1)
    optimizer.keep()
    with pytest.raises(EmaCkptError) as caught:
        save(Path(parent, "c"), model=model, optimizer=optimizer)
    return f"{caught.value.code}: {caught.value}"


def test_nested_state_of_a_flat_parameter_is_refused(tmp_path: Path) -> None:
    for message in run(2, _nested, str(tmp_path)):
        assert message.startswith("unsupported: ")
        assert "Nested keeps tensors in a list, 'deep' of 'weight'" in message
    assert not list(tmp_path.iterdir())
