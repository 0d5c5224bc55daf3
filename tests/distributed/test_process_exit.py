"""Scripts that save end as scripts do: without an abort by a thread of gloo that outlives the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from ema_ckpt import ShardedEMA, save
dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(4, 8))
optimizer, ema = torch.optim.AdamW(model.parameters()), ShardedEMA(model)
model(torch.randn(2, 4)).sum().backward()
optimizer.step()
ema.update()
save(sys.argv[1], model=model, ema=ema, optimizer=optimizer, async_save=sys.argv[2] == "async")
dist.destroy_process_group()
"""


def run_ranks(script: Path, *words: object) -> None:
    """Run a script on two ranks; it has to end with 0."""
    torchrun = Path(sys.executable).parent / "torchrun"
    ended = subprocess.run(
        [str(word) for word in (torchrun, "--nproc-per-node", "2", script, *words)],
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_ranks_end_well_after_a_save(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for attempt in range(10):
        target = tmp_path / f"step_{attempt}"
        run_ranks(script, target, "async" if attempt % 2 else "now")
        assert (target / ".metadata").exists()


KEEPING = """
import sys, torch, torch.distributed as dist
from ema_ckpt import EmaCkptError, save
dist.init_process_group("gloo")
torch.manual_seed(0)
model, kept = torch.nn.Linear(4, 8), []
save(sys.argv[1], model=model)
try:
    save(sys.argv[1], model=model)
except EmaCkptError as error:
    kept.append(error)  # and through its traceback what carried it from rank to rank
assert kept
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_end_well_that_keep_an_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KEEPING)
    for attempt in range(5):
        run_ranks(script, tmp_path / f"step_{attempt}")


FAILING = """
import os, sys, torch
from ema_ckpt import save
model = torch.nn.Linear(4, 8)
os.mkdir(sys.argv[1])
save(sys.argv[1], model=model, async_save=True)
"""


def test_a_failed_save_that_nobody_looked_at_is_told_at_the_end(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", FAILING, str(tmp_path / "step_1")]
    ended = subprocess.run(
        command, timeout=60, env=env, capture_output=True, text=True, check=False
    )
    assert "the last asynchronous save failed: " in ended.stderr
    assert "exists" in ended.stderr


WITH_NEW_EXECUTOR = """
import concurrent.futures, sys, time
from pathlib import Path
from ema_ckpt.resume.save_async import run_in_background

def work():
    time.sleep(0.5)  # the script has ended
    with concurrent.futures.ThreadPoolExecutor(1) as names:  # as asyncio does to look up a host
        return names.submit(Path(sys.argv[1]).touch).result()

for _ in range(int(sys.argv[2])):
    saving = run_in_background(work)
if sys.argv[3] == "chain":
    saving.add_done_callback(lambda ended: run_in_background(Path(sys.argv[1] + "-2").touch))
"""


@pytest.mark.skipif(
    (3, 12, 0) <= sys.version_info[:3] <= (3, 12, 2),
    reason="starts no thread once the script ended",
)
@pytest.mark.parametrize("saves", [1, 2])
@pytest.mark.parametrize("then", ["end", "chain"])
def test_a_save_may_use_executors_while_the_process_waits_for_it(
    saves: int, then: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WITH_NEW_EXECUTOR, str(tmp_path / "saved"), str(saves), then]
    ended = subprocess.run(
        command,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "saved-2").exists() == (then == "chain")


FORKING = """
import os, sys, threading, warnings
from ema_ckpt import save
from ema_ckpt.resume.save_async import run_in_background
import torch
warnings.simplefilter("ignore")
child_has_ended = threading.Event()
run_in_background(child_has_ended.wait)
child = os.fork()
if child:
    status = os.waitpid(child, 0)[1]
    child_has_ended.set()
    sys.exit(os.waitstatus_to_exitcode(status))
if sys.argv[2] == "save":
    save(sys.argv[1], model=torch.nn.Linear(4, 8), async_save=True)
"""


@pytest.mark.parametrize("then", ["end", "save"])
def test_a_forked_child_does_not_wait_for_the_save_of_its_parent(then: str, tmp_path: Path) -> None:
    target = tmp_path / "step_1"
    ended = subprocess.run(
        [sys.executable, "-c", FORKING, str(target), then],
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert (target / ".metadata").exists() == (then == "save")
