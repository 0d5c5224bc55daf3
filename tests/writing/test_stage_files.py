"""A stage that somebody touched after its writer was killed: what is outside it stays as it is."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ema_ckpt import consolidate, reshard, verify
from tests.checkpoints import save_dcp

torch = pytest.importorskip("torch")
OUTSIDE = b"somebody's work" * 100


def killed_writer(write: Callable[..., object], source: Path, out: Path) -> Path:
    """Kill a writer with `resume` in the middle; return the stage that it leaves."""
    child = os.fork()
    if not child:
        write(
            source,
            out,
            resume=True,
            threads=1,
            max_memory="4MiB",
            progress=lambda _: os.kill(os.getpid(), signal.SIGKILL),
        )
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (stage,) = out.parent.glob(f".{out.name}.ema-ckpt-*")
    return stage


def symlink(place: Path, outside: Path) -> None:
    place.unlink()
    place.symlink_to(outside)


def hard_link(place: Path, outside: Path) -> None:
    place.unlink()
    os.link(outside, place)


def fifo(place: Path, outside: Path) -> None:
    place.unlink()
    os.mkfifo(place)


def linked_folder(place: Path, outside: Path) -> None:
    shutil.rmtree(place)
    outside.unlink()
    outside.mkdir()
    (outside / "__0_0.distcp").write_bytes(OUTSIDE)
    place.symlink_to(outside)


def other_kind(place: Path, outside: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
        place.write_bytes(b"x")
    else:
        place.unlink()
        place.mkdir()


def further_file(place: Path, outside: Path) -> None:
    place.write_bytes(b"x")


FILE, FOLDER = "out.safetensors", "out"
TOUCHED = {
    "file is a symlink": (FILE, FILE, symlink),
    "file is a hard link": (FILE, FILE, hard_link),
    "file is a fifo": (FILE, FILE, fifo),
    "journal is a symlink": (FILE, ".ema-ckpt.journal", symlink),
    "journal is a hard link": (FILE, ".ema-ckpt.journal", hard_link),
    "journal is a fifo": (FILE, ".ema-ckpt.journal", fifo),
    "file is a folder": (FILE, FILE, other_kind),
    "folder is a file": (FOLDER, FOLDER, other_kind),
    "folder is a symlink": (FOLDER, FOLDER, linked_folder),
    "file in the folder is a symlink": (FOLDER, f"{FOLDER}/__0_0.distcp", symlink),
    "another file in the folder": (FOLDER, f"{FOLDER}/more.distcp", further_file),
    "another file": (FILE, "more", further_file),
}


@pytest.mark.parametrize("case", TOUCHED)
def test_a_touched_stage_is_begun_anew(tmp_path: Path, case: str) -> None:
    name, place, touch = TOUCHED[case]
    source, out, outside = tmp_path / "source", tmp_path / "o" / name, tmp_path / "outside"
    save_dcp(source, {"model": {"a": torch.randn(500, 1000), "z": torch.randn(900, 1000)}})
    out.parent.mkdir()
    outside.write_bytes(OUTSIDE)
    write = consolidate if name == FILE else reshard
    options = {} if name == FILE else {"world_size": 2}
    stage = killed_writer(lambda *a, **k: write(*a, **options, **k), source, out)
    touch(stage / place, outside)
    result = write(source, out, resume=True, **options)
    held = outside / "__0_0.distcp" if outside.is_dir() else outside
    assert held.read_bytes() == OUTSIDE
    assert verify(out).status == "sound"
    assert [w.code for w in result.warnings] == ["stale-file"]
    assert repr(place) in result.warnings[0].message
    assert [path.name for path in out.parent.iterdir()] == [name]
    assert out.is_file() or sorted(path.name for path in out.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "ema_ckpt.json",
    ]


def test_an_untouched_stage_is_continued(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / FILE
    save_dcp(source, {"model": {"a": torch.randn(500, 1000), "z": torch.randn(900, 1000)}})
    stage = killed_writer(consolidate, source, out)
    inode = (stage / FILE).stat().st_ino
    result = consolidate(source, out, resume=True)
    assert out.stat().st_ino == inode and not result.warnings
