"""Integers of thousands of digits, anywhere in a file: Python does not print them, nor torch count so far."""

from __future__ import annotations

import json
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError
from tests.checkpoints import save_dcp
from tests.stories.commands import Commands

HUGE = 10**5000


def with_huge_numbers(data: bytes) -> Iterator[bytes]:
    """The pickle with each of its integers in turn made huge, positive and negative."""
    opcodes = list(pickletools.genops(data))
    for (opcode, value, position), following in pairwise(opcodes):
        if isinstance(value, int) and opcode.name.startswith(("BININT", "LONG")):
            for number in (HUGE, -HUGE):
                raw = number.to_bytes(2100, "little", signed=True)
                long4 = b"\x8b" + struct.pack("<i", len(raw)) + raw
                yield data[:position] + long4 + data[following[2] :]


def ends_in_words(path: Path, out: Path) -> int:
    """Call what reads a checkpoint; every error must be one of ours. Returns how many there were."""
    calls: list[Callable[[], object]] = [
        lambda: ema_ckpt.inspect(path),
        lambda: ema_ckpt.verify(path),
        lambda: ema_ckpt.check(path),
        lambda: [checkpoint[name] for checkpoint in [ema_ckpt.open(path)] for name in checkpoint],
        lambda: ema_ckpt.diff(path),
        lambda: ema_ckpt.convert(path, out / "out.pt", overwrite=True),
        lambda: ema_ckpt.convert(path, out / "out.safetensors", overwrite=True),
    ]
    refused = 0
    for call in calls:
        try:
            call()
        except EmaCkptError as error:
            assert len(str(error)) < 2000
            refused += 1
    return refused


WEIGHTS = {"w": torch.arange(6.0).reshape(2, 3)}


def test_in_a_torch_file(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save({"model": WEIGHTS, "ema": WEIGHTS, "step": 300}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in records if name.endswith("data.pkl"))
    tried = refused = 0
    for data in with_huge_numbers(records[pickled]):
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in (records | {pickled: data}).items():
                archive.writestr(name, content)
        tried += 1
        refused += ends_in_words(path, tmp_path)
    assert tried > 10
    assert refused > 5 * tried, "all but those of the plain value"


def test_in_the_metadata_of_dcp(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "c", {"model": WEIGHTS})
    tried = refused = 0
    for data in with_huge_numbers((path / ".metadata").read_bytes()):
        (path / ".metadata").write_bytes(data)
        tried += 1
        refused += ends_in_words(path, tmp_path)
    assert tried > 10
    assert refused > tried


SETTINGS = [
    {"num_updates": HUGE},
    {"config": {"decay": HUGE, "every": HUGE}},
    {"config": {"schedule": {"kind": "warmup", "start": HUGE}}},
    {"config": {"schedule": {"kind": "window", "n": HUGE}, "counter": {"moved_at": HUGE}}},
    {"config": {"schedule": {"kind": {1, 2}, "bytes": b"x", "type": torch.float32}}},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_in_the_settings_of_an_average(settings: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    ema = {"weights": WEIGHTS, "num_updates": 5, **settings}
    torch.save({"model": WEIGHTS, "ema": ema}, path)
    assert ends_in_words(path, tmp_path) == 0
    commands = Commands(tmp_path / "marker")
    for verb in ("inspect", "diff"):
        plain, as_json = commands.run(verb, path), commands.run(verb, path, "--json")
        assert (plain.code, as_json.code) == (0, 0), plain.stderr + as_json.stderr
        json.loads(as_json.stdout)
    commands.close()


def test_a_huge_plain_value_is_kept_or_named_as_skipped(tmp_path: Path) -> None:
    """torch's own reader of plain values knows no opcode for it."""
    source = tmp_path / "c.pt"
    torch.save({"model": WEIGHTS, "seed": HUGE}, source)
    made = ema_ckpt.convert(source, tmp_path / "c.safetensors")
    with ema_ckpt.open(tmp_path / "c.safetensors") as checkpoint:
        assert checkpoint.objects["seed"] == HUGE
    assert not made.skipped
    made = ema_ckpt.convert(source, tmp_path / "d.pt")
    assert [one.name for one in made.skipped] == ["seed"]
