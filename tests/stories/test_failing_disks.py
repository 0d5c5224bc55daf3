"""A disk or file system that fails in the middle: one line that names file and cause, and nothing lost.

The calls fail in the real process, by a library that is loaded into it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ema_ckpt import verify

SHIM = Path(__file__).with_name("failing_calls.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
SOURCE = "dcp/fsdp2-w2"


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "failing_calls.so"
    subprocess.run(
        [str(COMPILER), "-shared", "-fPIC", "-o", library, SHIM, "-ldl"], check=True, timeout=60
    )
    return library


def run(
    shim: Path, *words: object, calls: str = "", code: int = errno.EIO, path: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the command line with some calls failing on files with `path` in their names."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "FAIL_CALLS": f",{calls},",  # NAME:N, the first N of them work
        "FAIL_ERRNO": str(code),
        "FAIL_PATH": path,
    }
    command = [sys.executable, "-m", "ema_ckpt", *map(str, words)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def error_of(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error of exit code 2."""
    assert result.returncode == 2, result
    lines = result.stderr.splitlines()
    assert "Traceback" not in result.stderr
    assert [line for line in lines if line.startswith("Error: ")] == lines[-1:]
    return lines[-1]


def stages_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOMEM])
@pytest.mark.parametrize("verb", ["verify", "inspect", "consolidate", "diff"])
def test_a_disk_that_cannot_be_read_is_no_damage(
    shim: Path, fixtures: Path, tmp_path: Path, verb: str, code: int
) -> None:
    out = [tmp_path / "out.safetensors"] if verb == "consolidate" else []
    calls = "pread64:0,preadv64:0"
    result = run(shim, verb, fixtures / SOURCE, *out, calls=calls, code=code, path=".distcp")
    error = error_of(result)
    assert "_0.distcp" in error and os.strerror(code) in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "calls", ["pwrite64", "fsync", "posix_fallocate64", "renameat2"], ids=lambda name: name
)
def test_a_disk_that_cannot_be_written_leaves_the_old_target(
    shim: Path, fixtures: Path, tmp_path: Path, calls: str
) -> None:
    target = tmp_path / "out"
    shutil.copytree(fixtures / "dcp/fsdp2-w1", target)
    words = ("reshard", fixtures / SOURCE, target, "--world-size", 3, "--overwrite", "--json")
    result = run(shim, *words, calls=f"{calls}:0", path="out.ema-ckpt")
    error = error_of(result)
    assert os.strerror(errno.EIO) in error and str(target) in error
    assert json.loads(result.stdout)["error"]["code"] == "unreadable"
    assert verify(target).status == "sound" and len(list(target.glob("*.distcp"))) == 1
    assert not stages_in(tmp_path)


@pytest.mark.parametrize("working", range(4))
def test_a_switch_that_fails_for_good_says_where_both_are(
    shim: Path, fixtures: Path, tmp_path: Path, working: int
) -> None:
    """The file system cannot exchange names, and after some renames it takes no more."""
    target = tmp_path / "out"
    shutil.copytree(fixtures / "dcp/fsdp2-w1", target)
    words = ("reshard", fixtures / SOURCE, target, "--world-size", 3, "--overwrite")
    calls = f"renameat2:0,rename:{working}"
    result = run(shim, *words, calls=calls, code=errno.EINVAL, path=str(tmp_path))
    if working == 3:  # all that are needed
        assert result.returncode == 0 and not stages_in(tmp_path)
        assert len(list(target.glob("*.distcp"))) == 3
        return
    error = error_of(result)
    if working < 2:  # nothing has been moved yet
        assert not stages_in(tmp_path)
        assert len(list(target.glob("*.distcp"))) == 1 and verify(target).status == "sound"
        return
    (stage,) = stages_in(tmp_path)
    old, new = stage / ".ema-ckpt.old", stage / "out"
    assert str(old) in error and str(new) in error and not target.exists()
    assert (verify(old).status, verify(new).status) == ("sound", "sound")
    # Whoever reads the name meanwhile gets the new one; the next writer ends the switch.
    assert verify(target).status == "sound"
    assert run(shim, *words).returncode == 0
    assert len(list(target.glob("*.distcp"))) == 3 and not stages_in(tmp_path)


def test_a_stage_that_cannot_be_deleted_is_named(
    shim: Path, fixtures: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(fixtures / SOURCE, damaged)
    file = damaged / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"data/", b"dada/"))
    target = tmp_path / "out"
    words = ("reshard", damaged, target, "--world-size", 2)
    error = error_of(run(shim, *words, calls="unlinkat:0", code=errno.EPERM, path="ema-ckpt"))
    (stage,) = stages_in(tmp_path)
    assert str(stage) in error and "left behind" in error
    assert not target.exists()


def test_a_published_target_whose_stage_stays_is_a_warning(
    shim: Path, fixtures: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    shutil.copytree(fixtures / "dcp/fsdp2-w1", target)
    words = ("reshard", fixtures / SOURCE, target, "--world-size", 2, "--overwrite", "--json")
    result = run(shim, *words, calls="unlinkat:0", code=errno.EPERM, path="ema-ckpt")
    assert result.returncode == 0, result.stderr
    (stage,) = stages_in(tmp_path)
    warnings = json.loads(result.stdout)["warnings"]
    assert [str(stage) in warning["message"] for warning in warnings] == [True]
    assert verify(target).status == "sound"
