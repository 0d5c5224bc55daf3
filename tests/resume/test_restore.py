"""A whole run restored: it goes on as if it had never stopped, or every bit stays as it was."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ema_ckpt import restore, save
from ema_ckpt.core.errors import SourceError, StateError
from ema_ckpt.ema.manager import ShardedEMA
from tests.resume.training import Run, refused, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_run_goes_on_as_if_it_had_never_stopped(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "run" / "step_3", extra={"step": 3})
    assert path == tmp_path / "run" / "step_3"
    before = run.bits()
    other = Run(seed=9)
    report = other.restore(tmp_path / "run", extra={"step": None})
    same(other.bits(), before)
    assert report.path == path
    assert report.world_size == 1
    assert report.trees == {
        "model": "restored",
        "ema": "restored",
        "optimizer": "restored",
        "extra": "restored",
    }
    assert report.extra == {"step": 3}
    assert {"model.enter.weight", "ema.weights.enter.weight", "model.empty", "extra.step"} <= set(
        report.loaded
    )
    assert not report.missing + report.unexpected + report.seeded + report.warnings
    assert not report.renamed
    assert not report.changed_settings
    run.train(3, 6)
    other.train(3, 6)
    same(other.bits(), run.bits())
    assert other.ema.num_updates == 6


def test_restoring_neither_steps_nor_averages(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    other = Run(seed=9)
    steps = []
    other.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    other.restore(path)
    assert not steps
    assert other.ema.num_updates == 3


def test_names_shapes_and_dtypes_are_compared_before_anything_is_written(
    run: Run, tmp_path: Path
) -> None:
    path = run.save(tmp_path / "c")
    error = refused(Run(seed=9, wide=6), path, SourceError)
    assert error.code == "index-mismatch"
    assert "'ema.weights.enter.weight' has shape [5, 3] there and [6, 3] here" in str(error)

    other = Run(seed=9)
    other.model.register_buffer("new", torch.ones(2))
    del other.model.empty
    other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=1e-2)
    other.ema.detach()
    other.ema = ShardedEMA(other.model)
    error = refused(other, path, SourceError, ema=None, optimizer=None)
    assert error.code == "incomplete"
    assert "it lacks 'model.new' and it has 'model.empty'" in str(error)
    report = other.restore(path, ema=None, optimizer=None, strict=False)
    assert report.missing == ("model.new",)
    assert report.unexpected == ("model.empty",)
    assert torch.equal(other.model.enter.weight, run.model.enter.weight)
    assert report.trees["ema"] == "ignored"

    error = refused(Run(seed=9, dtype=torch.bfloat16), path, SourceError)
    assert "is float32 there and bfloat16 here, which would lose values" in str(error)


def test_damage_is_noticed_before_anything_is_written(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    file = path / "__0_0.distcp"
    data = file.read_bytes()
    needle = run.optimizer.state[run.model.enter.weight]["exp_avg_sq"].numpy().tobytes()
    at = data.index(needle)
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    error = refused(Run(seed=9), path, SourceError)
    assert error.code == "checksum"
    assert "optimizer.state.enter.weight.exp_avg_sq" in str(error)
    file.write_bytes(data[:-10])
    assert refused(Run(seed=9), path, SourceError).code == "truncated-file"
    file.unlink()
    assert refused(Run(seed=9), path, SourceError).code == "missing-file"


def test_swapped_models_are_neither_saved_nor_restored(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    with run.ema.swap():
        for options in ({"ema": run.ema}, {}):
            with pytest.raises(StateError, match="inside swap"):
                save(tmp_path / "d", model=run.model, **options)
            with pytest.raises(StateError, match="inside swap"):
                restore(path, model=run.model, **options)
    assert not (tmp_path / "d").exists()


def test_a_checkpoint_saved_while_swapped_is_put_right(run: Run, tmp_path: Path) -> None:
    live = {name: value.clone() for name, value in run.model.state_dict().items()}
    state = run.ema.state_dict()
    averages = {name: value.clone() for name, value in state["weights"].items()}
    parameters = {name for name, _ in run.model.named_parameters()}
    exchanged = {
        "model": {
            name: averages[name] if name in parameters else value for name, value in live.items()
        },
        "ema": {**state, "weights": {name: live[name] for name in averages}},
        "swapped": True,
    }
    dcp.save(exchanged, checkpoint_id=tmp_path / "c")
    other = Run(seed=9)
    with pytest.warns(UserWarning, match="marked as swapped"):
        other.restore(tmp_path / "c", optimizer=None)
    for name in parameters:
        assert torch.equal(other.model.state_dict()[name], live[name])
        assert torch.equal(other.ema.state_dict()["weights"][name], averages[name])
    assert not torch.equal(live["enter.weight"], averages["enter.weight"])


def test_names_that_look_like_a_mark_of_exchange(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, ShardedEMA]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 3)
        model.register_buffer("is_swapped", torch.tensor(True))
        ema = ShardedEMA(model, 0.5)
        with torch.no_grad():
            model.weight.add_(1)
        ema.update()
        return model, ema

    (model, ema), (again, averaged) = made(0), made(1)
    save(tmp_path / "step", model=model, ema=ema, extra={"swapped": True})
    restore(tmp_path / "step", model=again, ema=averaged, extra={"swapped": None})
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(
        averaged.state_dict()["weights"]["weight"], ema.state_dict()["weights"]["weight"]
    )


def test_ctrl_c_while_values_are_written_leaves_no_mixture(run: Run, tmp_path: Path) -> None:
    path = run.save(tmp_path / "c")
    saved = run.bits()

    def interrupted(number: int) -> bool:
        other, lines = Run(seed=9), 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            if (
                frame.f_code.co_name not in {"write", "finish"}
                or "resume" not in frame.f_code.co_filename
            ):
                return None
            lines += event == "line"
            if event == "line" and lines == number:
                signal.raise_signal(signal.SIGINT)
            return trace

        sys.settrace(trace)
        try:
            other.restore(path)
        except KeyboardInterrupt:
            sys.settrace(None)
            same(other.bits(), saved)
            return True
        finally:
            sys.settrace(None)
        return False

    numbers = range(1, 100, 4)
    assert sum(map(interrupted, numbers)) > 5
