"""What is given in the place of a path or of a state, and is neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ema_ckpt
from ema_ckpt import EmaCkptError, ShardedEMA, latest, restore, save

CALLS: dict[str, Callable[[Any], object]] = {
    "save": lambda path: save(path, model=nn.Linear(2, 2)),
    "restore": lambda path: restore(path, model=nn.Linear(2, 2)),
    "latest": latest,
    "open": ema_ckpt.open,
    "inspect": ema_ckpt.inspect,
    "verify": ema_ckpt.verify,
    "diff": ema_ckpt.diff,
    "consolidate": lambda path: ema_ckpt.consolidate(path, "out.safetensors"),
    "reshard": lambda path: ema_ckpt.reshard(path, "out", 2),
    "synthesize": lambda path: ema_ckpt.synthesize([path, path], "out.pt", weights=[0.5, 0.5]),
}


@pytest.mark.parametrize("path", [None, 3, b"run", ["run"]])
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_path(call: str, path: object) -> None:
    with pytest.raises(EmaCkptError, match="a path is a str or os") as info:
        CALLS[call](path)
    assert info.value.code == "usage"


def test_a_target_and_an_ema_path_that_are_none(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ema = ShardedEMA(model)
    run = save(tmp_path / "run", model=model, ema=ema)
    calls: list[Callable[[Any], object]] = [
        lambda path: ema_ckpt.consolidate(run, path),
        lambda path: ema_ckpt.convert(run, path),
        lambda path: restore(run, model=model, ema=ema, ema_path=path),
    ]
    for call in calls:
        with pytest.raises(EmaCkptError, match="a path is a str or os"):
            call(3)


@pytest.mark.parametrize("state", [None, [], "state"])
def test_a_state_that_is_no_dict(state: Any) -> None:
    ema = ShardedEMA(nn.Linear(2, 2))
    with pytest.raises(EmaCkptError, match=r"give what state_dict\(\) returned"):
        ema.load_state_dict(state)
