"""One byte changed, or the end cut off, anywhere: the weights come out right to the bit, or not at all.

Data files and torch files carry checksums, so whatever is not refused has to be exact. `.metadata`, headers and
indices carry none: there a changed name is a changed name; but it never ends in a traceback, a hang, gigabytes
of memory, or something executed (the forked command has a limit on memory and time).
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.stories.commands import FIXTURES, Commands

SAMPLES = 25  # damages a file and kind


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage") / "marker"


@pytest.fixture(scope="module")
def commands(marker: Path) -> Iterator[Commands]:
    served = Commands(marker)
    yield served
    served.close()


def _damaged(raw: bytes, how: str, draw: random.Random) -> bytes:
    at = draw.randrange(len(raw))
    if how == "cut":
        return raw[:at]
    if how == "flip":
        return raw[:at] + bytes([raw[at] ^ (1 << draw.randrange(8))]) + raw[at + 1 :]
    if how == "zero":
        return raw[:at] + bytes(min(16, len(raw) - at)) + raw[at + 16 :]
    other = draw.randrange(len(raw))  # a run of bytes from elsewhere in the same file
    return raw[:at] + raw[other : other + 8] + raw[at + 8 :]


# The checkpoint, the file that is damaged, and whether checksums cover that file.
FILES = [
    ("nasty/base", "__0_0.distcp", True),
    ("nasty/base", "__1_0.distcp", True),
    ("nasty/base", ".metadata", False),
    ("dcp/no-collectives-w2", "__1.metadata", False),
    ("torch/model-ema.ckpt", "", True),
    ("torch/plain.pt", "", True),
    ("hf/sharded", "model.safetensors.index.json", False),
    ("safetensors/plain.safetensors", "", False),
]


@pytest.mark.parametrize("how", ["flip", "cut", "zero", "copy"])
@pytest.mark.parametrize(("source", "file", "covered"), FILES, ids=str)
def test_damage_is_refused_or_harmless(
    source: str,
    file: str,
    covered: bool,
    how: str,
    commands: Commands,
    marker: Path,
    tmp_path: Path,
) -> None:
    honest = FIXTURES / source
    copy = tmp_path / honest.name
    shutil.copytree(honest, copy) if honest.is_dir() else shutil.copyfile(honest, copy)
    wanted = _consolidated(commands, copy, tmp_path)
    target = copy / file if file else copy
    raw = target.read_bytes()
    draw = random.Random(f"{source}{file}{how}")
    for _ in range(SAMPLES):
        target.write_bytes(_damaged(raw, how, draw))
        found = _consolidated(commands, copy, tmp_path)
        assert not marker.exists(), "something was executed"
        if covered and found is not None:
            assert found == wanted


def _consolidated(
    commands: Commands, source: Path, folder: Path
) -> dict[str, tuple[str, list[object]]] | None:
    """The weights as plain values, or None if they were refused as they should be."""
    out = folder / "out.pt"
    ended = commands.run("consolidate", source, out, "-q")
    assert ended.code in (0, 2), ended.stderr
    if ended.code == 2:
        assert ended.stderr.startswith("Error: ")
        assert ended.stderr.count("\n") == 1, ended.stderr
        assert not out.exists()
        return None
    loaded = torch.load(out, weights_only=True)
    out.unlink()
    return {
        name: (str(t.dtype), t.reshape(-1).contiguous().view(torch.uint8).tolist())
        for name, t in loaded.items()
    }
