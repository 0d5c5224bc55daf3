"""What a path stands for: itself, parts, steps, further down, or an error that says what is there."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from ema_ckpt.core.errors import EmaCkptError, SourceError
from ema_ckpt.discovery.locate import latest_step, locate_checkpoint
from ema_ckpt.discovery.location import Location
from ema_ckpt.discovery.step_names import step_number
from ema_ckpt.formats.rank_files.names import families, family_of, missing_ranks
from tests.checkpoints import dcp_at, safetensors_at, torch_at, touch


def short(found: Location, root: Path | str) -> object:
    """A found checkpoint as a test wants to read it: format, place below `root`, names or parts."""
    place = os.path.relpath(found.resolved, root) if "://" not in str(root) else found.resolved
    if found.parts:
        return {name: short(part, root) for name, part in found.parts}
    return (found.format, place, *found.names)


def beside(found: Location) -> dict[str, str]:
    """What is left out beside a found checkpoint: place and reason."""
    return {item.path: item.why for item in found.left_out}


def refused(code: str, path: Path | str) -> str:
    with pytest.raises(EmaCkptError) as caught:
        locate_checkpoint(str(path))
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


# The path itself.


def test_a_dcp_directory_and_any_file_of_it(tmp_path: Path) -> None:
    root = dcp_at(tmp_path / "ckpt")
    expected = ("dcp", "ckpt", ".metadata")
    assert short(locate_checkpoint(str(root)), tmp_path) == expected
    assert short(locate_checkpoint(f"{root}/"), tmp_path) == expected
    assert short(locate_checkpoint(str(root / ".metadata")), tmp_path) == expected
    assert short(locate_checkpoint(str(root / "__0_0.distcp")), tmp_path) == expected


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("here", [(1, 2), (1,), (2,)])
def test_shards_without_their_index_are_no_checkpoints(
    tmp_path: Path, suffix: str, here: tuple[int, ...]
) -> None:
    for number in here:
        touch(tmp_path / "hf" / f"model-0000{number}-of-00002{suffix}")
    touch(tmp_path / "hf" / "config.json")
    for path in (tmp_path, tmp_path / "hf"):
        message = refused("missing-metadata", path)
        assert (
            f"{len(here)} of the 2 shards model-*-of-*{suffix} without model{suffix}.index.json"
            in message
        )
        assert ("missing shards" in message) == (len(here) == 1)
    shard = tmp_path / "hf" / f"model-0000{here[0]}-of-00002{suffix}"
    assert locate_checkpoint(str(shard)).names == (shard.name,)


def test_the_only_shard_needs_no_index(tmp_path: Path) -> None:
    touch(tmp_path / "model-00001-of-00001.safetensors")
    assert locate_checkpoint(str(tmp_path)).names == ("model-00001-of-00001.safetensors",)


def test_a_step_of_shards_without_an_index_is_not_complete(tmp_path: Path) -> None:
    dcp_at(tmp_path / "step_1")
    touch(tmp_path / "step_2" / "model-00001-of-00002.safetensors")
    found = locate_checkpoint(str(tmp_path))
    assert Path(found.resolved).name == "step_1"
    assert "model.safetensors.index.json" in beside(found)["step_2"]


def test_rank_metadata_in_the_order_of_ranks(tmp_path: Path) -> None:
    for rank in (10, 0, 2):
        touch(tmp_path / f"__{rank}.metadata")
    assert locate_checkpoint(str(tmp_path)).names == (
        "__0.metadata",
        "__2.metadata",
        "__10.metadata",
    )


def test_a_dcp_directory_without_metadata_is_said_to_be_one(tmp_path: Path) -> None:
    touch(tmp_path / "x" / "__0_0.distcp")
    assert "without a .metadata" in refused("missing-metadata", tmp_path / "x")
    refused("missing-metadata", tmp_path / "x" / "__0_0.distcp")
    refused("missing-metadata", tmp_path)


@pytest.mark.parametrize(
    "name", ["a.safetensors", "a.pt", "a.pth", "a.bin", "a.ckpt", "a.safetensors.index.json"]
)
def test_one_file(tmp_path: Path, name: str) -> None:
    kind = "safetensors" if "safetensors" in name else "torch"
    assert short(locate_checkpoint(str(touch(tmp_path / name))), tmp_path) == (kind, name, name)


def test_a_file_of_no_known_kind(tmp_path: Path) -> None:
    assert ".safetensors" in refused("not-a-checkpoint", touch(tmp_path / "a.txt"))


def test_a_hugging_face_directory(tmp_path: Path) -> None:
    for name in (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "config.json",
        "optimizer.pt",
    ):
        touch(tmp_path / "hf" / name)
    touch(tmp_path / "hf" / "pytorch_model.bin.index.json")
    touch(tmp_path / "hf" / "model.safetensors.index.json")
    assert short(locate_checkpoint(str(tmp_path / "hf")), tmp_path) == (
        "safetensors",
        "hf",
        "model.safetensors.index.json",
    )
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    assert short(locate_checkpoint(str(tmp_path / "hf")), tmp_path) == (
        "torch",
        "hf",
        "pytorch_model.bin.index.json",
    )


def test_two_indices_are_a_question(tmp_path: Path) -> None:
    for name in ("model.safetensors.index.json", "model.fp16.safetensors.index.json"):
        touch(tmp_path / name)
    message = refused("ambiguous-path", tmp_path)
    assert "'model.fp16.safetensors.index.json', 'model.safetensors.index.json'" in message


def test_the_one_safetensors_file_of_a_directory_is_the_checkpoint_and_no_part(
    tmp_path: Path,
) -> None:
    for name in (
        "model.safetensors",
        "config.json",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "training_args.bin",
    ):
        touch(tmp_path / "hf" / name)
    assert short(locate_checkpoint(str(tmp_path / "hf")), tmp_path) == (
        "safetensors",
        "hf",
        "model.safetensors",
    )


def test_rank_files_are_one_family(tmp_path: Path) -> None:
    names = [f"model_world_size_12_rank_{rank}.pt" for rank in range(12)]
    for name in names:
        touch(tmp_path / name)
    found = locate_checkpoint(str(tmp_path))
    assert (found.format, found.names) == ("rank-files", tuple(names))
    message = refused("incomplete", tmp_path / names[3])
    assert "one rank of 12, which are model_world_size_12_rank_*.pt" in message
    pattern = str(tmp_path / "model_world_size_12_rank_*.pt")
    assert pattern in message
    assert locate_checkpoint(pattern).names == tuple(names)


def test_rank_files_by_name() -> None:
    assert family_of("model_world_size_4_rank_0.pt") == family_of("model_world_size_4_rank_3.pt")
    assert family_of("model_world_size_4_rank_0.pt") != family_of("optim_world_size_4_rank_0.pt")
    assert family_of("model_world_size_4_rank_0.pt") != family_of("model_world_size_2_rank_0.pt")
    for name in ("m_rank_3.bin", "m-rank-3.ckpt", "m.rank_3.pth", "rank3-m.pt", "m_rank3.pth.tar"):
        family = family_of(name)
        assert family is not None
        assert (family.name, family.world_size) == ("m", None)
        assert list(families([name, name.replace("3", "11")])) == [family]
    for name in ("m_rank_3_world_size_4.pt", "m-world_size_4-rank-3.bin", "worldsize4_m_rank3.pt"):
        family = family_of(name)
        assert family is not None
        assert (family.name, family.world_size) == ("m", 4)
    assert {
        name: (f.name if (f := family_of(name)) else None)
        for name in ("ema_rank0.pt", "frank_0.pt", "rank_0.pt")
    } == {
        "ema_rank0.pt": "ema",
        "frank_0.pt": None,
        "rank_0.pt": "",
    }
    assert list(families(["a_rank_10.pt", "a_rank_9.pt", "x.pt"]).values()) == [
        ["a_rank_9.pt", "a_rank_10.pt"]
    ]
    assert missing_ranks(["m_world_size_4_rank_1.pt"]) == (4, [0, 2, 3])
    assert missing_ranks(["m_rank_0.pt", "m_rank_2.pt"]) == (3, [1])


# Parts.


def test_recognised_children_open_together(tmp_path: Path) -> None:
    dcp_at(tmp_path / "model")
    safetensors_at(tmp_path / "ema.safetensors")
    torch_at(tmp_path / "extra_state_rank_0.pt")
    dcp_at(tmp_path / "optimizer_0")
    dcp_at(tmp_path / "logs")
    for name in ("scheduler.bin", "random_states_0.pkl", "trainer_state.json", "common.pt"):
        touch(tmp_path / name)
    assert short(locate_checkpoint(str(tmp_path)), tmp_path) == {
        "model": ("dcp", "model", ".metadata"),
        "optimizer_0": ("dcp", "optimizer_0", ".metadata"),
        "extra_state": ("rank-files", "extra_state_rank_0.pt", "extra_state_rank_0.pt"),
        "ema": ("safetensors", "ema.safetensors", "ema.safetensors"),
    }


def test_families_side_by_side_are_parts(tmp_path: Path) -> None:
    for kind in ("model", "optim", "extra_state"):
        for rank in range(2):
            touch(tmp_path / "actor" / f"{kind}_world_size_2_rank_{rank}.pt")
    touch(tmp_path / "actor" / "huggingface" / "config.json")
    found = locate_checkpoint(str(tmp_path))
    assert [name for name, _ in found.parts] == ["actor"]
    assert list(short(found.parts[0][1], tmp_path)) == ["extra_state", "model", "optim"]  # type: ignore[call-overload]


def test_a_directory_of_a_parts_name_that_holds_no_checkpoint_is_no_part(tmp_path: Path) -> None:
    touch(tmp_path / "model" / "code.py")
    dcp_at(tmp_path / "ema")
    assert short(locate_checkpoint(str(tmp_path)), tmp_path) == {"ema": ("dcp", "ema", ".metadata")}


def test_a_part_may_be_a_directory_with_one_file(tmp_path: Path) -> None:
    torch_at(tmp_path / "optim" / "state.pt")
    safetensors_at(tmp_path / "unet_ema" / "diffusion_pytorch_model.safetensors")
    assert short(locate_checkpoint(str(tmp_path)), tmp_path) == {
        "optim": ("torch", "optim/state.pt", "state.pt"),
        "unet_ema": ("safetensors", "unet_ema", "diffusion_pytorch_model.safetensors"),
    }


def test_one_part_twice_is_a_question(tmp_path: Path) -> None:
    dcp_at(tmp_path / "model")
    safetensors_at(tmp_path / "model.safetensors")
    safetensors_at(tmp_path / "ema.safetensors")
    assert "'model', 'model.safetensors'" in refused("ambiguous-path", tmp_path)


def test_a_damaged_part_is_not_dropped(tmp_path: Path) -> None:
    dcp_at(tmp_path / "model")
    (dcp_at(tmp_path / "ema") / ".metadata").unlink()
    refused("missing-metadata", tmp_path)


# Steps.


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("step_500", 500),
        ("step500", 500),
        ("global_step_7", 7),
        ("global_step7", 7),
        ("checkpoint-2500", 2500),
        ("iter_000000100", 100),
        ("iteration=3", 3),
        ("epoch=3-step=500", 500),
        ("epoch_0_step_99", 99),
        ("my-ckpt-1", 1),
        ("step-00", 0),
        ("footstep_5", None),
        ("step_", None),
        ("step_5_old", None),
        ("step_5.tmp", None),
        (".step_5.ema-ckpt-0a1b2c3d", None),
        ("checkpoint_model_000600", None),
        ("500", 500),
        ("50", None),
        ("0000002000", 2000),
        ("0050000.pt", 50000),
        ("epoch=1-step=20.ckpt", 20),
        ("epoch=1-step=20-v1.ckpt", 20),
        ("epoch=1-step=20-val_loss=0.12.ckpt", 20),
        ("epoch=1-step=20-loss=-1.5e-07-acc=95-v1.ckpt", 20),
        ("epoch=1-val_loss=nan.ckpt", 1),
        ("net-epoch=02-val_loss=0.32-step=9.ckpt", 9),
        ("step-5-loss-0.5.ckpt", None),
        ("ep0-ba4-rank0.pt", 4),
        ("ep3", 3),
        ("checkpoint-12.pth.tar", 12),
        ("step_10.safetensors", 10),
        ("model_step_7_world_size_2_rank_1.pt", 7),
        ("rank-1-step-8.bin", 8),
        ("step_10.txt", None),
        ("step_10_ema", None),
        ("deep3", None),
        ("step_٣", None),
    ],
)
def test_names_of_steps(name: str, number: int | None) -> None:
    assert step_number(name) == number


def test_the_highest_number_wins_not_the_last_in_the_alphabet(tmp_path: Path) -> None:
    for step in (500, 2500, 1000):
        dcp_at(tmp_path / f"step_{step}")
    found = locate_checkpoint(str(tmp_path))
    assert short(found, tmp_path) == ("dcp", "step_2500", ".metadata")
    assert found.note == f"reading step_2500, the newest complete of 3 steps in {tmp_path}"
    assert latest_step(str(tmp_path)) == str(tmp_path / "step_2500")


def truncate(step: Path) -> None:
    file = step / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda step: (step / ".metadata").unlink(), "without a .metadata"),
        (lambda step: (step / "__0_0.distcp").unlink(), "no such file"),
        (truncate, "truncated"),
        (lambda step: os.truncate(step / ".metadata", 20), ".metadata"),
    ],
)
def test_an_incomplete_step_is_passed_over(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    dcp_at(tmp_path / "step_9")
    damage(dcp_at(tmp_path / "step_10"))
    found = locate_checkpoint(str(tmp_path))
    assert short(found, tmp_path) == ("dcp", "step_9", ".metadata")
    assert list(beside(found)) == ["step_10"]
    assert beside(found)["step_10"].startswith("newer, and not complete: ")
    assert reason in beside(found)["step_10"]
    assert latest_step(str(tmp_path)) == str(tmp_path / "step_9")


def test_no_complete_step_is_an_error_that_says_why(tmp_path: Path) -> None:
    for step in (1, 2):
        (dcp_at(tmp_path / f"step_{step}") / ".metadata").unlink()
    message = refused("incomplete", tmp_path)
    assert "none of its 2 steps is complete (step_2: " in message
    with pytest.raises(
        SourceError, match="remove 'step_2', 'step_1', or pass incomplete="
    ) as caught:
        latest_step(str(tmp_path))
    assert caught.value.code == "incomplete"


def test_steps_of_other_formats_must_be_whole_too(tmp_path: Path) -> None:
    safetensors_at(tmp_path / "checkpoint-1" / "model.safetensors")
    newest = safetensors_at(tmp_path / "checkpoint-2" / "model.safetensors")
    os.truncate(newest, newest.stat().st_size - 1)
    torch_at(tmp_path / "checkpoint-3" / "m.pt")
    os.truncate(tmp_path / "checkpoint-3" / "m.pt", 100)
    touch(
        tmp_path / "checkpoint-4" / "model.safetensors.index.json",
        json.dumps({"weight_map": {"a": "gone.safetensors"}}),
    )
    torch_at(tmp_path / "checkpoint-5" / "model_world_size_2_rank_0.pt")
    found = locate_checkpoint(str(tmp_path))
    assert short(found, tmp_path) == ("safetensors", "checkpoint-1", "model.safetensors")
    for step, reason in (
        (5, "the files of rank 1 of 2 are missing"),
        (4, "gone.safetensors"),
        (3, "m.pt"),
        (2, "model.safetensors"),
    ):
        assert reason in beside(found)[f"checkpoint-{step}"]


def test_a_step_of_parts_is_complete_if_all_are(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp_at(tmp_path / f"global_step_{step}" / "model")
        dcp_at(tmp_path / f"global_step_{step}" / "optim")
    truncate(tmp_path / "global_step_2" / "optim")
    assert short(locate_checkpoint(str(tmp_path)), tmp_path) == {
        "model": ("dcp", "global_step_1/model", ".metadata"),
        "optim": ("dcp", "global_step_1/optim", ".metadata"),
    }


def test_a_step_may_hold_its_checkpoint_one_level_down(tmp_path: Path) -> None:
    dcp_at(tmp_path / "step_1" / "sharded")
    dcp_at(tmp_path / "step_2" / "sharded")
    touch(tmp_path / "step_3" / "log.txt")
    assert short(locate_checkpoint(str(tmp_path)), tmp_path) == (
        "dcp",
        "step_2/sharded",
        ".metadata",
    )
    assert latest_step(str(tmp_path)) == str(tmp_path / "step_2")


@pytest.mark.parametrize("stray", ["ema.safetensors", "average.safetensors", "ema"])
def test_an_average_put_beside_steps_does_not_hide_them(tmp_path: Path, stray: str) -> None:
    for number in (9, 10):
        dcp_at(tmp_path / f"step_{number}")
    put = safetensors_at(
        tmp_path / stray if "." in stray else tmp_path / stray / "model.safetensors"
    )
    found = locate_checkpoint(str(tmp_path))
    assert short(found, tmp_path) == ("dcp", "step_10", ".metadata")
    assert str(latest_step(str(tmp_path))) == found.resolved
    assert beside(found) == {stray: "a checkpoint of its own; name it to read it"}
    assert (
        short(locate_checkpoint(str(put)), tmp_path)[0] == "safetensors"
    )  # by its own name it is there
    for number in (9, 10):
        (tmp_path / f"step_{number}" / ".metadata").unlink()
    assert locate_checkpoint(str(tmp_path)).format in ("safetensors", "parts")


def test_published_weights_stand_before_the_steps_that_led_to_them(tmp_path: Path) -> None:
    dcp_at(tmp_path / "checkpoint-10")
    safetensors_at(tmp_path / "model.safetensors")
    assert short(locate_checkpoint(str(tmp_path)), tmp_path) == (
        "safetensors",
        ".",
        "model.safetensors",
    )


def test_two_steps_of_one_number_are_a_question(tmp_path: Path) -> None:
    dcp_at(tmp_path / "step_5")
    dcp_at(tmp_path / "checkpoint-5")
    assert "'checkpoint-5', 'step_5'" in refused("ambiguous-path", tmp_path)
    (tmp_path / "step_5" / ".metadata").unlink()
    assert short(locate_checkpoint(str(tmp_path)), tmp_path) == ("dcp", "checkpoint-5", ".metadata")


def test_stages_are_never_candidates(tmp_path: Path) -> None:
    dcp_at(tmp_path / ".step_9.ema-ckpt-0a1b2c3d")
    dcp_at(tmp_path / ".model.ema-ckpt-0a1b2c3d" / "model")
    refused("not-a-checkpoint", tmp_path)
    dcp_at(tmp_path / "step_1")
    assert short(locate_checkpoint(str(tmp_path)), tmp_path) == ("dcp", "step_1", ".metadata")


def test_latest_of_no_directory_is_none(tmp_path: Path) -> None:
    assert latest_step(str(tmp_path / "nope")) is None
    assert latest_step(str(tmp_path)) is None
    assert latest_step(str(touch(tmp_path / "file"))) is None


# Further down.


@pytest.mark.parametrize("place", ["a", "a/b"])
def test_the_only_checkpoint_one_or_two_levels_down(tmp_path: Path, place: str) -> None:
    dcp_at(tmp_path / place)
    touch(tmp_path / "notes" / "readme.md")
    touch(tmp_path / "random_states_0.pkl")
    touch(tmp_path / "scheduler.pt")
    found = locate_checkpoint(str(tmp_path))
    assert short(found, tmp_path) == ("dcp", place, ".metadata")
    assert found.note is not None
    assert place in found.note


def test_three_levels_down_is_too_far(tmp_path: Path) -> None:
    dcp_at(tmp_path / "a" / "b" / "c")
    assert "'a/'" in refused("not-a-checkpoint", tmp_path)


def test_parts_and_steps_further_down(tmp_path: Path) -> None:
    dcp_at(tmp_path / "run" / "step_2")
    dcp_at(tmp_path / "run" / "step_10")
    assert short(locate_checkpoint(str(tmp_path)), tmp_path) == ("dcp", "run/step_10", ".metadata")


def test_one_torch_file_in_a_directory(tmp_path: Path) -> None:
    torch_at(tmp_path / "run" / "model.pt")
    touch(tmp_path / "run" / "optimizer.pt")
    touch(tmp_path / "run" / "rng_state_0.pth")
    assert short(locate_checkpoint(str(tmp_path / "run")), tmp_path) == (
        "torch",
        "run/model.pt",
        "model.pt",
    )
    assert short(locate_checkpoint(str(tmp_path)), tmp_path) == (
        "torch",
        "run/model.pt",
        "model.pt",
    )
    (tmp_path / "run" / "model.pt").unlink()
    assert short(locate_checkpoint(str(tmp_path)), tmp_path) == (
        "torch",
        "run/optimizer.pt",
        "optimizer.pt",
    )


def test_several_checkpoints_are_a_question(tmp_path: Path) -> None:
    dcp_at(tmp_path / "a")
    dcp_at(tmp_path / "x" / "b")
    touch(tmp_path / "x" / "c.pt")
    touch(tmp_path / "d.pt")
    message = refused("ambiguous-path", tmp_path)
    assert "4 checkpoints, 'd.pt', 'a', 'x/c.pt', 'x/b'" in message


def test_what_is_broken_yields_to_what_is_not(tmp_path: Path) -> None:
    dcp_at(tmp_path / "good")
    touch(tmp_path / "killed" / "__0_0.distcp")
    found = locate_checkpoint(str(tmp_path))
    assert short(found, tmp_path) == ("dcp", "good", ".metadata")
    assert list(beside(found)) == ["killed"]
    assert "without a .metadata" in beside(found)["killed"]


def test_nothing_is_an_error_that_lists_what_is_there(tmp_path: Path) -> None:
    assert "it is empty" in refused("not-a-checkpoint", tmp_path)
    touch(tmp_path / "readme.md")
    (tmp_path / "logs").mkdir()
    assert "it holds 'logs/', 'readme.md'" in refused("not-a-checkpoint", tmp_path)
    for number in range(30):
        touch(tmp_path / f"file{number:02}.txt")
    assert "and 22 more" in refused("not-a-checkpoint", tmp_path)


def test_a_url_that_became_a_path_is_told_apart() -> None:
    assert "loses a slash" in refused("not-found", Path("s3://bucket/run"))


@pytest.mark.parametrize("path", ["", "/no/such/place", "/dev/null/x"])
def test_a_missing_path(path: str) -> None:
    refused("not-found", path)


@pytest.fixture
def outsider() -> Iterator[Path]:
    """A directory of our own, seen by a process that permissions bind (tests often run as root)."""
    place = Path(tempfile.mkdtemp(prefix="ema-ckpt-tests-"))
    place.chmod(0o755)
    owner = os.geteuid()
    yield place
    os.seteuid(owner)
    shutil.rmtree(place)


def test_a_directory_that_may_not_be_listed(outsider: Path) -> None:
    closed = dcp_at(outsider / "closed")
    dcp_at(outsider / "open")
    closed.chmod(0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    refused("unreadable", closed)
    assert short(locate_checkpoint(str(outsider)), outsider) == ("dcp", "open", ".metadata")


def test_a_sibling_that_may_not_be_listed_is_said(outsider: Path) -> None:
    dcp_at(outsider / "run" / "step_1")
    for name in ("closed", "lost+found"):
        dcp_at(outsider / "run" / name).chmod(0)
    dcp_at(outsider / "actor")
    dcp_at(outsider / "critic").chmod(0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    for root, name in ((outsider / "run", "closed"), (outsider, "critic")):
        location = locate_checkpoint(str(root))
        (left_out,) = [item for item in location.left_out if item.path.endswith(name)]
        assert "is not known" in left_out.diagnostic().message
        assert (
            not left_out.is_weights
        )  # `--strict` refuses what is a checkpoint, which nobody knows
        assert all("lost+found" not in item.path for item in location.left_out)


def test_a_path_that_no_file_system_takes() -> None:
    refused("unreadable", "/" + "x" * 5000)
    refused("unreadable", "a\0b")


def test_links_are_followed(tmp_path: Path) -> None:
    dcp_at(tmp_path / "store" / "real")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "store" / "real")
    assert short(locate_checkpoint(str(tmp_path / "runs")), tmp_path) == (
        "dcp",
        "runs/link",
        ".metadata",
    )
    (tmp_path / "runs" / "dangling").symlink_to(tmp_path / "nowhere")
    assert short(locate_checkpoint(str(tmp_path / "runs")), tmp_path) == (
        "dcp",
        "runs/link",
        ".metadata",
    )


def test_a_replacement_that_a_crash_cut_in_two_is_read_from_its_stage(tmp_path: Path) -> None:
    stage = tmp_path / ".out.ema-ckpt-0a1b2c3d"
    dcp_at(stage / "out")
    touch(stage / ".ema-ckpt.note", json.dumps({"old": ".ema-ckpt.old", "new": "out"}))
    found = locate_checkpoint(str(tmp_path / "out"))
    assert short(found, tmp_path) == ("dcp", f"{stage.name}/out", ".metadata")
    assert found.note is not None
    assert "being replaced" in found.note


# URLs.


@pytest.fixture
def bucket() -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    yield "memory://bucket"
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


def upload(source: Path, url: str) -> None:
    fsspec.filesystem("memory").put(str(source), url, recursive=True)


def test_everything_works_behind_a_url(tmp_path: Path, bucket: str) -> None:
    for step in (9, 10):
        dcp_at(tmp_path / "run" / f"step_{step}")
    truncate(tmp_path / "run" / "step_10")
    upload(tmp_path / "run", f"{bucket}/run")
    for url in (f"{bucket}/run", f"{bucket}/run/", bucket):
        found = locate_checkpoint(url)
        assert (found.format, found.root, found.names) == (
            "dcp",
            f"{bucket}/run/step_9",
            (".metadata",),
        )
    assert latest_step(f"{bucket}/run") == f"{bucket}/run/step_9"
    assert locate_checkpoint(f"{bucket}/run/step_9/.metadata").root == f"{bucket}/run/step_9"
    refused("not-found", f"{bucket}/nope")
    assert not Path("memory:").exists()


def test_a_file_url(tmp_path: Path) -> None:
    dcp_at(tmp_path / "with space" / "ckpt")
    found = locate_checkpoint(f"file://{tmp_path}/with space/")
    assert (found.format, found.resolved) == ("dcp", f"file://{tmp_path}/with space/ckpt")


class Offline(fsspec.AbstractFileSystem):
    """A store whose package fails in a way of its own."""

    protocol = "offline"

    def ls(self, path: str, detail: bool = True, **kwargs: object) -> list:
        raise RuntimeError("no credentials")


def test_a_store_that_cannot_be_reached_is_unreadable() -> None:
    fsspec.register_implementation("offline", Offline, clobber=True)
    assert "no credentials" in refused("unreadable", "offline://bucket/x")


def test_a_url_whose_package_is_missing_says_so() -> None:
    assert "install" in refused("missing-extra", "nosuchscheme://bucket/x")


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    for name in ("step_500", "step_2500", "logs"):
        (tmp_path / name).mkdir()
    with pytest.raises(SourceError, match=r"steps there are 'step_2500', 'step_500'$") as caught:
        locate_checkpoint(str(tmp_path / "step_600"))
    assert caught.value.code == "not-found"
    with pytest.raises(SourceError, match=r"no such file or directory$"):
        locate_checkpoint(str(tmp_path / "weights"))
    with pytest.raises(SourceError, match=r"no such file or directory$"):
        locate_checkpoint(str(tmp_path / "nowhere" / "step_600"))


def test_a_mistyped_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").touch()
    (tmp_path / "pretraining").mkdir()
    for typed, near in [
        ("weihgts.safetensors", "weights.safetensors"),
        ("pretrainig/", "pretraining"),
    ]:
        with pytest.raises(SourceError, match=rf"; did you mean '{tmp_path}/{near}'\?$"):
            locate_checkpoint(f"{tmp_path}/{typed}")
