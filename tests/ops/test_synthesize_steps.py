"""Merging the steps of a run: which are taken, with which weights, and that the sum is the float64 sum rounded once."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ema_ckpt
from ema_ckpt import EmaCkptError
from tests.checkpoints import save_dcp
from tests.stories.commands import Commands


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "a.weight": torch.randn(33, 7, generator=generator),
        "b.scale": torch.randn(5, generator=generator).to(torch.bfloat16),
        "b.seen": torch.tensor(step),
    }


STEPS = [100, 200, 300, 400, 500, 600]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose steps are of three formats and numbers of ranks."""
    root = tmp_path / "run"
    for number in STEPS:
        path = root / f"step_{number}"
        if number == 200:
            path.mkdir(parents=True)
            save_file(state(number), path / "model.safetensors")
        elif number == 300:
            path.mkdir(parents=True)
            torch.save({"model": state(number)}, path / "model.pt")
        else:
            save_dcp(path, {"model": state(number)})
            if number == 500:
                ema_ckpt.reshard(path, root / "three", 3)
                shutil.rmtree(path)
                (root / "three").rename(path)
    return root


def merged(weights: dict[int, float]) -> dict[str, torch.Tensor]:
    """The sum in float64, rounded once."""
    newest = state(max(weights))
    result = {}
    for name, tensor in newest.items():
        if not tensor.is_floating_point():
            result[name] = tensor
            continue
        terms = [w * state(n)[name].double() for n, w in weights.items()]
        result[name] = sum(terms[1:], terms[0]).to(tensor.dtype)
    return result


def step_of(resolved: str) -> str:
    """The step that a resolved path lies in: of a torch file its directory."""
    return next(part for part in Path(resolved).parts if part.startswith("step_"))


def same(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"last": 3}, [400, 500, 600]),
        ({"last": 3, "stride": 2}, [200, 400, 600]),
        ({"from_step": 250, "to_step": 500}, [300, 400, 500]),
        ({"from_step": 500}, [500, 600]),
        ({"to_step": 200}, [100, 200]),
        ({"last": 2, "to_step": 499}, [300, 400]),
        ({"last": 1}, [600]),
    ],
)
def test_steps_of_a_run(
    run: Path, tmp_path: Path, options: dict[str, Any], numbers: list[int]
) -> None:
    result = ema_ckpt.synthesize(run, tmp_path / "o.safetensors", **options)
    assert list(map(step_of, result.resolved)) == [f"step_{n}" for n in numbers]
    same(tmp_path / "o.safetensors", merged(dict.fromkeys(numbers, 1 / len(numbers))))
    (warning,) = result.warnings
    assert warning.code == "not-averaged"
    assert "b.seen" in warning.message
    assert f"step_{numbers[-1]}" in warning.message


def test_a_scheme_weighs_by_position(run: Path, tmp_path: Path) -> None:
    ema_ckpt.synthesize(run, tmp_path / "o.safetensors", last=4, scheme="minus-sqrt")
    shares = [1 - math.sqrt(i / 4) for i in range(5)]
    weights = {n: shares[i] - shares[i + 1] for i, n in enumerate([300, 400, 500, 600])}
    same(tmp_path / "o.safetensors", merged(weights))
    paths = [run / f"step_{n}" for n in weights]
    ema_ckpt.synthesize(paths, tmp_path / "p.safetensors", scheme="minus-sqrt")
    assert (tmp_path / "o.safetensors").read_bytes() == (tmp_path / "p.safetensors").read_bytes()


def test_steps_as_a_shell_sorts_them_are_refused(run: Path, tmp_path: Path) -> None:
    """`run/step_*` names step_1000 first, which would get the weight of the oldest."""
    shutil.copytree(run / "step_600", run / "step_1000")
    paths, out = sorted(run.glob("step_*")), tmp_path / "o.safetensors"
    assert paths[1].name == "step_1000"
    for scheme in ("cosine", "minus-sqrt", "ema:0.5"):
        with pytest.raises(EmaCkptError, match="step 1000 is named before step 200") as caught:
            ema_ckpt.synthesize(paths, out, scheme=scheme)
        assert caught.value.code == "usage"
    ema_ckpt.synthesize(paths, out, scheme="uniform")  # all weigh the same
    shutil.copytree(run / "step_100", tmp_path / "other" / "step_100")
    paths = [run / "step_600", tmp_path / "other" / "step_100"]  # of two runs
    ema_ckpt.synthesize(paths, out, scheme="ema:0.5", overwrite=True)


def test_steps_that_begin_anew_in_each_epoch_are_in_order(run: Path, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("epoch_1_step_900", "epoch_2_step_100")]
    for path in paths:
        shutil.copytree(run / "step_600", path)
    out = tmp_path / "o.safetensors"
    ema_ckpt.synthesize(paths, out, scheme="ema:0.9")
    paths[0] = paths[0].rename(tmp_path / "step_900")
    with pytest.raises(EmaCkptError, match="step 900 is named before step 100"):
        ema_ckpt.synthesize(paths, out, scheme="ema:0.9", overwrite=True)


def test_a_step_that_is_not_complete_is_named(run: Path, tmp_path: Path) -> None:
    (run / "step_500" / ".metadata").unlink()
    result = ema_ckpt.synthesize(run, tmp_path / "o.safetensors", last=2)
    assert list(map(step_of, result.resolved)) == ["step_400", "step_600"]
    assert [w.code for w in result.warnings] == ["left-out", "not-averaged"]
    assert "step_500" in result.warnings[0].message


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"last": 7}, r"6 complete steps there$"),
        ({"last": 4, "stride": 2}, r"3 complete steps there with --stride 2$"),
        ({"last": 0}, "--last"),
        ({"last": 2, "stride": 0}, "--stride"),
        ({"from_step": 601}, r"no complete step from 601 on; the newest complete one is 600$"),
        ({"from_step": 110, "to_step": 190}, r"from 110 to 190; the newest complete one is 600$"),
        ({"last": 2, "scheme": "cubic"}, "--scheme"),
        ({"last": 2, "scheme": "uniform", "weights": [0.5, 0.5]}, "--weights"),
        ({"last": 2, "weights": [1.0]}, "--weights"),
    ],
)
def test_what_does_not_fit(run: Path, tmp_path: Path, options: dict[str, Any], what: str) -> None:
    with pytest.raises(EmaCkptError, match=what) as caught:
        ema_ckpt.synthesize(run, tmp_path / "o.safetensors", **options)
    assert caught.value.code == "usage"
    assert not (tmp_path / "o.safetensors").exists()


def test_stride_or_last_of_named_snapshots(run: Path, tmp_path: Path) -> None:
    paths = [run / "step_100", run / "step_400"]
    for options in ({"stride": 2, "weights": [0.5, 0.5]}, {"last": 2}):
        with pytest.raises(EmaCkptError, match=r"run|stride"):
            ema_ckpt.synthesize(paths, tmp_path / "o.safetensors", **options)  # type: ignore[arg-type]


def test_a_scheme_of_a_run_needs_to_know_its_steps(run: Path, tmp_path: Path) -> None:
    """One step alone, the newest, is no merge; named as a snapshot it is written, as it is."""
    out = tmp_path / "o.safetensors"
    for path in (run, f"{run}/", tmp_path):
        with pytest.raises(EmaCkptError, match=r"directory of steps.*--last N.*--from") as caught:
            ema_ckpt.synthesize([path], out, scheme="linear")
        assert caught.value.code == "usage"
        assert not out.exists()
    ema_ckpt.synthesize([run / "step_600"], out, scheme="linear")
    assert torch.equal(load_file(out)["a.weight"], state(600)["a.weight"])


def test_the_command(run: Path, tmp_path: Path) -> None:
    """`--to` takes the number of a step, a format, or both; a dry run prints steps and weights and writes nothing."""
    commands = Commands(tmp_path / "marker")
    try:
        args = [
            run,
            tmp_path / "o",
            "--from",
            300,
            "--to",
            500,
            "--to",
            "dcp",
            "--json",
            "--dry-run",
        ]
        ended = commands.run("synthesize", *args)
        assert ended.code == 0, ended.stderr
        for number in (300, 400, 500):
            assert f"0.333333 x 'model' of {run}/step_{number}" in ended.stderr, ended.stderr
        document = json.loads(json.dumps(ended.document))
        assert document["format"] == "dcp"
        assert list(map(step_of, document["resolved"])) == ["step_300", "step_400", "step_500"]
        terms = document["snapshots"]
        assert [term["path"] for term in terms] == document["resolved"]
        assert [term["step"] for term in terms] == [300, 400, 500]
        assert [term["weight"] for term in terms] == [1 / 3] * 3
        assert [term["tree"] for term in terms] == ["model"] * 3
        assert not (tmp_path / "o").exists()
    finally:
        commands.close()


def test_what_all_steps_say_is_said_once(run: Path, tmp_path: Path) -> None:
    """Another checkpoint in the directory of each step is no word for each step, but one for each place."""
    save_file(state(1), run / "step_400" / "adapter_model.safetensors")
    path = run / "step_400"
    result = ema_ckpt.synthesize([path, path], tmp_path / "o.safetensors", weights=[0.5, 0.5])
    assert [w.code for w in result.warnings] == ["left-out", "not-averaged"]


def test_averages_and_live_weights_in_one_sum_are_told(tmp_path: Path) -> None:
    """Of a run whose average began later the older steps have live weights alone."""
    for step in range(1, 4):
        state = {"model": {"w": torch.full((2,), float(step))}}
        state |= {"ema": {"w": torch.zeros(2)}} if step == 3 else {}
        save_dcp(tmp_path / "run" / f"step_{step}", state)
    result = ema_ckpt.synthesize(tmp_path / "run", tmp_path / "a.safetensors", last=3)
    (warning,) = [w for w in result.warnings if w.code == "mixed-trees"]
    assert "'ema' of " in warning.message
    assert "1 more live tree;" in warning.message
    result = ema_ckpt.synthesize(tmp_path / "run", tmp_path / "b.safetensors", last=3, tree="model")
    assert result.warnings == ()
