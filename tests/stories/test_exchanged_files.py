"""Whole rank files of ours that are exchanged, or come from another save: right in themselves, and of one layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ema_ckpt
from ema_ckpt import EmaCkptError
from tests.checkpoints import save_dcp


def state(fill: float) -> dict[str, object]:
    tensor = torch.arange(24.0).reshape(4, 6) + fill
    return {"model": {"w": tensor}, "ema": {"w": tensor + 1}}


def written(folder: Path, fill: float) -> Path:
    source = save_dcp(folder / f"source {fill}", state(fill))
    out = folder / f"ours {fill}"
    ema_ckpt.reshard(source, out, world_size=2)
    return out


def exchange(path: Path) -> None:
    (path / "__0_0.distcp").rename(path / "aside")
    (path / "__1_0.distcp").rename(path / "__0_0.distcp")
    (path / "aside").rename(path / "__1_0.distcp")


@pytest.fixture(params=["exchanged", "of another save", "saved, of another save"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "saved, of another save":
        pair = [tmp_path / "a", tmp_path / "b"]
        for fill, path in enumerate(pair):
            model = torch.nn.Linear(3, 4)
            torch.nn.init.constant_(model.weight, fill)
            ema_ckpt.save(path, model=model, ema=ema_ckpt.ShardedEMA(model))
        shutil.copy(pair[1] / "__0_0.distcp", pair[0])
        return pair[0]
    ours = written(tmp_path, 0)
    if request.param == "exchanged":
        exchange(ours)
    else:
        shutil.copy(written(tmp_path, 100) / "__1_0.distcp", ours)
    return ours


def opened(path: Path, out: Path) -> object:
    with ema_ckpt.open(path) as ckpt:
        return [ckpt[name] for name in ckpt]


def restored(path: Path, out: Path) -> object:
    is_saved = path.name == "a"
    model = torch.nn.Linear(3, 4) if is_saved else torch.nn.ParameterDict({"w": torch.zeros(4, 6)})
    return ema_ckpt.restore(path, model=model)


VERBS: dict[str, Callable[[Path, Path], object]] = {
    "reshard to 1": lambda path, out: ema_ckpt.reshard(path, out, 1),
    "reshard to 2": lambda path, out: ema_ckpt.reshard(path, out, 2),
    "reshard to 4": lambda path, out: ema_ckpt.reshard(path, out, 4),
    "convert to dcp": ema_ckpt.convert,
    "convert to a torch file": lambda path, out: ema_ckpt.convert(path, out.with_suffix(".pt")),
    "consolidate": lambda path, out: ema_ckpt.consolidate(path, out, tree="ema"),
    "consolidate, cast": lambda path, out: ema_ckpt.consolidate(path, out, dtype="bf16"),
    "diff": lambda path, out: ema_ckpt.diff(path),
    "synthesize": lambda path, out: ema_ckpt.synthesize([path, path], out, weights=[0.5, 0.5]),
    "open": opened,
    "restore": restored,
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_pieces_that_were_not_written_there(
    verb: str, mixed: Path, tmp_path: Path
) -> None:
    with pytest.raises(EmaCkptError) as caught:
        VERBS[verb](mixed, tmp_path / "out")
    assert caught.value.code == "checksum"
    assert "another save's" in str(caught.value)
    assert not list(tmp_path.glob("out*"))


def test_verify_calls_them_damaged(mixed: Path) -> None:
    found = ema_ckpt.verify(mixed)
    assert found.status == "damaged"
    assert {problem.code for problem in found.problems} == {"checksum"}


def test_without_verification_they_are_taken(tmp_path: Path) -> None:
    ours = written(tmp_path, 0)
    exchange(ours)
    ema_ckpt.reshard(ours, tmp_path / "out", 2, no_verify=True)


def test_an_object_of_another_save_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        torch.save({"model": {"w": torch.ones(3)}, "step": number}, tmp_path / f"{number}.pt")
        ema_ckpt.convert(tmp_path / f"{number}.pt", tmp_path / f"{number}")
    shutil.copy(tmp_path / "2/__0_0.distcp", tmp_path / "1")
    with pytest.raises(EmaCkptError, match="'step'") as caught:
        ema_ckpt.reshard(tmp_path / "1", tmp_path / "out", 2)
    assert caught.value.code == "checksum"
