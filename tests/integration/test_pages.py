"""The pages on other packages do what they say: their blocks run, in order, in one directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_table import PINNED
from tests.test_docs import FENCE, REPO, command_on_path

PAGES = sorted((REPO / "docs" / "how_to").glob("with_*.md"))
OWN_ENVIRONMENT = {"with_automodel": "nemo_automodel"}
RANKS = {
    "with_accelerate": 2,
    "with_automodel": 2,
    "with_megatron": 2,
    "with_torch_checkpointing": 1,
    "with_torchtitan": 2,
}

# FSDP's modules keep threads of gloo, and one that lets go of a tensor while the interpreter ends aborts the process:
# torch alone does that in every third run of torchtitan's page under load, without the average too.
LET_GO = """
import gc


def let_go(names=globals(), collect=gc.collect):
    names.clear()
    collect()


let_go()
"""


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_version_is_the_pinned_one(page: Path) -> None:
    ((package, version),) = re.findall(
        r"^Shown with ([\w-]+) (\S+)\.$", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert PINNED[package] == version


@pytest.mark.integration
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    if page.stem in OWN_ENVIRONMENT:
        pytest.importorskip(OWN_ENVIRONMENT[page.stem])
    environment = command_on_path(tmp_path) | {
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
    }
    ran = 0
    for found in FENCE.finditer(page.read_text(encoding="utf-8")):
        ended = subprocess.run(
            command_of(found["info"], found["body"], page, tmp_path),
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, f"{found['body']}\n{ended.stdout}{ended.stderr}"
        ran += 1
    assert ran >= 2


def command_of(language: str, code: str, page: Path, folder: Path) -> list[str]:
    """The command that runs a block as a reader would: a script, under torchrun where the page has ranks."""
    if language == "bash":
        return ["bash", "-euo", "pipefail", "-c", code]
    assert language == "python"
    script = folder / "script.py"
    ranks = RANKS.get(page.stem)
    script.write_text(
        f"import tests.integration  # operators that torchvision lacks here\n{code}"
        f"{LET_GO if ranks else ''}",
        encoding="utf-8",
    )
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        if ranks
        else []
    )
    return [sys.executable, *launcher, str(script)]
