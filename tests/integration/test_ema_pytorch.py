"""ema-pytorch: the state of its `EMA` as its author's trainers save it, and its post-hoc snapshots."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import launcher
from tests.integration.proving import Made, assert_same_bits, goes_through_all_verbs
from tests.integration.table import Row
from tests.integration.training import Net, batch, kept

pytestmark = pytest.mark.integration


def averaged(model: Net) -> Any:
    from ema_pytorch import EMA

    return EMA(model, beta=0.9, update_after_step=0, update_every=1)


def saves(folder: Path, with_online: bool) -> None:
    from ema_pytorch import EMA

    warnings.simplefilter("ignore")
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    average = EMA(model, beta=0.9, update_after_step=0, include_online_model=with_online)
    for step in range(25):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    data = {"step": 25, "model": model.state_dict(), "opt": optimizer.state_dict(), "ema": average.state_dict(), "scaler": None}  # fmt: skip
    torch.save(data, folder / "model-25.pt")
    torch.save(model.state_dict(), folder / "live.pt")
    torch.save(average.ema_model.state_dict(), folder / "average.pt")


def loads(folder: Path, with_online: bool) -> None:
    from ema_pytorch import EMA

    model = Net(seed=1)
    average = EMA(model, beta=0.9, include_online_model=with_online)
    average.load_state_dict(torch.load(folder / "back.pt", weights_only=True)["ema"])
    assert int(average.step) == 25
    torch.save(average.ema_model.state_dict(), folder / "loaded.pt")


@pytest.mark.parametrize("with_online", [True, False])
def test_ema(with_online: bool, tmp_path: Path) -> None:
    what = "`EMA` in a trainer's torch file" + ("" if with_online else ", without the online model")
    with Row("ema-pytorch", what) as row:
        launcher.run(1, saves, tmp_path, with_online, timeout=120)
        live, average = kept(tmp_path / "live.pt"), kept(tmp_path / "average.pt")
        made = Made(
            tmp_path / "model-25.pt",
            {"model": "live", "opt": "optimizer", "ema": "ema"}
            | ({"ema.online_model": "live"} if with_online else {}),
            {"model": live, "ema": average},
        )
        goes_through_all_verbs(row, made, tmp_path)
        launcher.run(1, loads, tmp_path, with_online, timeout=120)
        assert_same_bits(kept(tmp_path / "loaded.pt"), average)
        row.shown("loaded back", "`EMA.load_state_dict`")
