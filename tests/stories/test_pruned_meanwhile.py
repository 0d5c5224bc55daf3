"""A retention job deletes a step while a verb reads it: one clear line, and no verdict of damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ema_ckpt
from ema_ckpt.core.errors import AccessError, EmaCkptError
from tests.checkpoints import ema, save_replicas, weights


class Prune:
    """Progress that deletes a directory before the first byte is read; `keep` stays in it."""

    def __init__(self, path: Path, keep: str = "") -> None:
        self.path = path
        self.keep = keep

    def expect(self, nbytes: int) -> None:
        if not self.keep:
            shutil.rmtree(self.path)
        for file in self.path.iterdir() if self.keep else ():
            if file.name != self.keep:
                file.unlink()

    def __call__(self, nbytes: int) -> None:
        pass


VERBS: dict[str, Callable[[Path, Path, Prune], object]] = {
    "verify": lambda run, _out, progress: ema_ckpt.verify(run, progress=progress, threads=1),
    "consolidate": lambda run, out, progress: ema_ckpt.consolidate(
        run, out / "one.pt", progress=progress, threads=1
    ),
    "reshard": lambda run, out, progress: ema_ckpt.reshard(
        run, out / "two", 2, progress=progress, threads=1
    ),
}


@pytest.mark.parametrize("keep", ["", "__1_0.distcp"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_step_is_pruned_while_it_is_read(tmp_path: Path, verb: str, keep: str) -> None:
    step = save_replicas(tmp_path / "run" / "step_1", {"model": weights(), "ema": ema()}, ranks=4)
    with pytest.raises(EmaCkptError, match=r"while (it was|being) read") as caught:
        VERBS[verb](tmp_path / "run", tmp_path, Prune(step, keep))
    assert caught.value.code == "source-changed"
    if verb == "verify":  # no verdict on the checkpoint
        assert isinstance(caught.value, AccessError)
        assert "name the run again" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_an_opened_checkpoint_is_pruned(tmp_path: Path) -> None:
    step = save_replicas(tmp_path / "run" / "step_1", {"model": weights()}, ranks=4)
    with ema_ckpt.open(step) as ckpt:
        shutil.rmtree(step)
        with pytest.raises(AccessError) as caught:
            ckpt["model.b"]
    assert caught.value.code == "source-changed"
