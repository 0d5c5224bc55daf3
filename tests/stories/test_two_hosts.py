"""Two processes that see one directory as two hosts do, which remember for a while that a name was not there.

Each has a mount of its own, of a FUSE file system that caches as clients of NFS do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local_ports import free_port

REPO = Path(__file__).parents[2]
_CACHED = "entry_timeout=60,attr_timeout=60,negative_timeout=60"
_HAS_TOOLS = os.geteuid() == 0 and shutil.which("bindfs") and shutil.which("unshare")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _HAS_TOOLS, reason="mounts as root: apt-get install bindfs"),
]

SAVE = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.fsdp import fully_shard
from ema_ckpt import latest, restore, save
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
fully_shard(model)
for step in range(2):
    path = Path(sys.argv[1], "run", f"step_{step}")
    save(path, model=model)
    restore(path, model=model)
    dist.barrier()
    print(latest(path.parent).name)
dist.destroy_process_group()
"""


def on_two_hosts(tmp_path: Path, *arguments: str) -> list[str]:
    """Run Python on two ranks, each with a mount of `tmp_path/disk` at `tmp_path/seen`; return what they print."""
    disk, seen = tmp_path / "disk", tmp_path / "seen"
    disk.mkdir(exist_ok=True)
    seen.mkdir()
    mount = f"mount --make-rprivate / && bindfs -o {_CACHED} {disk} {seen}"
    probe = ["unshare", "--mount", "sh", "-c", f"{mount} && umount -l {seen}"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("FUSE cannot be mounted here")
    script = f'{mount} || exit 99; "$0" "$@"; code=$?; umount -l {seen}; exit $code'
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, *arguments]
    env = {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            command,
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(told)
    return told


def test_the_first_save_of_a_run_is_seen_by_all_hosts(tmp_path: Path) -> None:
    told = on_two_hosts(tmp_path, "-c", SAVE, str(tmp_path / "seen"))
    assert [text.split()[:1] for text in told] == [["step_0"], ["step_0"]]
    assert sorted(os.listdir(tmp_path / "disk" / "run")) == ["step_0", "step_1"]


def test_the_first_output_of_several_processes_is_seen_by_all_hosts(
    fixtures: Path, tmp_path: Path
) -> None:
    shutil.copytree(fixtures / "dcp/fsdp2-w2", tmp_path / "disk" / "source")
    source, out = tmp_path / "seen" / "source", tmp_path / "seen" / "new" / "deep" / "out"
    command = ("-m", "ema_ckpt", "convert", str(source), str(out), "--to", "dcp", "--distributed")
    on_two_hosts(tmp_path, *command)
    written = tmp_path / "disk" / "new" / "deep"
    assert sorted(os.listdir(written)) == ["out"]
    assert (written / "out" / ".metadata").is_file()
