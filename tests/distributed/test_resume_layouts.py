"""A run goes on bit for bit from a checkpoint that another layout and world size wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from ema_ckpt import restore, save
from ema_ckpt.ema.model.live_tree import live_tree
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.resume.optimizer_state import optimizer_tree
from tests.distributed.launcher import run
from tests.distributed.resume_runs import FAMILIES, WRAPS, batch_for, check, family_of, start, truth
from tests.distributed.test_update_layouts import WORLD_SIZES, whole_live

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAVED_AFTER, MORE = 2, 3


def save_all(parent: str, names: list[str]) -> None:
    for name in names:
        try:
            one = start(WRAPS[dist.get_world_size()][name])
            one.train(SAVED_AFTER)
            leave_unsharded(one.model, name)
            path = Path(parent, f"{name}.w{dist.get_world_size()}")
            save(
                path,
                model=one.model,
                ema=one.ema,
                optimizer=one.optimizer,
                extra={"step": one.step},
            )
        except Exception as error:
            raise AssertionError(f"layout {name}: {type(error).__name__}: {error}") from error


def leave_unsharded(model: nn.Module, layout: str) -> None:
    """A forward without backward, after which FSDP modules keep what they have gathered."""
    if "compiled" not in layout:  # nothing to gather there, and the compiler takes seconds
        with torch.no_grad():
            model(batch_for(layout, 0))


def restore_all(pairs: list[tuple[str, str]]) -> None:
    for name, path in pairs:
        try:
            restore_one(name, path)
        except Exception as error:
            raise AssertionError(f"{path} into {name}: {type(error).__name__}: {error}") from error


def restore_one(name: str, path: str) -> None:
    family = family_of(name)
    one = start(WRAPS[dist.get_world_size()][name], blank=True)
    leave_unsharded(one.model, name)
    report = restore(
        path, model=one.model, ema=one.ema, optimizer=one.optimizer, extra={"step": None}
    )
    assert report.missing == report.unexpected == report.seeded == ()
    one.step = report.extra["step"]
    assert one.step == SAVED_AFTER
    for steps in (SAVED_AFTER, SAVED_AFTER + MORE):
        if steps > SAVED_AFTER:
            one.train(MORE)
        expected = truth(family, steps)
        check(live_tree(scan_model(one.model)), expected.weights, "model")
        check(one.ema.state_dict()["weights"], expected.average, "ema")
        check(
            optimizer_tree(scan_model(one.model), [one.optimizer])["state"],
            expected.moments,
            "optimizer",
        )
        assert one.ema.num_updates == steps
        assert one.ema.current_decay == expected.decay
    for key, value in whole_live(one.model).items():
        assert torch.equal(value, expected.weights[key]), key
    if "compiled" not in name:
        check_forward(one.model, name, expected.weights)


def check_forward(model: nn.Module, layout: str, weights: dict[str, torch.Tensor]) -> None:
    """The model computes with what was restored, not with parameters it had gathered before."""
    whole = FAMILIES[family_of(layout)]()
    whole.load_state_dict(weights)
    with torch.no_grad():
        found, expected = model(batch_for(layout, 1)), whole(batch_for(layout, 1))
    precision = 0.05 if "mixed" in layout or "bfloat16" in layout else 1e-5
    assert torch.allclose(found.float(), expected.float(), rtol=precision, atol=precision), (
        f"{found} is not {expected}"
    )


def restore_foreign(live: str, files: list[str]) -> None:
    """Averages of whole files of another trainer go into shards."""
    for file in files:
        one = start(WRAPS[dist.get_world_size()]["fsdp2"], blank=True)
        report = restore(live, model=one.model, ema=one.ema, optimizer=one.optimizer, ema_path=file)
        assert report.trees["ema"] == "ignored"
        check(live_tree(scan_model(one.model)), truth("standard", SAVED_AFTER).weights, "model")
        check(one.ema.state_dict()["weights"], truth("standard", 7).average, "ema")
        assert one.ema.num_updates == (7 if file.endswith(".pt") else 0)


def torch_reads(path: Path, family: str) -> None:
    """The checkpoint holds the truth, as plain torch sees it: no code of ours in between."""
    expected = truth(family, SAVED_AFTER)
    state: dict[str, Any] = {
        "model": {name: torch.zeros_like(value) for name, value in expected.weights.items()},
        "ema": {
            "weights": {name: torch.zeros_like(value) for name, value in expected.average.items()},
            "num_updates": torch.zeros((), dtype=torch.int64),
        },
        "optimizer": {
            "state": {
                n: {k: torch.zeros_like(v) for k, v in m.items()}
                for n, m in expected.moments.items()
            }
        },
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert state["ema"]["num_updates"] == SAVED_AFTER
    for tree, whole in (
        (state["model"], expected.weights),
        (state["ema"]["weights"], expected.average),
        *(
            (state["optimizer"]["state"][name], moments)
            for name, moments in expected.moments.items()
        ),
    ):
        for name, value in whole.items():
            assert torch.equal(tree[name], value), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of every layout."""
    parent = tmp_path_factory.mktemp("layouts")
    for world_size, layouts in WRAPS.items():
        run(world_size, save_all, str(parent), list(layouts), timeout=180)
    return parent


def test_torch_reads_what_every_layout_wrote(saved: Path) -> None:
    found = sorted(saved.iterdir())
    assert len(found) == sum(map(len, WRAPS.values()))
    for path in found:
        torch_reads(path, family_of(path.name.partition(".")[0]))


def test_foreign_averages_go_into_shards(saved: Path, tmp_path: Path) -> None:
    whole = {f"module.{name}": value for name, value in truth("standard", 7).average.items()}
    torch.save({"model_ema": {**whole, "num_updates": 7}}, tmp_path / "a.pt")
    save_file(whole, tmp_path / "a.safetensors")
    dcp.save({"net": whole, "net_ema": whole}, checkpoint_id=tmp_path / "a", no_dist=True)
    files = [str(tmp_path / file) for file in ("a.pt", "a.safetensors", "a")]
    run(3, restore_foreign, str(saved / "ddp.w3"), files)


SOURCES = [
    "plain.w1",
    "ddp.w3",
    "fsdp2.w4",
    "hsdp-2x3.w6",
    "fsdp1-full-flat.w2",
    "fsdp1-grad-op.w3",
    "fsdp1-hybrid-flat.w4",
]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_run_goes_on_in_another_layout(saved: Path, world_size: int) -> None:
    everything = sorted(path.name for path in saved.iterdir())
    pairs = []
    for number, name in enumerate(WRAPS[world_size]):
        family = family_of(name)
        sources = [s for s in everything if family_of(s.partition(".")[0]) == family]
        if family == "standard":
            # Every source meets every kind of layout somewhere; each layout meets three.
            sources = [SOURCES[(number + world_size + shift) % len(SOURCES)] for shift in range(3)]
        pairs += [(name, str(saved / source)) for source in sources]
    run(world_size, restore_all, pairs, timeout=180)
