"""Files as trainers leave them: each tree by its role under every verb, nothing cast or dropped in silence."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError, UnsafeError
from tests.checkpoints import save_dcp, torch_at

State = dict[str, torch.Tensor]
Write = Callable[[Path, dict[str, Any]], Path]


class Net(nn.Module):
    """A norm that counts, a table of positions and a mask: buffers of whole numbers and bools."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.register_buffer("relative_position_index", torch.randint(9, (3, 3)))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.bn.num_batches_tracked += seed


def state(seed: int) -> State:
    return Net(seed).state_dict()


def moments() -> dict[str, Any]:
    net = Net(0)
    optimizer = torch.optim.AdamW(net.parameters())
    net.bn(net.conv(torch.randn(2, 3, 5, 5))).square().sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def pt(path: Path, tree: dict[str, Any]) -> Path:
    return torch_at(path / "run.pt", tree)


def dcp(path: Path, tree: dict[str, Any]) -> Path:
    return save_dcp(path / "run", tree)


def safetensors(path: Path, tree: dict[str, Any]) -> Path:
    """Dotted names alone, as any program would flatten them."""
    flat: State = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            flat[prefix] = value.contiguous()
        for key, inner in value.items() if isinstance(value, dict) else ():
            add(f"{prefix}.{key}".lstrip("."), inner)

    add("", tree)
    save_file(flat, path / "run.safetensors")
    return path / "run.safetensors"


by_format = pytest.mark.parametrize("write", [pt, dcp, safetensors])


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


RUN = {"model": state(1), "ema": state(2), "optimizer": moments(), "foo": {"a": 1, "loss": 0.5}}
NESTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ckpt": lambda run: {"ckpt": run},
    "trainer.state": lambda run: {"trainer": {"state": run, "name": "x"}},
    "train_state": lambda run: {"train_state": run},
}


@by_format
@pytest.mark.parametrize("nest", NESTS)
def test_a_dictionary_around_the_trees(tmp_path: Path, write: Write, nest: str) -> None:
    source = write(tmp_path, NESTS[nest](RUN))
    roles = {tree.role: tree.name for tree in ema_ckpt.inspect(source).trees}
    assert roles["ema"].endswith("ema")
    assert roles["optimizer"].endswith("optimizer")
    written = ema_ckpt.consolidate(source, tmp_path / "ema.safetensors")
    assert written.tree == f"{nest}.ema"
    assert_same(load_file(tmp_path / "ema.safetensors"), state(2))
    ema_ckpt.convert(source, tmp_path / "half.pt", dtype="bf16")
    with ema_ckpt.open(tmp_path / "half.pt") as half:
        for name in half:
            value = half[name]
            is_moment = ".optimizer." in name
            cast = value.is_floating_point() and not is_moment and ".foo." not in name
            assert value.dtype == (torch.bfloat16 if cast else value.dtype), name
            assert not is_moment or value.dtype == torch.float32, name
    with pytest.raises(EmaCkptError, match="convert") as caught:
        ema_ckpt.consolidate(source, tmp_path / "out.pt", tree=roles["optimizer"])
    assert caught.value.code == "usage"


@by_format
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "alone"])
def test_buffers_of_the_average_are_its_own(tmp_path: Path, write: Write, beside: bool) -> None:
    tree = {"ema": state(7), **({"model": state(1)} if beside else {})}
    source = write(tmp_path, tree)
    plain = ema_ckpt.consolidate(source, tmp_path / "plain.safetensors")
    assert not plain.warnings
    assert not plain.skipped
    assert_same(load_file(tmp_path / "plain.safetensors"), state(7))
    if beside:
        filled = ema_ckpt.consolidate(source, tmp_path / "filled.pt", fill=True)
        assert not filled.filled
        assert_same(torch.load(tmp_path / "filled.pt", weights_only=True), state(7))
    Net(0).load_state_dict(load_file(tmp_path / "plain.safetensors"), strict=True)


def test_only_what_the_average_lacks_is_filled(tmp_path: Path) -> None:
    average = {n: t for n, t in state(7).items() if not n.startswith("bn.running")}
    source = pt(tmp_path, {"model": state(1), "ema": average})
    filled = ema_ckpt.consolidate(source, tmp_path / "out.safetensors", fill=True)
    assert filled.filled == ("bn.running_mean", "bn.running_var")
    live = {name: state(1)[name] for name in filled.filled}
    assert_same(load_file(tmp_path / "out.safetensors"), {**state(7), **live})


def test_mmcv_buffers_are_written_under_the_names_they_average(tmp_path: Path) -> None:
    average = {name: tensor for name, tensor in state(2).items() if "conv" in name}
    buffers = {f"ema_{name.replace('.', '_')}": tensor for name, tensor in average.items()}
    source = pt(tmp_path, {"meta": {"epoch": 3}, "state_dict": {**state(1), **buffers}})
    assert ema_ckpt.consolidate(source, tmp_path / "ema.pt").tree == "state_dict.ema"
    assert_same(torch.load(tmp_path / "ema.pt", weights_only=True), average)
    ema_ckpt.consolidate(source, tmp_path / "live.pt", tree="state_dict")
    assert_same(torch.load(tmp_path / "live.pt", weights_only=True), state(1))
    found = ema_ckpt.diff(source)
    assert (found.tree_a, found.tree_b, found.compared) == ("state_dict.ema", "state_dict", 2)
    other = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3)})
    manager = ema_ckpt.ShardedEMA(other, 0.9)
    ema_ckpt.restore(source, model=other, ema=manager, strict=False)
    assert_same(dict(manager.full_state_dict()), average)


@pytest.mark.parametrize("verb", ["inspect", "verify", "consolidate", "diff", "synthesize"])
def test_an_average_below_bookkeeping_is_told_by_every_verb(tmp_path: Path, verb: str) -> None:
    tree = {"state_dict": state(1), "callbacks": {"EMA": {"ema": state(2), "decay": 0.9}}}
    source, out = pt(tmp_path, tree), tmp_path / "out.safetensors"
    calls: dict[str, Callable[[], Any]] = {
        "inspect": lambda: ema_ckpt.inspect(source),
        "verify": lambda: ema_ckpt.verify(source),
        "consolidate": lambda: ema_ckpt.consolidate(source, out),
        "diff": lambda: ema_ckpt.diff(source, source),
        "synthesize": lambda: ema_ckpt.synthesize([source], out, weights=[1.0]),
    }
    (warning,) = [w for w in calls[verb]().warnings if w.code == "left-out"]
    assert "callbacks.EMA.ema" in warning.message
    taken = ema_ckpt.consolidate(source, tmp_path / "ema.safetensors", "callbacks.EMA.ema")
    assert_same(load_file(tmp_path / "ema.safetensors"), state(2))
    assert taken.tree == "callbacks.EMA.ema"


@by_format
def test_a_padded_vocabulary_is_told(tmp_path: Path, write: Write) -> None:
    live = {
        name: torch.ones(rows, 4) for name, rows in (("embed.weight", 128), ("head.weight", 128))
    }
    average = {"embed.weight": torch.ones(125, 4), "head.weight": torch.zeros(128, 4)}
    source = write(tmp_path, {"model": live, "ema": average})
    results = [
        ema_ckpt.inspect(source),
        ema_ckpt.verify(source),
        ema_ckpt.consolidate(source, tmp_path / "out.safetensors"),
    ]
    for result in results:
        (warning,) = [w for w in result.warnings if w.code == "ema-unrelated"]
        assert "'embed.weight' [125, 4], live [128, 4]" in warning.message
    assert "ema-unrelated" in [finding.code for finding in ema_ckpt.diff(source).findings]


@pytest.mark.parametrize("write", [pt, dcp])
def test_objects_are_plain_values_by_full_name(tmp_path: Path, write: Write) -> None:
    values = {
        "step": 7,
        "betas": (0.9, 0.99),
        "name": "run",
        "nothing": None,
        "many": [1, 2.5, "x"],
    }
    with ema_ckpt.open(write(tmp_path, {"model": {"w": torch.ones(2)}, "args": values})) as ckpt:
        assert dict(ckpt.objects) == {f"args.{name}": value for name, value in values.items()}
        assert list(ckpt.objects) == [f"args.{name}" for name in values]
        assert "args.step" in ckpt.objects
        assert "model.w" not in ckpt.objects
        with pytest.raises(KeyError, match=r"no object 'args\.stop'; .*'args\.step'"):
            _ = ckpt.objects["args.stop"]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("ran",))


def test_objects_run_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=0.1), "step": 3}
    with ema_ckpt.open(pt(tmp_path, tree)) as ckpt:
        assert ckpt.objects["step"] == 3
        assert "argparse.Namespace" in repr(ckpt.objects["args"])
        assert not isinstance(ckpt.objects["args"], argparse.Namespace)
    with ema_ckpt.open(dcp(tmp_path, {**tree, "evil": Evil()})) as ckpt:
        assert set(ckpt.objects) == {"args", "evil", "step"}
        with pytest.raises(UnsafeError) as caught:
            _ = ckpt.objects["evil"]
        assert caught.value.code == "unsafe-pickle"
    assert "ran" not in capsys.readouterr().out


def test_buffers_of_names_without_dots_are_restored(tmp_path: Path) -> None:
    """mmcv's buffers of a model whose names have no dots at all."""
    layer, average = nn.Linear(3, 2), {"weight": torch.ones(2, 3), "bias": torch.full((2,), 2.0)}
    buffers = {f"ema_{name}": tensor for name, tensor in average.items()}
    source = pt(tmp_path, {"meta": {"epoch": 1}, "state_dict": {**layer.state_dict(), **buffers}})
    manager = ema_ckpt.ShardedEMA(layer, 0.9)
    ema_ckpt.restore(source, model=layer, ema=manager)
    assert_same(dict(manager.full_state_dict()), average)
