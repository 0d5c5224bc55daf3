"""The table of `docs/migration.md`: a checkpoint in each trainer's layout is read, converted, compared, resumed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import ema_ckpt
from ema_ckpt import ShardedEMA, Warmup
from tests.checkpoints import save_dcp

pytestmark = pytest.mark.filterwarnings("ignore:.*(no averages|is ignored|settings).*:UserWarning")

State = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two linear layers, a norm, a buffer of whole numbers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enc = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)
        self.dec = nn.Linear(5, 2, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter)


def live() -> State:
    return {name: tensor.detach().clone() for name, tensor in Net(1).state_dict().items()}


def average() -> State:
    return {name: tensor.detach().clone() for name, tensor in Net(2).state_dict().items()}


def under(prefix: str, state: State) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


# Each writes one trainer's layout.


def longlive(path: Path) -> Path:
    """LongLive and Self-Forcing: `{generator, generator_ema}` in `model.pt`, names as FSDP1 gives them."""
    averages = under("model._fsdp_wrapped_module.", average())
    torch.save(
        {"generator": under("model.", live()), "generator_ema": averages, "step": 700},
        path / "model.pt",
    )
    return path / "model.pt"


def automodel(path: Path) -> Path:
    """NeMo Automodel: `model/` in torch's safetensors shards, `optim/` and `ema/` as DCP, the average under plain names."""
    step = path / "epoch_0_step_100"
    writer = HuggingFaceStorageWriter(str(step / "model"), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(live(), storage_writer=writer, no_dist=True)
    moments = {
        name: {"exp_avg": torch.ones_like(t), "step": torch.tensor(100.0)}
        for name, t in live().items()
    }
    save_dcp(step / "optim", {"optim": {"state": moments}})
    save_dcp(step / "ema", average())
    torch.save({"rng": 1}, step / "rng_state.pt")
    return path


def torchtitan(path: Path) -> Path:
    """torchtitan's `EMAOptimizersContainer`: the average as if it were an optimizer's state, in the same DCP."""
    moments = {f"optimizer.state.{name}.exp_avg": t for name, t in live().items()}
    averages = {f"ema_optimizer.state.{name}.ema_params": t for name, t in average().items()}
    groups = {f"ema_optimizer.param_groups.{name}.lr": 0.1 for name in live()}
    return save_dcp(path / "step-100", {**live(), **moments, **averages, **groups})


DIST_EMA = {
    "dtype": "fp32", "decay": 0.9999, "warmup": True, "power": 0.75, "min_decay": 0.1, "inv_gamma": 2.0,
    "update_after_step": 10, "decay_steps": 321,
}  # fmt: skip


def dist_ema(path: Path) -> Path:
    """DistEMA: `{"model", "ema": {"model", "config"}}`."""
    torch.save(
        {"model": live(), "ema": {"model": average(), "config": DIST_EMA}}, path / "last.pth"
    )
    return path / "last.pth"


def cosmos(path: Path) -> Path:
    """Cosmos: `net.*` and `net_ema.*` side by side in one flat DCP."""
    return save_dcp(
        path / "iter_000001000" / "model", {**under("net.", live()), **under("net_ema.", average())}
    )


def diffusers_folder(path: Path) -> Path:
    """diffusers' `EMAModel.save_pretrained`: weights, and the average's settings in `config.json`."""
    for name, state, config in (
        ("model", live(), {}),
        (
            "unet_ema",
            average(),
            {"decay": 0.9999, "optimization_step": 55, "use_ema_warmup": False, "power": 0.6},
        ),
    ):
        folder = path / "checkpoint-55" / name
        folder.mkdir(parents=True)
        save_file(state, folder / "diffusion_pytorch_model.safetensors")
        (folder / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel", **config}))
    return path


def shadow_params(path: Path) -> Path:
    """diffusers and torch_ema: a list in the order of the parameters."""
    shadow = {
        "shadow_params": list(average().values()),
        "decay": 0.999,
        "optimization_step": 12,
        "min_decay": 0.0,
    }
    torch.save({"model": live(), "ema": shadow}, path / "checkpoint.pt")
    return path / "checkpoint.pt"


def lightning(path: Path) -> Path:
    """Lightning's `WeightAveraging`: averages under `state_dict`, live weights under `current_model_state`."""
    tree = {
        "state_dict": average(),
        "current_model_state": live(),
        "averaging_state": {"n_averaged": torch.tensor(44)},
        "global_step": 44,
        "hyper_parameters": {"lr": 0.1},
        "optimizer_states": [
            {"state": {0: {"exp_avg": torch.ones(5, 3)}}, "param_groups": [{"lr": 0.1}]}
        ],
    }
    torch.save(tree, path / "last.ckpt")
    return path / "last.ckpt"


def timm(path: Path) -> Path:
    """timm: `state_dict` and `state_dict_ema`, here saved from under DDP."""
    tree = {
        "epoch": 3,
        "arch": "net",
        "state_dict": live(),
        "state_dict_ema": under("module.", average()),
    }
    torch.save(tree, path / "checkpoint-3.pth.tar.pth")
    return path / "checkpoint-3.pth.tar.pth"


def averaged_model(path: Path) -> Path:
    """torch's `AveragedModel`: `module.*` beside `n_averaged`."""
    averaged = {"n_averaged": torch.tensor(9), **under("module.", average())}
    torch.save({"model": live(), "ema": averaged}, path / "swa.pt")
    return path / "swa.pt"


def ema_pytorch(path: Path) -> Path:
    """ema-pytorch: `ema_model.*` and `online_model.*` beside counters."""
    tree = {**under("ema_model.", average()), **under("online_model.", live())}
    tree |= {"initted": torch.tensor(True), "step": torch.tensor(77)}
    torch.save({"model": live(), "ema": tree}, path / "ema.pt")
    return path / "ema.pt"


def dotless(path: Path) -> Path:
    """LitEma: buffers whose names have lost their dots, beside `decay` and `num_updates`."""
    bare = {name.replace(".", ""): tensor for name, tensor in average().items()}
    shadow = {"decay": torch.tensor(0.9999), "num_updates": torch.tensor(17), **bare}
    torch.save({"state_dict": live(), "model_ema": shadow}, path / "ldm.ckpt")
    return path / "ldm.ckpt"


def mmengine(path: Path) -> Path:
    """mmengine's `EMAHook`: exchanged, the average under `state_dict`, the live weights as `module.*`."""
    exchanged = {"steps": torch.tensor(30), **under("module.", live())}
    tree = {
        "meta": {"epoch": 2},
        "state_dict": average(),
        "ema_state_dict": exchanged,
        "message_hub": {"runtime_info": {"iter": 30}},
    }
    torch.save(tree, path / "epoch_2.pth")
    return path / "epoch_2.pth"


def mmcv(path: Path) -> Path:
    """mmcv's `EMAHook`: buffers of the model, dots as underscores."""
    buffers = {f"ema_{name.replace('.', '_')}": tensor for name, tensor in average().items()}
    torch.save({"meta": {"epoch": 2}, "state_dict": {**live(), **buffers}}, path / "latest.pth")
    return path / "latest.pth"


def composer(path: Path) -> Path:
    """Composer's `EMA`: exchanged while `ema_weights_active`, the live weights in a list of pairs."""
    algorithm = {
        "ema_model": {"named_parameters_dict": live(), "named_buffers_dict": {}},
        "ema_weights_active": True,
    }
    groups = [{"lr": 0.1, "params": list(live())}]
    state = {
        "model": average(), "optimizers": {"SGD": {"state": {}, "param_groups": groups}},
        "algorithms": [("EMA", algorithm)],
    }  # fmt: skip
    torch.save({"state": state, "rng": [{"seed": 1}]}, path / "ep2-ba4-rank0.pt")
    return path / "ep2-ba4-rank0.pt"


def dictionary(path: Path) -> Path:
    """A dictionary around everything, plain values beside the trees."""
    tree = {"model": live(), "ema": average(), "epoch": 3, "config": {"lr": 0.1}}
    torch.save({"ckpt": tree}, path / "run.pt")
    return path / "run.pt"


def submodule(path: Path) -> Path:
    """A module that keeps ema-pytorch's wrapper as a submodule, as Lightning saves it."""
    tree = {**live(), **under("ema.ema_model.", average())}
    tree |= {"ema.initted": torch.tensor(True), "ema.step": torch.tensor(77)}
    torch.save({"state_dict": tree, "epoch": 1}, path / "last.ckpt")
    return path / "last.ckpt"


@dataclass(frozen=True)
class Seed:
    """A layout: who writes it, its live and EMA trees, the prefix of weights there, counter and decay."""

    write: Callable[[Path], Path]
    live: str
    ema: str
    prefix: str = ""
    updates: int | None = None
    decay: float | None = None


SEEDS = [
    Seed(longlive, "generator", "generator_ema", "model."),
    Seed(automodel, "model", "ema"),
    Seed(torchtitan, "", "ema_optimizer"),
    Seed(dist_ema, "model", "ema", updates=321, decay=0.9999),
    Seed(cosmos, "net", "net_ema"),
    Seed(diffusers_folder, "model", "unet_ema", updates=55, decay=0.9999),
    Seed(shadow_params, "model", "ema", updates=12, decay=0.999),
    Seed(lightning, "current_model_state", "state_dict", updates=44),
    Seed(timm, "state_dict", "state_dict_ema"),
    Seed(averaged_model, "model", "ema", updates=9),
    Seed(ema_pytorch, "model", "ema", updates=77),
    Seed(submodule, "state_dict", "state_dict.ema", updates=77),
    Seed(dotless, "state_dict", "model_ema", updates=17, decay=0.9999),
    Seed(mmengine, "ema_state_dict", "state_dict", updates=30),
    Seed(mmcv, "state_dict", "state_dict.ema"),
    Seed(composer, "state.algorithms.0.1.ema_model.named_parameters_dict", "state.model"),
    Seed(dictionary, "ckpt.model", "ckpt.ema"),
]
by_seed = pytest.mark.parametrize("seed", SEEDS, ids=[seed.write.__name__ for seed in SEEDS])


def place(parent: Path) -> Path:
    """A directory in which nothing else will be written."""
    (parent / "src").mkdir()
    return parent / "src"


def assert_state(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_documented_table_has_these_layouts_and_trees() -> None:
    text = (Path(__file__).parents[2] / "docs" / "how_to" / "migration.md").read_text(
        encoding="utf-8"
    )
    rows = [
        [cell.strip(' `"') for cell in line.split("|")]
        for line in text.split("## ")[0].splitlines()
    ]
    # What torch_checkpointing writes is in tests/integration.
    trees = [
        (row[3], row[4])
        for row in rows
        if len(row) == 7
        and row[4]
        and not row[1].startswith(("trainer", "---", "torch_checkpointing"))
    ]
    assert trees == [(seed.live, seed.ema) for seed in SEEDS]


@by_seed
def test_inspected(tmp_path: Path, seed: Seed) -> None:
    found = ema_ckpt.inspect(seed.write(tmp_path))
    roles = {tree.name: tree.role for tree in found.trees}
    assert roles[seed.live] == "live"
    assert roles[seed.ema] == "ema"
    assert list(roles.values()).count("ema") == 1
    settings = found.ema[seed.ema]
    assert (settings["num_updates"], settings["decay"]) == (seed.updates, seed.decay)
    fqns = {t.fqn for t in found.tensors if t.tree == seed.ema}
    assert {
        name.replace("_fsdp_wrapped_module.", "").removeprefix("module.") for name in fqns
    } >= set(under(seed.prefix, average()))


@by_seed
def test_consolidated(tmp_path: Path, seed: Seed) -> None:
    source = seed.write(place(tmp_path))
    done = ema_ckpt.consolidate(source, tmp_path / "ema.safetensors")
    assert done.tree == seed.ema
    assert_state(load_file(tmp_path / "ema.safetensors"), under(seed.prefix, average()))
    ema_ckpt.consolidate(source, tmp_path / "live.pt", tree=seed.live)
    assert_state(torch.load(tmp_path / "live.pt", weights_only=True), under(seed.prefix, live()))


@by_seed
def test_converted_and_compared(tmp_path: Path, seed: Seed) -> None:
    source = seed.write(place(tmp_path))
    ema_ckpt.convert(source, tmp_path / "dcp", to="dcp", world_size=3)
    ema_ckpt.consolidate(tmp_path / "dcp", tmp_path / "ema.safetensors", tree=seed.ema)
    assert_state(load_file(tmp_path / "ema.safetensors"), under(seed.prefix, average()))
    found = ema_ckpt.diff(tmp_path / "dcp", source, tree=seed.ema, against=seed.ema)
    assert (found.compared, found.identical) == (len(average()), len(average()))
    against_live = ema_ckpt.diff(source)
    assert (against_live.tree_a, against_live.tree_b) == (seed.ema, seed.live)
    assert against_live.compared == len(average())
    assert not against_live.only_in_a and not against_live.only_in_b


@by_seed
def test_resumed(tmp_path: Path, seed: Seed) -> None:
    source = seed.write(tmp_path)
    net = Net(3)
    model = nn.ModuleDict({"model": net}) if seed.prefix else net
    ema = ShardedEMA(model, Warmup(0.999))
    ema_ckpt.restore(source, model=model, ema=ema)
    assert_state({k: v.detach() for k, v in net.state_dict().items()}, live())
    assert_state(dict(ema.full_state_dict()), under(seed.prefix, average()))
    assert ema.num_updates == (seed.updates or 0)


def test_decay_settings_of_dist_ema_become_ours(tmp_path: Path) -> None:
    """DistEMA's own formula, against the schedule that `inspect` translates its settings to."""
    schedule = dict(ema_ckpt.inspect(dist_ema(tmp_path)).ema["ema"]["schedule"])
    assert schedule.pop("kind") == "warmup"
    ours = Warmup(**schedule)
    for call in range(1, 400):
        step = max(0, (call - 1) - DIST_EMA["update_after_step"] - 1)
        value = 1 - (1 + step / DIST_EMA["inv_gamma"]) ** -DIST_EMA["power"]
        assert ours.beta(call) == max(DIST_EMA["min_decay"], min(value, DIST_EMA["decay"]))


def test_litema_inside_a_state_dict(tmp_path: Path) -> None:
    """Latent diffusion keeps `model_ema.*` among the live weights of `state_dict`."""
    bare = {f"model_ema.{name.replace('.', '')}": tensor for name, tensor in average().items()}
    tree = {
        **under("model.", live()),
        **bare,
        "model_ema.decay": torch.tensor(0.9999),
        "model_ema.num_updates": torch.tensor(4),
    }
    torch.save({"state_dict": tree}, tmp_path / "ldm.ckpt")
    done = ema_ckpt.consolidate(tmp_path / "ldm.ckpt", tmp_path / "out.safetensors")
    assert done.tree == "state_dict.model_ema"
    assert_state(load_file(tmp_path / "out.safetensors"), average())


def test_a_separate_file_of_averages(tmp_path: Path) -> None:
    """Live weights in one place, somebody's EMA file in another."""
    save_dcp(tmp_path / "dcp", {"model": live()})
    save_file(average(), tmp_path / "ema.safetensors")
    net = Net(3)
    ema = ShardedEMA(net, Warmup(0.999))
    ema_ckpt.restore(tmp_path / "dcp", model=net, ema=ema, ema_path=tmp_path / "ema.safetensors")
    assert_state(dict(ema.full_state_dict()), average())
