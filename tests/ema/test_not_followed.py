"""Parameters that are unfrozen, or added, after the average was made: said where the average is saved or exported."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ema_ckpt
from ema_ckpt import ShardedEMA


def half_frozen() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    return model


def exports(ema: ShardedEMA, folder: Path) -> list[Callable[[], Any]]:
    return [
        lambda: ema_ckpt.save(folder / "step_1", model=ema.model, ema=ema),
        ema.full_state_dict,
    ]


def test_an_unfrozen_parameter_is_named(tmp_path: Path) -> None:
    model = half_frozen()
    ema = ShardedEMA(model, 0.5)
    model[0].weight.requires_grad_(True)
    ema.update()
    for export in exports(ema, tmp_path):
        with pytest.warns(
            UserWarning, match=r"ema-partial: .*'0\.weight' is trained and not averaged"
        ):
            export()


def test_an_added_module_is_named(tmp_path: Path) -> None:
    model = half_frozen()
    ema = ShardedEMA(model, 0.5)
    model.append(nn.Linear(2, 1))
    ema.update()
    for export in exports(ema, tmp_path):
        with pytest.warns(
            UserWarning, match=r"'2\.weight', '2\.bias' are trained and not averaged"
        ):
            export()


@pytest.mark.parametrize("options", [{"include": "1.*"}, {"exclude": "0.*"}, {"include": "*"}])
def test_what_was_chosen_by_name_is_not(tmp_path: Path, options: dict[str, str]) -> None:
    model = half_frozen()
    ema = ShardedEMA(model, 0.5, **options)
    model.requires_grad_(True)
    ema.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for export in exports(ema, tmp_path):
            export()


def test_frozen_since_or_tied_is_not(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ema = ShardedEMA(model, 0.5)
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    ema.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for export in exports(ema, tmp_path):
            assert isinstance(export(), (dict, type(None), str, Path))


def test_a_new_average_follows_it() -> None:
    model = half_frozen()
    ema = ShardedEMA(model, 0.5)
    model[0].requires_grad_(True)
    again = ShardedEMA(model, 0.5)
    with torch.no_grad():
        model[0].weight += 1
    again.update()
    assert not torch.equal(again.full_state_dict()["0.weight"], model[0].weight)
    assert len(ema.state_dict()["weights"]) == 2
