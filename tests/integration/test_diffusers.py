"""diffusers: what its training scripts leave in a step, sharded and variant weights, `EMAModel` by itself."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ema_ckpt
from tests.distributed import launcher
from tests.integration.proving import Made, State, assert_same_bits, goes_through_all_verbs
from tests.integration.table import Row
from tests.integration.training import kept

pytestmark = pytest.mark.integration


def small(kind: str) -> Any:
    import diffusers

    torch.manual_seed(0)
    if kind == "unet":
        return diffusers.UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8,),
            down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), norm_num_groups=4,
        )  # fmt: skip
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=2, out_channels=2, num_layers=1, sample_size=4,
        cross_attention_dim=8, caption_channels=8,
    )  # fmt: skip


def moved(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def trained(kind: str) -> tuple[Any, Any]:
    """A model and diffusers' average of it after three steps."""
    from diffusers.training_utils import EMAModel

    model = small(kind)
    average = EMAModel(
        model.parameters(), decay=0.9, model_cls=type(model), model_config=model.config
    )
    for step in range(3):
        moved(model, step)
        average.step(model.parameters())
    return model, average


def whole(model: Any, average: Any | None = None) -> dict[str, torch.Tensor]:
    """The state of a copy of the model, with the averages put in by diffusers' own `copy_to`."""
    one = copy.deepcopy(model)
    if average is not None:
        average.copy_to(one.parameters())
    return {name: tensor.clone() for name, tensor in one.state_dict().items()}


def leaves_a_step(folder: Path, kind: str, options: dict[str, Any]) -> None:
    """As `examples/*/train_*.py` do in the hook of accelerate's `save_state`."""
    warnings.simplefilter("ignore")
    model, average = trained(kind)
    step = folder / "checkpoint-3"
    model.save_pretrained(step / kind, **options)
    average.save_pretrained(step / f"{kind}_ema")
    torch.save({"state": {}, "param_groups": [{"lr": 0.1}]}, step / "scheduler.bin")
    torch.save(whole(model), folder / "live.pt")
    torch.save(whole(model, average), folder / "average.pt")


def loads(folder: Path, kind: str) -> None:
    from diffusers.training_utils import EMAModel

    warnings.simplefilter("ignore")
    model = type(small(kind)).from_pretrained(folder / "one")
    torch.save(dict(model.state_dict()), folder / "loaded.pt")
    average = EMAModel.from_pretrained(folder / "one-ema", type(model))
    assert average.optimization_step == 3
    torch.save(whole(model, average), folder / "loaded-average.pt")


@pytest.mark.parametrize(
    ("kind", "options", "what"),
    [
        ("unet", {}, "a step with `unet` and `unet_ema`"),
        ("transformer", {"max_shard_size": "4KB"}, "a step with `transformer` in shards and `transformer_ema`"),
        ("unet", {"variant": "fp16", "max_shard_size": "4KB"}, "a step with `unet` in shards of a variant and `unet_ema`"),
    ],
)  # fmt: skip
def test_a_step(kind: str, options: dict[str, Any], what: str, tmp_path: Path) -> None:
    with Row("diffusers", what) as row:
        launcher.run(1, leaves_a_step, tmp_path, kind, options, timeout=120)
        step = tmp_path / "checkpoint-3"
        live, average = kept(tmp_path / "live.pt"), kept(tmp_path / "average.pt")
        made = Made(
            step, {kind: "live", f"{kind}_ema": "ema"}, {kind: live, f"{kind}_ema": average},
            verdict="unproven", beside=("config.json",),
        )  # fmt: skip
        goes_through_all_verbs(row, made, tmp_path)
        assert ema_ckpt.inspect(step).ema[f"{kind}_ema"]["num_updates"] == 3
        for tree, name in ((kind, "one"), (f"{kind}_ema", "one-ema")):
            out = tmp_path / name
            ema_ckpt.consolidate(step, out, tree=tree, basename="diffusion_pytorch_model")
            shutil.copy(step / tree / "config.json", out)
        launcher.run(1, loads, tmp_path, kind, timeout=120)
        assert_same_bits(kept(tmp_path / "loaded.pt"), live)
        assert_same_bits(kept(tmp_path / "loaded-average.pt"), average)
        row.shown("loaded back", "`from_pretrained`, `EMAModel.from_pretrained`")


def saves_state_dicts(folder: Path) -> None:
    warnings.simplefilter("ignore")
    model, average = trained("unet")
    torch.save({"model": model.state_dict(), "ema": average.state_dict()}, folder / "last.pt")
    torch.save(whole(model), folder / "live.pt")
    torch.save(whole(model, average), folder / "average.pt")


def loads_state_dict(folder: Path) -> None:
    from diffusers.training_utils import EMAModel

    model = small("unet")
    average = EMAModel(model.parameters())
    average.load_state_dict(torch.load(folder / "back.pt", weights_only=True)["ema"])
    model.load_state_dict(torch.load(folder / "back.pt", weights_only=True)["model"])
    torch.save(whole(model, average), folder / "loaded.pt")


def test_state_dict_of_an_average(tmp_path: Path) -> None:
    with Row("diffusers", "`EMAModel.state_dict()` in a torch file") as row:
        launcher.run(1, saves_state_dicts, tmp_path, timeout=120)
        live, average = kept(tmp_path / "live.pt"), kept(tmp_path / "average.pt")
        whole_trees: dict[str, State] = {"model": live, "ema": average}
        made = Made(tmp_path / "last.pt", {"model": "live", "ema": "ema"}, whole_trees)
        goes_through_all_verbs(row, made, tmp_path)
        launcher.run(1, loads_state_dict, tmp_path, timeout=120)
        assert_same_bits(kept(tmp_path / "loaded.pt"), average)
        row.shown("loaded back", "`EMAModel.load_state_dict`")
