"""Memory stays bounded however large the checkpoint is (deepspeedai/DeepSpeed#1062)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.sharded import rows, save_cut

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

# A child starts with the peak of the process that forked it, so a Python that has imported nothing does the forking.
_PEAK = """
import posix, sys
pid = posix.fork()
if not pid:
    posix.dup2(posix.open('/dev/null', posix.O_WRONLY), 1)
    posix.execv(sys.argv[1], sys.argv[1:])
_, status, usage = posix.wait4(pid, 0)
print(usage.ru_maxrss * 1024, posix.waitstatus_to_exitcode(status))
"""


def _peak_nbytes(*words: object) -> int:
    command = [
        sys.executable,
        "-S",
        "-E",
        "-c",
        _PEAK,
        sys.executable,
        "-m",
        "ema_ckpt",
        *map(str, words),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    peak, code = map(int, done.stdout.split())
    assert code == 0, done.stderr
    return peak


@pytest.fixture(scope="module", params=[0, 1], ids=["rows", "columns"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """192 MiB of fp32 on four ranks, cut along one dimension, beside as much that nobody asks for."""
    tensors = {name: torch.ones(4096, 6144) for name in ("ema.w", "model.w")}
    by_rows = rows((4096, 6144), 4)
    by_columns = [[((0, 1536 * rank), (4096, 1536))] for rank in range(4)]
    cuts = by_columns if request.param else by_rows
    return save_cut(tmp_path_factory.mktemp("large") / "run", tensors, dict.fromkeys(tensors, cuts))


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is counted in KiB on Linux alone")
@pytest.mark.parametrize(("dtype", "limit"), [("keep", 64 * MIB), ("bf16", 96 * MIB)])
@pytest.mark.parametrize("out", ["out.safetensors", "out.pt"])
def test_a_tree_of_any_size_is_written_within_the_promised_memory(
    source: Path, tmp_path: Path, dtype: str, limit: int, out: str
) -> None:
    peak = _peak_nbytes(
        "consolidate", source, tmp_path / out, "--dtype", dtype, "--no-fsync", "--threads", 2
    )
    assert peak <= limit, f"{peak / MIB:.0f} MiB"
    assert (tmp_path / out).stat().st_size > 4096 * 6144 * (4 if dtype == "keep" else 2)
    (tmp_path / out).unlink()
