"""Objects that name functions and classes: what runs code is refused, the rest is told by name, nothing is called."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import ema_ckpt
from tests.checkpoints import save_dcp, weights

KINDS = ["dcp", "pt"]


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function: object, *args: object) -> None:
        self._call = (function, args)

    def __reduce__(self) -> tuple[object, ...]:
        return self._call


def saved(folder: Path, kind: str, value: object) -> Path:
    tree: dict[str, object] = {"model": weights(), "hyper_parameters": {"value": value}}
    if kind == "dcp":
        return save_dcp(folder / "src", tree)
    torch.save(tree, folder / "src.pt")
    return folder / "src.pt"


def refused(source: Path, name: str) -> None:
    report = ema_ckpt.verify(source)
    assert report.status == "damaged"
    assert [(p.code, name in p.message) for p in report.problems] == [("unsafe-pickle", True)]
    for verb in (ema_ckpt.convert, ema_ckpt.reshard):
        with pytest.raises(ema_ckpt.EmaCkptError, match="--exclude") as caught:
            verb(source, source.parent / "out", world_size=1)
        assert caught.value.code == "unsafe-pickle"
    if source.suffix == ".pt":
        warnings = ema_ckpt.inspect(source).warnings
        assert [(w.code, name in w.message) for w in warnings] == [("unsafe-pickle", True)]


@pytest.mark.parametrize("kind", KINDS)
def test_open_under_the_name_that_python_gives_it_is_unsafe(tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "marker"
    refused(saved(tmp_path, kind, Calls(open, str(marker), "w")), "io.open")
    assert not marker.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_is_harmless(tmp_path: Path, kind: str) -> None:
    source = saved(tmp_path, kind, range(3))
    assert ema_ckpt.verify(source).status == "sound"
    assert ema_ckpt.consolidate(source, tmp_path / "out.safetensors").tensors == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [lambda f: f, lambda f: [{"deep": (f,)}]])
def test_a_function_that_runs_code_is_unsafe_by_its_name_alone(
    tmp_path: Path, kind: str, held: Callable[[object], object]
) -> None:
    refused(saved(tmp_path, kind, held(os.system)), "posix.system")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [lambda c: c, lambda c: [c]])
def test_a_class_is_told_by_name(
    tmp_path: Path, kind: str, held: Callable[[object], object]
) -> None:
    source = saved(tmp_path, kind, held(argparse.Namespace))
    report = ema_ckpt.verify(source)
    assert report.status == "sound"
    assert [(w.code, "argparse.Namespace" in w.message) for w in report.warnings] == [
        ("opaque", True)
    ]
    done = ema_ckpt.convert(source, tmp_path / "out.safetensors")
    assert [
        (item.name.startswith("hyper_parameters.value"), item.reason) for item in done.skipped
    ] == [(True, "holds a argparse.Namespace")]
    if kind == "pt":
        assert [w.code for w in ema_ckpt.inspect(source).warnings] == ["opaque"]


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_weights_inside_a_saved_module_are_named_by_verbs_that_find_none(
    tmp_path: Path, has_optimizer: bool
) -> None:
    source, out = tmp_path / "last.pt", tmp_path / "out.safetensors"
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"epoch": 1, "model": None, "ema": model}
    torch.save(state | ({"optimizer": optimizer.state_dict()} if has_optimizer else {}), source)
    calls: list[Callable[[], object]] = [
        lambda: ema_ckpt.consolidate(source, out),
        lambda: ema_ckpt.synthesize([source, source], out, weights=[0.5, 0.5]),
        lambda: ema_ckpt.diff(source, source),
        lambda: ema_ckpt.open(source).state_dict(),
    ]
    for call in calls:
        with pytest.raises(ema_ckpt.UsageError, match=r"'ema' holds a .*Linear.*state_dict\(\)"):
            call()


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_are_plain(tmp_path: Path, kind: str) -> None:
    report = ema_ckpt.verify(saved(tmp_path, kind, torch.bfloat16))
    assert (report.status, report.warnings) == ("sound", ())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, np.random.PCG64])
def test_generators_of_numpy_are_opaque(
    tmp_path: Path, kind: str, make: Callable[[int], object]
) -> None:
    report = ema_ckpt.verify(saved(tmp_path, kind, make(1)))
    assert report.status == "sound"
    assert {w.code for w in report.warnings} == {"opaque"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_generator_would_call_is_looked_at_too(tmp_path: Path, kind: str) -> None:
    constructor = np.random.default_rng(1).__reduce__()[0]
    refused(saved(tmp_path, kind, Calls(constructor, "touch x", os.system)), "posix.system")
