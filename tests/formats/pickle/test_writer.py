"""Pickles written by hand, against Python's own reader and torch's safe one."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from ema_ckpt.core.catalog import Object
from ema_ckpt.formats.pickle.safe_globals import Opaque
from ema_ckpt.formats.pickle.writer import dumps, is_plain
from ema_ckpt.formats.torch_file.reader import open_torchfile
from ema_ckpt.formats.torch_file.writer import lay_out
from ema_ckpt.storage.files import LocalFiles
from tests.formats.writing import write

PLAIN = {
    "none": None, "flags": [True, False], "ints": [0, 255, 256, 65535, 65536, -1, -(2**31), 2**31, -(2**31) - 1, 2**300],
    "reals": [0.5, -0.0, float("inf"), 1e-320], "text": ["", "ü\n", "😀" * 100], "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
    "complex": 1 - 2j, "set": {1, "a"}, "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)], "dict": {1: {"a": ()}, (1, "b"): 2.5},
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_load_under_python_and_under_torch(tmp_path, name):
    value = PLAIN[name]
    assert repr(pickle.loads(dumps(value))) == repr(value)
    write(
        lay_out([], objects=[Object("v", ("v",), "", inline=value, is_inline=True)]),
        tmp_path / "m.pt",
        {},
    )
    assert repr(torch.load(tmp_path / "m.pt", weights_only=True)["v"]) == repr(value)
    (item,) = (
        [
            i
            for i in open_torchfile(LocalFiles(tmp_path), ("m.pt",), "", "").objects
            if i.name == "v"
        ]
        if name != "dict"
        else [None]
    )
    assert item is None or repr(item.inline) == repr(value)


def test_what_pickles_cannot_say_safely():
    endless: list = []
    endless.append(endless)
    for value in (
        endless,
        object(),
        frozenset([1]),
        2**3000,
        Opaque("m", "C", (), False),
        [np.float32(1)],
    ):
        assert not is_plain(value)
