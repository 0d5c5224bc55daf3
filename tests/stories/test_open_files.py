"""Library calls leave no file open, whether they succeed or fail: a process may make any number of them."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ema_ckpt import EmaCkptError, consolidate, convert, diff, inspect, reshard, synthesize
from tests.checkpoints import dcp_at

CALLS = 30  # more than there are descriptors to spare, so that one lost in each call is noticed
SPARE = 24


@pytest.fixture(autouse=True)
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + SPARE, hard)
    )
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


VERBS: dict[str, Callable[[Path, Path], Any]] = {
    "inspect": lambda path, _: inspect(path),
    "consolidate": lambda path, out: consolidate(
        path, out / "a.safetensors", "model", overwrite=True, no_fsync=True
    ),
    "reshard": lambda path, out: reshard(path, out / "r", 2, overwrite=True, no_fsync=True),
    "convert": lambda path, out: convert(path, out / "c.pt", overwrite=True, no_fsync=True),
}

REFUSED: dict[str, Callable[[Path, Path], Any]] = {
    "inspect": lambda path, _: inspect(path, "absent"),
    "consolidate": lambda path, out: consolidate(path, out / "a.safetensors", "absent"),
    "reshard": lambda path, out: reshard(path, out / "r", 2, tree="absent"),
    "convert": lambda path, out: convert(path, out / "c.pt", tree="absent"),
    "synthesize": lambda path, out: synthesize([path], out / "s.pt", weights=[1.0], tree="absent"),
    "diff": lambda path, _: diff(path, path, "absent"),
}


def held() -> int:
    gc.collect()  # files of other tests
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(params=["dcp", "safetensors", "torch"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "dcp":
        return dcp_at(tmp_path / "dcp")
    place = tmp_path / ("in.pt" if request.param == "torch" else "in.safetensors")
    convert(dcp_at(tmp_path / "dcp"), place)
    return place


@pytest.mark.parametrize("verb", VERBS)
def test_success_leaves_nothing_open(verb: str, checkpoint: Path, tmp_path: Path) -> None:
    VERBS[verb](checkpoint, tmp_path)
    before = held()
    for _ in range(CALLS):
        VERBS[verb](checkpoint, tmp_path)
    assert held() <= before


@pytest.mark.parametrize("verb", REFUSED)
def test_failure_leaves_nothing_open(verb: str, checkpoint: Path, tmp_path: Path) -> None:
    before = held()
    for _ in range(CALLS):
        with pytest.raises(EmaCkptError):
            REFUSED[verb](checkpoint, tmp_path)
    assert held() <= before
