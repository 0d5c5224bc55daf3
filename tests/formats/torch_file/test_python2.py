"""Torch files that Python 2 wrote, as many published weights were: its text is bytes in the pickle."""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ema_ckpt


class PicklerOfPython2(pickle._Pickler):
    """Writes `str` as Python 2 does: SHORT_BINSTRING, or BINSTRING from 256 bytes on."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_text(self, text: str) -> None:
        data = text.encode()
        short = len(data) < 256
        self.write(b"U%c" % len(data) if short else b"T" + struct.pack("<i", len(data)))
        self.write(data)
        self.memoize(text)

    def save_bytes(self, data: bytes) -> None:
        self.write(b"U%c" % len(data) + data)
        self.memoize(data)

    dispatch[str] = save_text
    dispatch[bytes] = save_bytes


class Python2:
    """A stand-in for `pickle` that `torch.save` takes."""

    Pickler = PicklerOfPython2

    @staticmethod
    def dump(value: object, file: Any, protocol: int) -> None:
        PicklerOfPython2(file, protocol).dump(value)


def saved(path: Path, value: object) -> Path:
    torch.save(value, path, pickle_module=Python2, _use_new_zipfile_serialization=False)
    assert b"U\x07storage" in path.read_bytes()
    return path


def test_a_file_of_python_2_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = {"epoch": 3, "arch": "resnet18", "state_dict": model.state_dict(), "é" * 300: "é" * 300}
    path = saved(tmp_path / "old.pth", state)
    assert ema_ckpt.verify(path).status == "unproven"  # the form has no checksums
    assert not ema_ckpt.inspect(path).warnings
    for target in ("new.pt", "dcp"):
        assert not ema_ckpt.convert(path, tmp_path / target).skipped
    ema_ckpt.convert(tmp_path / "dcp", tmp_path / "back.pt")
    expected = torch.load(path, weights_only=False)  # it refuses long texts else
    for name in ("new.pt", "back.pt"):
        found = torch.load(tmp_path / name)
        weights = found.pop("state_dict")
        assert found == {key: value for key, value in expected.items() if key != "state_dict"}
        assert weights.keys() == expected["state_dict"].keys()
        assert all(torch.equal(weights[key], one) for key, one in expected["state_dict"].items())


def test_what_is_no_text_stays_bytes(tmp_path: Path) -> None:
    path = saved(tmp_path / "old.pth", OrderedDict(w=torch.ones(2), data=b"\xff\xfe"))
    ema_ckpt.convert(path, tmp_path / "new.pt")
    assert torch.load(tmp_path / "new.pt")["data"] == b"\xff\xfe"


@pytest.mark.parametrize("number", [1.5, 2.0])
def test_numbers_of_numpy_are_read_whether_their_bytes_are_text_or_not(
    tmp_path: Path, number: float
) -> None:
    path = saved(tmp_path / "old.pth", {"w": torch.ones(2), "best": np.float64(number)})
    with ema_ckpt.open(path) as checkpoint:
        assert checkpoint.objects["best"] == number


@pytest.mark.parametrize("value", [b"\xff\xfe", b"ab", bytearray(b"xy")])
def test_bytes_of_a_newer_protocol_in_the_old_form_are_kept(tmp_path: Path, value: object) -> None:
    path, options = tmp_path / "old.pth", {"_use_new_zipfile_serialization": False}
    torch.save({"w": torch.ones(2), "data": value}, path, pickle_protocol=5, **options)
    for target in ("new.pt", "dcp", "out.safetensors"):
        assert not ema_ckpt.convert(path, tmp_path / target).skipped
    for source in ("dcp", "out.safetensors"):
        ema_ckpt.convert(tmp_path / source, tmp_path / f"{source}.pt")
    for name in ("new.pt", "dcp.pt", "out.safetensors.pt"):
        assert torch.load(tmp_path / name)["data"] == value
