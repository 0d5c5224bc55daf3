"""What lies beside a checkpoint and is not read is named, whatever it is and wherever it lies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ema_ckpt import verify
from ema_ckpt.discovery.locate import locate_checkpoint
from ema_ckpt.discovery.location import Location
from ema_ckpt.discovery.opening import open_catalog
from tests.checkpoints import dcp_at, safetensors_at, save_dcp, torch_at, touch, weights


def beside(path: Path) -> list[str]:
    return [item.path for item in locate_checkpoint(str(path)).left_out]


def roles(path: Path) -> dict[str, str]:
    found: Location = locate_checkpoint(str(path))
    return dict(zip([name for name, _ in found.parts], found.roles, strict=True))


# By relation.


@pytest.mark.parametrize("name", ["unet", "transformer", "net_g", "actor", "diffusion_model"])
def test_a_directory_beside_its_average_is_live(tmp_path: Path, name: str) -> None:
    safetensors_at(tmp_path / name / "diffusion_pytorch_model.safetensors")
    safetensors_at(tmp_path / f"{name}_ema" / "diffusion_pytorch_model.safetensors", 0.5)
    touch(tmp_path / "random_states_0.pkl")
    touch(tmp_path / "scheduler.bin")
    assert roles(tmp_path) == {name: "live", f"{name}_ema": "ema"}
    catalog = open_catalog(tmp_path)
    assert dict(catalog.part_roles) == roles(tmp_path)
    assert not catalog.warnings


def test_files_and_families_beside_their_averages(tmp_path: Path) -> None:
    safetensors_at(tmp_path / "files" / "dit.safetensors")
    safetensors_at(tmp_path / "files" / "dit_ema.safetensors", 0.5)
    safetensors_at(tmp_path / "mixed" / "dit" / "model.safetensors")
    safetensors_at(tmp_path / "mixed" / "dit_ema.safetensors", 0.5)
    for rank in range(2):
        torch_at(tmp_path / "ranks" / f"dit_rank_{rank}.bin")
        torch_at(tmp_path / "ranks" / f"dit_ema_rank_{rank}.bin")
    for place in ("files", "mixed", "ranks"):
        assert roles(tmp_path / place) == {"dit": "live", "dit_ema": "ema"}
        assert beside(tmp_path / place) == []


def test_an_average_without_its_live_weights_is_no_part_by_relation(tmp_path: Path) -> None:
    safetensors_at(tmp_path / "net_g_ema" / "model.safetensors")
    touch(tmp_path / "net_g" / "code.py")
    assert locate_checkpoint(str(tmp_path)).format == "safetensors"


@pytest.mark.parametrize("optimizer", ["optimizer", "optim", "optimizer_0"])
def test_weights_beside_an_optimizer_are_live(tmp_path: Path, optimizer: str) -> None:
    save_dcp(tmp_path / "policy" / "weights", weights())
    save_dcp(tmp_path / "policy" / optimizer, {"state": {"b": {"exp_avg": torch.zeros(2)}}})
    for path in (tmp_path / "policy", tmp_path):
        assert roles(path) == {"weights": "live", optimizer: "optimizer"}
    shutil.rmtree(tmp_path / "policy" / optimizer)
    assert locate_checkpoint(str(tmp_path / "policy")).format == "dcp"


def test_several_pairs_are_all_opened(tmp_path: Path) -> None:
    for name in ("generator", "generator_ema", "critic", "critic_ema", "vae"):
        safetensors_at(tmp_path / name / "model.safetensors")
    assert roles(tmp_path) == {
        "critic": "live",
        "critic_ema": "ema",
        "generator": "live",
        "generator_ema": "ema",
    }
    assert beside(tmp_path) == ["vae"]


# Left out.


def test_a_critic_beside_an_actor(tmp_path: Path) -> None:
    dcp_at(tmp_path / "run" / "actor")
    dcp_at(tmp_path / "run" / "critic")
    touch(tmp_path / "run" / "logs" / "a.txt")
    assert beside(tmp_path / "run") == ["critic"]
    assert beside(tmp_path) == ["run/critic"]
    catalog = open_catalog(tmp_path)
    assert catalog.left_out == ("run/critic",)
    assert [warning.code for warning in catalog.warnings] == ["left-out"]


@pytest.mark.parametrize(
    ("full", "adapter"),
    [
        ("model.safetensors", "adapter_model.safetensors"),
        ("model.safetensors", "adapter_model.bin"),
        ("pytorch_model.bin", "adapter_model.safetensors"),
        ("diffusion_pytorch_model.safetensors", "adapter_model.safetensors"),
        ("model.safetensors", "default/adapter_model.safetensors"),
    ],
)
def test_an_adapter_beside_full_weights(tmp_path: Path, full: str, adapter: str) -> None:
    for name in (full, adapter):
        (torch_at if name.endswith(".bin") else safetensors_at)(tmp_path / name)
    found = locate_checkpoint(str(tmp_path))
    assert found.names == (full,)
    assert beside(tmp_path) == [adapter.partition("/")[0]]


def test_an_adapter_alone_is_the_checkpoint(tmp_path: Path) -> None:
    safetensors_at(tmp_path / "adapter_model.safetensors")
    torch_at(tmp_path / "optimizer.pt")
    assert locate_checkpoint(str(tmp_path)).names == ("adapter_model.safetensors",)
    assert beside(tmp_path) == ["optimizer.pt"]


def test_the_state_of_a_trainer_is_named_but_no_checkpoint_that_strict_asks_for(
    tmp_path: Path,
) -> None:
    safetensors_at(tmp_path / "model.safetensors")
    torch_at(tmp_path / "optimizer.pt")
    for name in ("scheduler.pt", "rng_state.pth", "training_args.bin", "scaler.pt", "sampler.bin"):
        touch(tmp_path / name)
    catalog = open_catalog(tmp_path)
    assert [w.message.partition(" ")[0] for w in catalog.warnings] == ["optimizer.pt"]
    assert catalog.left_out == ()


@pytest.mark.parametrize("weights_file", ["model.safetensors", "pytorch_model.bin"])
def test_state_that_accelerate_was_told_of_is_named(tmp_path: Path, weights_file: str) -> None:
    """A loop's average lies there, as `register_for_checkpointing` has it written."""
    at = safetensors_at if weights_file.endswith(".safetensors") else torch_at
    at(tmp_path / weights_file)
    torch_at(tmp_path / "custom_checkpoint_0.pkl", {"shadow_params": [torch.ones(2)]})
    touch(tmp_path / "random_states_0.pkl")
    catalog = open_catalog(tmp_path)
    (told,) = [w.message for w in catalog.warnings]
    assert told.startswith("custom_checkpoint_0.pkl is left out: ")
    assert told.endswith("perhaps an average; name it to read it")
    assert catalog.left_out == ()


def test_other_indices_and_files_beside_an_index(tmp_path: Path) -> None:
    for number, (name, tensor) in enumerate(weights().items()):
        torch_at(tmp_path / f"pytorch_model-0000{number + 1}-of-00002.bin", {name: tensor})
        safetensors_at(tmp_path / f"part_{number}.safetensors")
    files = {name: f"part_{number}.safetensors" for number, name in enumerate(weights())}
    touch(tmp_path / "model.safetensors.index.json", json.dumps({"weight_map": files}))
    touch(tmp_path / "pytorch_model.bin.index.json", json.dumps({"weight_map": {}}))
    safetensors_at(tmp_path / "adapter_model.safetensors")
    assert beside(tmp_path) == ["pytorch_model.bin.index.json", "adapter_model.safetensors"]


def index_at(path: Path, *shards: str) -> Path:
    return touch(path, json.dumps({"weight_map": dict(zip(weights(), shards, strict=True))}))


@pytest.mark.parametrize(
    ("whole", "index"),
    [
        ("model.safetensors", "model.safetensors.index.json"),
        ("model.fp16.safetensors", "model.safetensors.index.fp16.json"),
        ("model.fp16.safetensors", "model.fp16.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
        ("model.safetensors", "pytorch_model.bin.index.json"),
    ],
)
def test_an_index_without_its_shards_is_no_checkpoint_beside_the_whole_file(
    tmp_path: Path, whole: str, index: str
) -> None:
    (safetensors_at if whole.endswith(".safetensors") else torch_at)(tmp_path / whole)
    suffix = ".bin" if ".bin." in index else ".safetensors"
    shards = [f"part-0000{number}-of-00002{suffix}" for number in (1, 2)]
    index_at(tmp_path / index, *shards)
    (item,) = locate_checkpoint(str(tmp_path)).left_out
    assert (item.path, item.is_weights) == (index, False)
    assert "none of the shards that it names is here" in item.why
    assert {tensor.name for tensor in open_catalog(tmp_path).tensors} == {*weights()}


def test_an_index_without_its_shards_is_damaged_where_no_whole_file_is(tmp_path: Path) -> None:
    safetensors_at(tmp_path / "other.safetensors")
    index_at(tmp_path / "model.safetensors.index.json", "a.safetensors", "b.safetensors")
    assert verify(tmp_path).status == "damaged"
    safetensors_at(tmp_path / "model.safetensors")
    assert verify(tmp_path / "model.safetensors.index.json").status == "damaged"  # as it is named
    safetensors_at(tmp_path / "a.safetensors")  # one shard is here: a copy that was interrupted
    assert verify(tmp_path).status == "damaged"


def test_the_plain_file_comes_before_the_shards_of_a_variant(tmp_path: Path) -> None:
    safetensors_at(tmp_path / "model.safetensors")
    shards = [f"model.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for shard, (name, tensor) in zip(shards, weights().items(), strict=True):
        save_file({name: tensor.half()}, tmp_path / shard)
    index_at(tmp_path / "model.safetensors.index.fp16.json", *shards)
    assert locate_checkpoint(str(tmp_path)).names == ("model.safetensors",)
    assert beside(tmp_path) == ["model.safetensors.index.fp16.json"]
    assert not [w for w in verify(tmp_path).warnings if w.code == "stale-file"]


def test_a_checkpoint_beside_another_is_not_to_be_removed(tmp_path: Path) -> None:
    """`adapter_model.safetensors` belongs to peft, the variant to who asks for it."""
    safetensors_at(tmp_path / "model.safetensors")
    for name in ("adapter_model.safetensors", "model.fp16.safetensors"):
        safetensors_at(tmp_path / name)
    found = [(w.code, w.message.partition(" ")[0]) for w in verify(tmp_path).warnings]
    assert [message for code, message in found if code == "left-out"] == [
        "adapter_model.safetensors",
        "model.fp16.safetensors",
    ]
    assert "stale-file" not in dict(found)


def test_what_lies_beside_a_dcp(tmp_path: Path) -> None:
    dcp_at(tmp_path / "ckpt")
    for name in ("meta.pt", "common.pt"):  # Lightning's, Megatron-core's
        torch_at(tmp_path / "ckpt" / name)
    safetensors_at(tmp_path / "ckpt" / "ema" / "model.safetensors")
    assert beside(tmp_path / "ckpt") == ["ema"]


def test_a_named_file_stands_alone(tmp_path: Path) -> None:
    safetensors_at(tmp_path / "model.safetensors")
    safetensors_at(tmp_path / "adapter_model.safetensors")
    assert beside(tmp_path / "model.safetensors") == []


def test_a_directory_that_cannot_be_read_as_a_checkpoint_is_named_too(tmp_path: Path) -> None:
    dcp_at(tmp_path / "model")
    dcp_at(tmp_path / "other")
    (tmp_path / "other" / ".metadata").unlink()
    assert beside(tmp_path) == ["other"]


# Steps.


def test_children_of_a_run_that_are_no_steps(tmp_path: Path) -> None:
    for name in ("step_9", "step_10", "final"):
        dcp_at(tmp_path / name)
    torch_at(tmp_path / "last.ckpt")
    (tmp_path / "latest").symlink_to("step_10")
    (tmp_path / "newest.ckpt").symlink_to("last.ckpt")
    touch(tmp_path / "logs" / "events")
    assert beside(tmp_path) == ["last.ckpt", "newest.ckpt", "final"]
    assert beside(tmp_path / "step_9") == []


@pytest.mark.parametrize(
    "names",
    [
        ("0000001000", "0000002000"),
        ("epoch=0-step=10.ckpt", "epoch=1-step=20.ckpt"),
        ("epoch=1-step=20.ckpt", "epoch=1-step=20-v1.ckpt"),
        ("epoch=1-step=20-v2.ckpt", "epoch=1-step=20-v10.ckpt"),
        ("ep0-ba4", "ep0-ba12"),
        ("checkpoint_9", "checkpoint_10"),
    ],
)
@pytest.mark.parametrize("kind", ["directories", "torch files", "safetensors files", "rank files"])
def test_steps_of_any_form(tmp_path: Path, names: tuple[str, str], kind: str) -> None:
    for name in names:
        stem = name.removesuffix(".ckpt")
        match kind:
            case "directories":
                dcp_at(tmp_path / name)
            case "torch files":
                torch_at(tmp_path / f"{stem}.pth.tar")
            case "safetensors files":
                safetensors_at(tmp_path / f"{stem}.safetensors")
            case "rank files":
                for rank in range(2):
                    torch_at(tmp_path / f"{stem}-rank{rank}.pt")
    found = locate_checkpoint(str(tmp_path))
    newest = names[1].removesuffix(".ckpt")
    assert Path(found.resolved).name.startswith(newest)
    assert f"{names[0].removesuffix('.ckpt')}." not in found.resolved
    assert found.left_out == ()
    assert locate_checkpoint(found.resolved)._replace(note=None, metadata=None) == found._replace(
        note=None, metadata=None
    )


def test_files_of_composer(tmp_path: Path) -> None:
    for name in ("ep0-ba4-rank0.pt", "ep0-ba8-rank0.pt", "ep0-ba16-rank0.pt"):
        torch_at(tmp_path / name)
    (tmp_path / "latest-rank0.pt").symlink_to("ep0-ba16-rank0.pt")
    found = locate_checkpoint(str(tmp_path))
    assert (found.names, found.left_out) == (("ep0-ba16-rank0.pt",), ())
    assert [warning.code for warning in open_catalog(tmp_path).warnings] == ["unchecked"]


@pytest.mark.parametrize("kind", ["directories", "torch files", "safetensors files", "mixed"])
def test_a_step_and_its_average_are_that_step(tmp_path: Path, kind: str) -> None:
    for step in (9, 10):
        name = f"step_{step}"
        match kind:
            case "directories":
                safetensors_at(tmp_path / name / "model.safetensors")
                safetensors_at(tmp_path / f"{name}_ema" / "model.safetensors", 0.5)
            case "torch files":
                torch_at(tmp_path / f"{name}.pt")
                torch_at(tmp_path / f"{name}_ema.pt")
            case "safetensors files":
                safetensors_at(tmp_path / f"{name}.safetensors")
                safetensors_at(tmp_path / f"{name}_ema.safetensors", 0.5)
            case "mixed":
                safetensors_at(tmp_path / name / "model.safetensors")
                safetensors_at(tmp_path / f"{name}_ema.safetensors", 0.5)
    found = locate_checkpoint(str(tmp_path))
    assert Path(found.resolved).stem == "step_10"
    for path, step in ((tmp_path, 10), (Path(found.resolved), 10)):
        assert roles(path) == {f"step_{step}": "live", f"step_{step}_ema": "ema"}
        assert beside(path) == []


def test_a_step_whose_average_is_not_complete_is_not_complete(tmp_path: Path) -> None:
    for name in ("step_1", "step_1_ema", "step_2", "step_2_ema"):
        dcp_at(tmp_path / name)
    (tmp_path / "step_2_ema" / ".metadata").unlink()
    found = locate_checkpoint(str(tmp_path))
    assert Path(found.resolved).name == "step_1"
    assert [item.path for item in found.left_out] == ["step_2"]


def test_published_weights_name_the_steps_beside_them(tmp_path: Path) -> None:
    safetensors_at(tmp_path / "model.safetensors")
    for step in (5, 10):
        safetensors_at(tmp_path / f"checkpoint-{step}" / "model.safetensors")
    assert beside(tmp_path) == ["checkpoint-10", "checkpoint-5"]


def test_a_pair_inside_a_step(tmp_path: Path) -> None:
    for name in ("unet", "unet_ema", "vae"):
        safetensors_at(tmp_path / "checkpoint-7" / name / "model.safetensors")
    assert roles(tmp_path) == {"unet": "live", "unet_ema": "ema"}
    assert beside(tmp_path) == ["checkpoint-7/vae"]


@pytest.mark.parametrize(
    ("plain", "other"),
    [
        ("epoch_3.pth", "best_accuracy_epoch_3.pth"),
        ("epoch=1-step=20.ckpt", "best-epoch=1-step=20.ckpt"),
        ("epoch=1-step=20.ckpt", "epoch=1-step=20-val_loss=0.12.ckpt"),
        ("0000020", "ema_step_20"),
    ],
)
def test_of_two_equally_new_steps_the_plain_name_counts(
    tmp_path: Path, plain: str, other: str
) -> None:
    for name in (plain, other):
        torch_at(tmp_path / name) if "." in name else dcp_at(tmp_path / name)
    found = locate_checkpoint(str(tmp_path))
    assert Path(found.resolved).name == plain
    assert [item.path for item in found.left_out] == [other]
