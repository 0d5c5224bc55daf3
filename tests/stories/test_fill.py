"""What an EMA lacks: told against the paired live weights, and filled from no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ema_ckpt
from tests.checkpoints import save_dcp


def run_at(path: Path, wrapper: str = "") -> Path:
    """A model of two parts; its average lacks `a.bias` and `b.bias`."""
    names = ["a.w", "a.bias", "b.w", "b.bias"]
    live = {f"{wrapper}{name}": torch.full((2,), float(i)) for i, name in enumerate(names)}
    average = {name: torch.full((2,), 10.0) for name in ("a.w", "b.w")}
    tree = {"model": live, "ema": {"weights": average, "num_updates": torch.tensor(3)}}
    return save_dcp(path, {**tree, "spare": {"a.bias": torch.full((2,), 20.0)}})


def written(path: Path) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in torch.load(path, weights_only=True).items()}


@pytest.mark.parametrize("fill", [True, "model", "model.a"])
@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_part_of_an_ema_is_filled_from_the_same_part(
    tmp_path: Path, wrapper: str, fill: bool | str
) -> None:
    if wrapper and fill == "model.a":
        fill = "model.module.a"
    source = run_at(tmp_path / "run", wrapper)
    done = ema_ckpt.consolidate(source, tmp_path / "out.pt", tree="ema.weights.a", fill=fill)
    assert done.filled == ("bias",)
    assert done.warnings == ()
    assert written(tmp_path / "out.pt") == {"w": [10.0, 10.0], "bias": [1.0, 1.0]}


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_part_of_an_ema_lacks_only_what_that_part_of_the_model_has(
    tmp_path: Path, wrapper: str
) -> None:
    done = ema_ckpt.consolidate(
        run_at(tmp_path / "run", wrapper), tmp_path / "out.pt", tree="ema.weights.a"
    )
    (warning,) = done.warnings
    assert warning.code == "ema-partial"
    assert "lacks 1 tensor that 'model.a' has: bias" in warning.message.replace("'bias'", "bias")
    assert written(tmp_path / "out.pt") == {"w": [10.0, 10.0]}


def test_a_whole_part_is_not_called_partial(tmp_path: Path) -> None:
    live = {"a.w": torch.ones(2), "b.w": torch.ones(2)}
    tree = {"model": live, "ema": {"weights": live, "num_updates": torch.tensor(3)}}
    source = save_dcp(tmp_path / "run", tree)
    for fill in (False, True):
        done = ema_ckpt.consolidate(
            source, tmp_path / f"{fill}.pt", tree="ema.weights.a", fill=fill
        )
        assert (done.warnings, done.filled, done.tensors) == ((), (), 1)


def test_a_list_of_averages_named_by_its_own_path_is_paired_with_the_model(tmp_path: Path) -> None:
    live = {"w": torch.ones(2), "b": torch.zeros(3)}
    tree = {"model": live, "ema": {"shadow_params": list(live.values()), "num_updates": 3}}
    source = save_dcp(tmp_path / "run", tree)
    done = ema_ckpt.consolidate(source, tmp_path / "a.pt", tree="ema.shadow_params", fill=True)
    assert done.warnings == done.filled == ()
    assert written(tmp_path / "a.pt") == {name: value.tolist() for name, value in live.items()}
    assert ema_ckpt.diff(source, tree="ema.shadow_params").identical == 2
    short = save_dcp(
        tmp_path / "short", {"model": live, "ema": {"shadow_params": [live["w"]], "num_updates": 3}}
    )
    with pytest.raises(ema_ckpt.EmaCkptError, match="cannot be paired") as caught:
        ema_ckpt.consolidate(short, tmp_path / "b.pt", tree="ema.shadow_params")
    assert caught.value.code == "unsupported"


def test_what_another_tree_does_not_fill_is_still_told(tmp_path: Path) -> None:
    done = ema_ckpt.consolidate(run_at(tmp_path / "run"), tmp_path / "out.pt", fill="spare")
    assert done.filled == ("a.bias",)
    (warning,) = done.warnings
    assert warning.code == "ema-partial"
    assert "b.bias" in warning.message
    assert "a.bias" not in warning.message
    assert written(tmp_path / "out.pt")["a.bias"] == [20.0, 20.0]
