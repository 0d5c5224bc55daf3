"""Objects that real programs keep beside their weights: opaque, and never in the way of these."""

from __future__ import annotations

import enum
import pickle
from collections import ChainMap, Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ema_ckpt
from tests.checkpoints import save_dcp

PROTOCOLS = [2, 4]


class OneCycle:
    """Keeps a method of its own, as `OneCycleLR` up to torch 2.0 does: its `state_dict()` has it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.anneal_func = self.anneal

    def anneal(self, start: float, end: float, pct: float) -> float:
        return start + (end - start) * pct

    def state_dict(self) -> dict[str, Any]:
        return {"total_steps": 10, "anneal_func": self.anneal_func}


def run(extra: object) -> dict[str, Any]:
    return {"model": {"w": torch.arange(6.0)}, "extra": extra}


def schedule() -> OneCycle:
    return OneCycle(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1))


class Split(enum.Enum):
    TRAIN = "train"


class WithKeywords:
    """Pickles with arguments by name (opcode NEWOBJ_EX)."""

    def __new__(cls, *args: Any, **keywords: Any) -> WithKeywords:
        del args, keywords
        return object.__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[int], dict[str, int]]:
        return (1,), {"size": 2}


def check_opaque(path: Path, tmp_path: Path, name: str = "extra") -> None:
    """Every verb reads the weights, and says that `name` is left out."""
    assert ema_ckpt.verify(path).status == "sound"
    (warning,) = ema_ckpt.inspect(path).warnings
    assert warning.code == "opaque"
    assert repr(name) in warning.message
    converted = ema_ckpt.convert(path, tmp_path / "dcp", to="dcp")
    assert [one.name for one in converted.skipped] == [name]
    ema_ckpt.convert(tmp_path / "dcp", tmp_path / "back.pt")
    assert torch.equal(torch.load(tmp_path / "back.pt")["model"]["w"], torch.arange(6.0))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_method_of_an_object_is_opaque(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "run.pt"
    torch.save(run(schedule().state_dict()), path, pickle_protocol=protocol)
    check_opaque(path, tmp_path, "extra.anneal_func")
    torch.save(run(schedule()), path, pickle_protocol=protocol)
    assert ema_ckpt.verify(path).status == "sound"
    (warning,) = ema_ckpt.inspect(path).warnings
    assert "not read: 1 tensor in it" in warning.message


def test_a_method_of_an_object_in_a_dcp_is_opaque(tmp_path: Path) -> None:
    save_dcp(tmp_path / "run", run(schedule().state_dict()))
    assert ema_ckpt.verify(tmp_path / "run").status == "sound"
    with ema_ckpt.open(tmp_path / "run") as checkpoint:
        found = checkpoint.objects["extra.anneal_func"]
    assert repr(found) == f"<opaque {__name__}.OneCycle.anneal>"


class Calls:
    """Calls a method of an object while it is unpickled."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __reduce__(self) -> Any:
        return self.method, (1.0, 2.0, 0.5)


class Attribute:
    """Looks up any attribute of an object while it is unpickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return getattr, (SimpleNamespace(), self.name)


@pytest.mark.parametrize("form", ["torch", "dcp"])
@pytest.mark.parametrize(
    "value", [Calls(schedule().anneal), Attribute("__class__"), Attribute("eval")]
)
def test_a_method_that_is_called_is_unsafe(tmp_path: Path, form: str, value: object) -> None:
    path = tmp_path / "run"
    if form == "dcp":
        save_dcp(path, run(value))
    else:
        torch.save(run(value), path)
    found = ema_ckpt.verify(path)
    assert found.status == "damaged"
    assert {problem.code for problem in found.problems} == {"unsafe-pickle"}


HOLDERS = [
    deque([torch.ones(2)], maxlen=4),
    Counter({"loss": torch.ones(1)}),
    ChainMap({"loss": torch.ones(1)}),
    SimpleNamespace(loss=torch.ones(1)),
    np.array([torch.ones(1), None], dtype=object),
    torch.Generator(),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", HOLDERS, ids=lambda value: type(value).__name__)
def test_tensors_in_plain_containers_are_not_unsafe(
    tmp_path: Path, value: object, protocol: int
) -> None:
    path = tmp_path / "run.pt"
    torch.save(run(value), path, pickle_protocol=protocol)
    check_opaque(path, tmp_path)
    assert "not read: 1 tensor in it" in ema_ckpt.inspect(path).warnings[0].message


@pytest.mark.parametrize("key", [Split.TRAIN, torch.nn.Linear], ids=["enum", "class"])
def test_a_dict_with_keys_of_a_class_is_opaque(tmp_path: Path, key: object) -> None:
    torch.save(run({key: 1}), tmp_path / "run.pt")
    check_opaque(tmp_path / "run.pt", tmp_path)


@pytest.mark.parametrize("key", [b"x", frozenset([1]), torch.float32])
def test_a_dict_with_keys_that_no_text_stands_for_is_one_object(
    tmp_path: Path, key: object
) -> None:
    torch.save(run({key: 1, "a": 2}), tmp_path / "run.pt")
    assert ema_ckpt.verify(tmp_path / "run.pt").status == "sound"
    with ema_ckpt.open(tmp_path / "run.pt") as checkpoint:
        assert [*checkpoint.objects] == ["extra"]
        assert [*checkpoint.objects["extra"].values()] == [1, 2]
    for target in ("out.safetensors", "out.pt", "dcp"):
        ema_ckpt.convert(tmp_path / "run.pt", tmp_path / target)
        assert ema_ckpt.verify(tmp_path / target).status == "sound"


def test_bytes_as_keys_survive(tmp_path: Path) -> None:
    torch.save(run({b"x": 1, "a": 2}), tmp_path / "run.pt")
    ema_ckpt.convert(tmp_path / "run.pt", tmp_path / "dcp")
    ema_ckpt.convert(tmp_path / "dcp", tmp_path / "back.pt")
    assert torch.load(tmp_path / "back.pt")["extra"] == {b"x": 1, "a": 2}


def test_what_is_made_with_keywords_is_opaque(tmp_path: Path) -> None:
    torch.save(run(WithKeywords()), tmp_path / "run.pt", pickle_protocol=4)
    assert pickle.NEWOBJ_EX in pickle.dumps(WithKeywords(), 4)
    check_opaque(tmp_path / "run.pt", tmp_path)


@pytest.mark.parametrize("function", [max, min, len, sum, abs])
def test_harmless_functions_are_opaque(tmp_path: Path, function: object) -> None:
    torch.save(run(function), tmp_path / "run.pt")
    check_opaque(tmp_path / "run.pt", tmp_path)


def test_a_path_without_parts_is_a_dot(tmp_path: Path) -> None:
    torch.save(run(Path()), tmp_path / "run.pt")
    with ema_ckpt.open(tmp_path / "run.pt") as checkpoint:
        assert checkpoint.objects["extra"] == "."
