"""Averages that never moved, are still copies, or belong to another model: every verb that reads one says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ema_ckpt
from tests.checkpoints import save_dcp, torch_at, weights


def average(updates: int, every: int = 1, **config: object) -> dict[str, object]:
    document = {"version": 1, "every": every, "decay": 0.999, **config}
    return {
        "weights": weights(0.5),
        "num_updates": torch.tensor(updates),
        "samples_seen": torch.tensor(0),
        "config": json.dumps(document),
    }


def run(tmp_path: Path, ema: dict[str, object]) -> Path:
    return save_dcp(tmp_path / "run", {"model": weights(), "ema": ema})


VERBS: dict[str, Callable[[Path], list[str]]] = {
    "inspect": lambda path: [w.code for w in ema_ckpt.inspect(path).warnings],
    "consolidate": lambda path: [
        w.code for w in ema_ckpt.consolidate(path, path.with_name("o.pt"), overwrite=True).warnings
    ],
    "verify": lambda path: [w.code for w in ema_ckpt.verify(path).warnings],
    "diff": lambda path: [f.code for f in ema_ckpt.diff(path).findings],
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("ema", "moved"),
    [
        (average(100, every=1000), False),
        (average(999, every=1000), False),
        (average(1000, every=1000), True),
        # The counter says when it moved; `every` was changed on the way.
        (average(30, every=1000, counter={"moved_at": 25}), True),
        (average(30, every=10, counter={"moved_at": 0}), False),
        (average(0), False),
        (average(1), True),
    ],
)
def test_an_average_that_never_moved(
    verb: str, ema: dict[str, object], moved: bool, tmp_path: Path
) -> None:
    assert ("ema-stalled" in VERBS[verb](run(tmp_path, ema))) is not moved


@pytest.mark.parametrize(
    ("updates", "every", "copied"),
    [
        (1, 1, True),
        (4, 1, False),
        (5, 1, False),
        (6, 1, True),
        (7, 1, False),
        (12, 2, True),
        (14, 2, False),
    ],
)
def test_a_window_that_has_just_begun(
    updates: int, every: int, copied: bool, tmp_path: Path
) -> None:
    """A window of five updates copies at 1, 6, 11, …; an average that moves at each second call, by the next even one."""
    ema = average(updates, every, schedule={"kind": "window", "n": 5})
    assert ("ema-stalled" in VERBS["inspect"](run(tmp_path, ema))) is copied


def test_a_settings_dictionary_tells_the_same(tmp_path: Path) -> None:
    ema = average(100) | {"config": {"every": 1000, "counter": {"moved_at": 0}}}
    assert "ema-stalled" in VERBS["consolidate"](run(tmp_path, ema))


def warmup(start: int, **more: object) -> dict[str, object]:
    return {"kind": "warmup", "decay": 0.999, "start": start, "min_decay": 0.0, **more}


@pytest.mark.parametrize("verb", ["inspect", "consolidate", "verify"])
@pytest.mark.parametrize(
    ("updates", "every", "schedule", "is_copy"),
    [
        (500, 1, warmup(500), True),
        (501, 1, warmup(500), True),
        (502, 1, warmup(500), False),
        (500, 1, warmup(500, min_decay=0.5), False),
        (600, 200, warmup(500), True),  # moved at 600 by a product that holds a 0
        (800, 200, warmup(500), False),
        (1, 1, {"kind": "power-function", "sigma_rel": 0.1}, True),
        (2, 1, {"kind": "power-function", "sigma_rel": 0.1}, False),
        (3, 1, {"kind": "constant", "decay": 0.999}, False),
    ],
)
def test_an_average_that_is_still_a_copy(
    verb: str,
    updates: int,
    every: int,
    schedule: dict[str, object],
    is_copy: bool,
    tmp_path: Path,
) -> None:
    ema = average(updates, every, schedule=schedule)
    assert ("ema-stalled" in VERBS[verb](run(tmp_path, ema))) is is_copy


def test_a_copy_by_its_schedule_is_not_blamed_on_the_resume(tmp_path: Path) -> None:
    ema = average(500, schedule=warmup(500)) | {"weights": weights()}
    (finding,) = ema_ckpt.diff(run(tmp_path, ema)).findings
    assert finding.code == "ema-equals-live"
    assert "decay is 0 up to update 501" in finding.message
    assert "resume" not in finding.message


@pytest.mark.parametrize(("steps", "is_copy"), [(100, True), (101, True), (102, False)])
def test_a_copy_in_the_layout_of_diffusers(steps: int, is_copy: bool, tmp_path: Path) -> None:
    # diffusers 0.35, EMAModel.get_decay: 0 while optimization_step - update_after_step - 1 <= 0.
    shadow = {"decay": 0.99, "min_decay": 0.0, "optimization_step": steps}
    shadow |= {"update_after_step": 100, "shadow_params": list(weights(0.5).values())}
    path = torch_at(tmp_path / "run.pt", {"model": weights(), "ema": shadow})
    assert ("ema-stalled" in VERBS["consolidate"](path)) is is_copy


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "odd",
    [
        {"layer.w": torch.zeros(0)},
        {"layer.w": torch.zeros(6)},
        {"layer.w": torch.zeros(0, 3), "b": torch.zeros(0)},
        {"b": torch.zeros(4)},
    ],
)
def test_an_average_of_another_model(
    verb: str, odd: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    ema = average(3) | {"weights": weights(0.5) | odd}
    assert "ema-unrelated" in VERBS[verb](run(tmp_path, ema))


def test_the_names_that_do_not_fit_are_told(tmp_path: Path) -> None:
    ema = average(3) | {"weights": {f"module.{n}": t for n, t in weights(0.5).items()}}
    ema["weights"]["module.b"] = torch.zeros(0)
    (warning,) = ema_ckpt.consolidate(run(tmp_path, ema), tmp_path / "o.pt", fill=True).warnings
    assert warning.code == "ema-unrelated"
    assert "1 of 2 common names" in warning.message
    assert "'module.b' [0], live [2]" in warning.message


def test_one_of_many_that_does_not_fit(tmp_path: Path) -> None:
    many = {f"layer.{index}": torch.full((2,), float(index)) for index in range(30)}
    ema = average(3) | {"weights": many | {"layer.7": torch.zeros(3)}}
    path = save_dcp(tmp_path / "run", {"model": many, "ema": ema})
    assert VERBS["consolidate"](path) == ["ema-unrelated"]
    assert "ema-unrelated" in VERBS["verify"](path)


@pytest.mark.parametrize("verb", VERBS)
def test_a_sound_average_is_not_warned_of(verb: str, tmp_path: Path) -> None:
    assert VERBS[verb](run(tmp_path, average(3))) == []


@pytest.mark.parametrize("verb", VERBS)
def test_an_average_whose_decay_is_1(verb: str, tmp_path: Path) -> None:
    for decay in (1.0, 0.99):
        schedule = {"kind": "constant", "decay": decay}
        path = run(tmp_path / str(decay), average(5, schedule=schedule))
        assert ("ema-stalled" in VERBS[verb](path)) is (decay == 1.0)
