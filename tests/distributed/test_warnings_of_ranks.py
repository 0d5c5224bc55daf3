"""A warning that several ranks have is issued by the lowest of them; every report has it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from torch import nn

from ema_ckpt import ShardedEMA, restore, rng_state, save
from tests.distributed.launcher import run


def _save(step: str) -> None:
    save(step, model=nn.Linear(1, 1), extra={"rng": rng_state()}, overwrite=True)


def _restore(step: str) -> tuple[list[str], tuple[str, ...]]:
    """Warnings issued here, and those in the report."""
    model = nn.Linear(1, 1)
    ema = ShardedEMA(model, 0.5)
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        report = restore(step, model=model, ema=ema, missing_ema="seed", extra={"rng": rng_state()})
    said = [str(warning.message) for warning in issued if warning.category is UserWarning]
    return said, report.warnings


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_all_ranks_warn_of_is_issued_once(tmp_path: Path) -> None:
    step = str(tmp_path / "step_1")
    run(2, _save, step)
    (first, told), *others = run(3, _restore, step)
    assert sorted(first) == sorted(told)
    assert len([text for text in told if "rank 2" in text]) == 1
    assert len([text for text in told if "live weights" in text]) == 1
    assert others == [([], told)] * 2
