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
from tests.stories.commands import REPO

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


@pytest.mark.parametrize("verb", ["verify", "consolidate", "diff"])
def test_a_disk_that_gives_no_bytes_and_no_reason_is_no_damage(
    shim: Path, fixtures: Path, tmp_path: Path, verb: str
) -> None:
    out = [tmp_path / "out.safetensors"] if verb == "consolidate" else []
    calls = "pread64:0,preadv64:0"
    result = run(shim, verb, fixtures / SOURCE, *out, calls=calls, code=0, path=".distcp")
    assert "_0.distcp: became shorter while it was read" in error_of(result)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_takes_no_bytes_and_gives_no_reason_is_not_asked_for_ever(
    shim: Path, fixtures: Path, tmp_path: Path
) -> None:
    words = ("reshard", fixtures / SOURCE, tmp_path / "out", "--world-size", 3)
    result = run(shim, *words, calls="pwrite64:0", code=0, path="out.ema-ckpt")
    assert "takes no bytes" in error_of(result)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("working", range(0, 16, 2))
def test_a_file_whose_state_cannot_be_told_has_not_changed(
    shim: Path, fixtures: Path, working: int
) -> None:
    """The first calls of `stat` work: whatever comes after cannot be compared."""
    calls = f"stat64:{working}"
    result = run(shim, "verify", fixtures / SOURCE, calls=calls, code=errno.ESTALE, path="0.distcp")
    if result.returncode:
        error = error_of(result)
        assert os.strerror(errno.ESTALE) in error and "changed" not in error
    else:
        assert result.stdout.startswith("sound")


SAVING = """
import sys, torch, ema_ckpt
ema_ckpt.save(sys.argv[1], model=torch.nn.Linear(2, 2))
ema_ckpt.save(sys.argv[1], model=torch.nn.Linear(2, 2), overwrite=True)
"""


@pytest.mark.parametrize(
    ("calls", "said"), [("unlinkat:0", "left behind"), ("fsync:0", "a power cut may still undo")]
)
def test_what_a_save_could_not_do_after_it_was_published_is_logged(
    shim: Path, tmp_path: Path, calls: str, said: str
) -> None:
    target = tmp_path / "parent" / "run"
    environment = os.environ | {
        "LD_PRELOAD": str(shim),
        "FAIL_CALLS": f",{calls},",
        "FAIL_ERRNO": str(errno.EPERM),
        "FAIL_PATH": "ema-ckpt" if "unlink" in calls else "parent",
    }
    if "fsync" in calls:  # only the last one of each save: that of the directory around it
        environment["FAIL_AT_END"] = "/parent"
    result = subprocess.run(
        [sys.executable, "-c", SAVING, target],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert said in result.stderr and str(target.parent) in result.stderr
    assert verify(target).status == "sound"


RANKS_SAVING = """
import resource, sys, torch, ema_ckpt
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(9, 9)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
try:
    ema_ckpt.save(sys.argv[1] + "/a", model=model, timeout=20)
except ema_ckpt.EmaCkptError as error:
    print(f"rank {dist.get_rank()}: {error.code}: {error}\\n", end="", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
print(ema_ckpt.save(sys.argv[1] + "/b", model=model, timeout=20))
dist.destroy_process_group()  # torch aborts now and then where one is left at exit
"""


def test_ranks_do_not_wait_for_one_that_cannot_remove_its_stage(shim: Path, tmp_path: Path) -> None:
    script = tmp_path / "saving.py"
    script.write_text(RANKS_SAVING)
    run_dir = tmp_path / "runs"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, *launch, script, run_dir],
        env={
            **os.environ,
            "PYTHONPATH": str(REPO),
            "LD_PRELOAD": str(shim),
            "FAIL_CALLS": ",unlinkat:0,",
            "FAIL_ERRNO": str(errno.EPERM),
            "FAIL_PATH": ".a.ema-ckpt",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("] File too large: ") == 2, result.stdout
    assert result.stdout.count("__0_0.distcp'") == 2, result.stdout
    assert "left behind" in result.stdout
    assert verify(run_dir / "b").status == "sound"


@pytest.mark.parametrize(
    "calls", ["pwrite64", "fsync", "fallocate64", "renameat2"], ids=lambda name: name
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
