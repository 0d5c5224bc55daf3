"""What a checkpoint lacks or has elsewhere: options, moments, values at its top level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ema_ckpt import restore, save
from ema_ckpt.core.errors import SourceError
from tests.resume.training import Net, stepped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def content_of(tmp_path: Path, kind: Any) -> tuple[Net, dict[str, Any]]:
    model = Net()
    path = save(tmp_path / "c", model=model, optimizer=stepped(kind, model))
    dcp_to_torch_save(path, tmp_path / "c.pt")
    return model, torch.load(tmp_path / "c.pt", weights_only=True)


@pytest.mark.parametrize("option", ["lr", "betas", "weight_decay"])
def test_an_option_that_the_checkpoint_lacks_is_missing(tmp_path: Path, option: str) -> None:
    model, content = content_of(tmp_path, torch.optim.AdamW)
    del content["optimizer"]["param_groups"][0][option]
    torch.save(content, tmp_path / "torn.pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    name = f"optimizer.param_groups.0.{option}"
    with pytest.raises(SourceError, match=f"lacks '{name}'") as caught:
        restore(tmp_path / "torn.pt", model=model, optimizer=optimizer)
    assert caught.value.code == "incomplete"
    assert not optimizer.state
    report = restore(tmp_path / "torn.pt", model=model, optimizer=optimizer, strict=False)
    assert report.missing == (name,)
    assert optimizer.param_groups[0]["lr"] == (3e-4 if option == "lr" else 1e-3)


def test_state_without_any_parameter_group_is_restored_where_that_is_allowed(
    tmp_path: Path,
) -> None:
    model, content = content_of(tmp_path, torch.optim.AdamW)
    stepped_before = content["optimizer"]["state"]
    del content["optimizer"]["param_groups"]
    torch.save(content, tmp_path / "torn.pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with pytest.raises(SourceError, match=r"lacks .*optimizer\.param_groups\.0\.lr") as caught:
        restore(tmp_path / "torn.pt", model=model, optimizer=optimizer)
    assert caught.value.code == "incomplete"
    report = restore(tmp_path / "torn.pt", model=model, optimizer=optimizer, strict=False)
    assert {"optimizer.param_groups.0.lr", "optimizer.param_groups.0.betas"} <= {*report.missing}
    assert optimizer.param_groups[0]["lr"] == 3e-4
    for name, parameter in model.named_parameters():
        if name in stepped_before:
            restored = optimizer.state[parameter]["exp_avg"]
            assert torch.equal(restored, stepped_before[name]["exp_avg"])


@pytest.mark.parametrize("option", ["foreach", "decoupled_weight_decay"])
def test_a_switch_of_another_release_of_torch_is_not_missing(tmp_path: Path, option: str) -> None:
    model, content = content_of(tmp_path, torch.optim.AdamW)
    del content["optimizer"]["param_groups"][0][option]
    torch.save(content, tmp_path / "older.pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    assert not restore(tmp_path / "older.pt", model=model, optimizer=optimizer).missing


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        (torch.optim.AdamW, "exp_avg"),
        (torch.optim.RMSprop, "square_avg"),
        (torch.optim.Adagrad, "step"),
    ],
)
def test_moments_that_the_checkpoint_lacks_are_missing(
    tmp_path: Path, kind: Any, moment: str
) -> None:
    model, content = content_of(tmp_path, kind)
    for state in content["optimizer"]["state"].values():
        del state[moment]
    torch.save(content, tmp_path / "torn.pt")
    optimizer = stepped(kind, model)
    with pytest.raises(SourceError, match=rf"optimizer\.state\.enter\.bias\.{moment}") as caught:
        restore(tmp_path / "torn.pt", model=model, optimizer=optimizer)
    assert caught.value.code == "incomplete"
    report = restore(tmp_path / "torn.pt", model=model, optimizer=optimizer, strict=False)
    assert f"optimizer.state.enter.bias.{moment}" in report.missing
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_numpy_scalars_are_saved_as_plain_numbers(tmp_path: Path) -> None:
    model = Net()
    betas = (np.float32(0.5), np.float64(0.25))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.param_groups[0].update(lr=np.float64(0.125), betas=betas)
    path = save(tmp_path / "c", model=model, optimizer=optimizer)
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-3)
    restore(path, model=model, optimizer=fresh)
    assert fresh.param_groups[0]["lr"] == 0.125
    assert type(fresh.param_groups[0]["lr"]) is float
    assert fresh.param_groups[0]["betas"] == (0.5, 0.25)


def test_extra_is_found_at_the_top_level(tmp_path: Path) -> None:
    model = Net()
    state = {
        "model": model.state_dict(),
        "step": 12,
        "name": "run",
        "train_state": {"epoch": torch.tensor(3), "losses": [0.5, 0.25]},
        "extra": {"name": "inner"},
    }
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    asked = {"step": 0, "train_state": None, "name": None}
    report = restore(tmp_path / "c", model=model, extra=asked)
    assert report.extra["step"] == 12
    assert report.extra["name"] == "inner"
    assert report.extra["train_state"] == {"epoch": torch.tensor(3), "losses": [0.5, 0.25]}
    with pytest.raises(SourceError, match=r"it lacks 'extra\.other'"):
        restore(tmp_path / "c", model=model, extra={"other": 0})


@pytest.mark.parametrize("name", ["optim", "opt", "optimizer_0", "g_optimizer"])
def test_an_optimizers_tree_of_another_name_is_restored(tmp_path: Path, name: str) -> None:
    model, content = content_of(tmp_path, torch.optim.AdamW)
    torch.save({"model": content["model"], name: content["optimizer"]}, tmp_path / "d.pt")
    optimizer = torch.optim.AdamW(model.parameters())
    report = restore(tmp_path / "d.pt", model=model, optimizer=optimizer)
    assert report.trees == {"model": "restored", name: "restored"}
    assert optimizer.state
