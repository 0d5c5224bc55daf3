"""timm: its `CheckpointSaver` with a `ModelEmaV3`."""

from __future__ import annotations

import warnings
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import ema_ckpt
from tests.distributed import launcher
from tests.integration.proving import Made, assert_same_bits, goes_through_all_verbs
from tests.integration.table import Row
from tests.integration.training import kept

pytestmark = pytest.mark.integration


def small() -> torch.nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model(
        "resnet10t", num_classes=3, stem_width=8, stem_type="", channels=(8, 8, 8, 8)
    )


def saves(folder: Path) -> None:
    from timm.utils import CheckpointSaver, ModelEmaV3

    warnings.simplefilter("ignore")
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = ModelEmaV3(model, decay=0.9)
    saver = CheckpointSaver(
        model, optimizer, args=Namespace(model="resnet10t", lr=0.1), model_ema=average, checkpoint_dir=str(folder / "run"),
        recovery_dir=str(folder / "run"),
    )  # fmt: skip
    (folder / "run").mkdir()
    for epoch in range(2):
        model(torch.randn(4, 3, 32, 32)).square().mean().backward()
        optimizer.step()
        average.update(model)
        saver.save_checkpoint(epoch, metric=float(epoch))
    torch.save(model.state_dict(), folder / "live.pt")
    torch.save(average.module.state_dict(), folder / "average.pt")


def loads(folder: Path) -> None:
    from timm.models import load_checkpoint

    warnings.simplefilter("ignore")
    for file, name, use_ema in (("back.pt", "back", True), ("back.pt", "live-back", False), ("one.safetensors", "one", True)):  # fmt: skip
        model = small()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_checkpoint(model, str(folder / file), use_ema=use_ema)
        torch.save(model.state_dict(), folder / f"loaded-{name}.pt")


@pytest.mark.parametrize("name", ["last.pth.tar", "checkpoint-1.pth.tar"])
def test_saver(name: str, tmp_path: Path) -> None:
    with Row("timm", f"`CheckpointSaver`, `{name}`") as row:
        launcher.run(1, saves, tmp_path, timeout=120)
        live, average = kept(tmp_path / "live.pt"), kept(tmp_path / "average.pt")
        made = Made(
            tmp_path / "run" / name,
            {"state_dict": "live", "state_dict_ema": "ema", "optimizer": "optimizer"},
            {"state_dict": live, "state_dict_ema": average},
            left_out=("argparse.Namespace",),  # `args`, which no reader here makes
        )
        goes_through_all_verbs(row, made, tmp_path)
        ema_ckpt.consolidate(made.path, tmp_path / "one.safetensors")
        launcher.run(1, loads, tmp_path, timeout=120)
        assert_same_bits(kept(tmp_path / "loaded-back.pt"), average)
        assert_same_bits(kept(tmp_path / "loaded-one.pt"), average)
        assert_same_bits(kept(tmp_path / "loaded-live-back.pt"), live)
        row.shown("loaded back", "`load_checkpoint`")


def test_the_run_stands_for_its_newest_step(tmp_path: Path) -> None:
    launcher.run(1, saves, tmp_path, timeout=120)
    assert ema_ckpt.inspect(tmp_path / "run").resolved.endswith("checkpoint-1.pth.tar")
