"""Torch files of the form before 1.6, and bare pickles, against torch, NumPy and pickle themselves."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import ema_ckpt
from ema_ckpt.core.errors import SourceError, UnsafeError

BASE = torch.arange(24.0).reshape(4, 6)
TENSORS = {
    "whole": BASE,
    "rows": BASE[1:3],
    "transposed": BASE.t(),
    "bf16": torch.arange(3, dtype=torch.bfloat16),
    "fp8": torch.ones(4).to(torch.float8_e4m3fn),
    "ints": torch.arange(5),
    "empty": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}
ARRAYS = {
    "f4": np.arange(6, dtype="f4").reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "f2": np.ones(3, "f2"),
    "ints": np.arange(4),
    "flags": np.array([True, False]),
    "scalar": np.array(2.5),
    "none": np.empty((0, 2)),
}


def assert_holds(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with ema_ckpt.open(path) as ckpt:
        for name, tensor in tensors.items():
            found = ckpt[name]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(found.float(), tensor.detach().float()), name


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_form_before_torch_1_6(tmp_path: Path, protocol: int) -> None:
    options = {"_use_new_zipfile_serialization": False, "pickle_protocol": protocol}
    tree = {"model": TENSORS, "step": 7, "note": {"lr": np.float32(0.5)}}
    torch.save(tree, tmp_path / "old.pt", **options)
    assert_holds(tmp_path / "old.pt", {f"model.{name}": t for name, t in TENSORS.items()})
    assert (found := ema_ckpt.verify(tmp_path / "old.pt")).status == "unproven"
    assert not found.problems
    ema_ckpt.convert(tmp_path / "old.pt", tmp_path / "new.pt")
    loaded = torch.load(tmp_path / "new.pt", weights_only=True)
    assert (loaded["step"], loaded["note"]) == (7, {"lr": 0.5})
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded["model"][name].float(), tensor.detach().float()), name


def test_pickles_longer_than_the_first_look(tmp_path: Path) -> None:
    tree = {"w": torch.ones(2), "text": "x" * (3 << 20)}
    torch.save(tree, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert_holds(tmp_path / "old.pt", {"w": torch.ones(2)})


def test_old_files_as_the_first_torch_wrote_them(tmp_path: Path) -> None:
    """`_rebuild_tensor` of four arguments, and facts of a big-endian machine."""
    for little_endian in (True, False):
        out = io.BytesIO()
        for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": little_endian}):
            pickle.dump(value, out, protocol=2)
        tensor = b"ctorch._utils\n_rebuild_tensor\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
        tensor += b"X\x01\0\0\x000X\x03\0\0\0cpuK\x02NtQK\0K\x02\x85K\x01\x85tR"
        out.write(b"\x80\x02}X\x01\0\0\0w" + tensor + b"s.")
        pickle.dump(["0"], out, protocol=2)
        out.write((2).to_bytes(8, "little") + np.array([1, 2], "f4").tobytes())
        (tmp_path / "old.pt").write_bytes(out.getvalue())
        if little_endian:
            loaded = torch.load(tmp_path / "old.pt", weights_only=False)
            assert_holds(tmp_path / "old.pt", {"w": loaded["w"]})
    assert [w.code for w in ema_ckpt.inspect(tmp_path / "old.pt").warnings] == ["unsupported"]
    with pytest.raises(SourceError, match=r"'w'.*big-endian"):
        ema_ckpt.consolidate(tmp_path / "old.pt", tmp_path / "out.pt")


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_bare_pickles_of_arrays(tmp_path: Path, protocol: int) -> None:
    tree = {"model": {**ARRAYS, "bf16": np.ones(3, ml_dtypes.bfloat16)}, "step": np.int64(3)}
    (tmp_path / "arrays.pt").write_bytes(pickle.dumps(tree, protocol=protocol))
    expected = {f"model.{name}": torch.from_numpy(np.array(a)) for name, a in ARRAYS.items()}
    assert_holds(tmp_path / "arrays.pt", {**expected, "model.bf16": torch.ones(3).bfloat16()})


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_bare_pickles_of_tensors(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "tensors.pt").write_bytes(pickle.dumps({"model": TENSORS}, protocol=protocol))
    assert_holds(tmp_path / "tensors.pt", {f"model.{name}": t for name, t in TENSORS.items()})


ODD: dict[str, Callable[[], np.ndarray]] = {
    "big-endian": lambda: np.array([1, 2], ">i4"),
    "'O8'": lambda: np.array([{}]),
    "'U3'": lambda: np.array(["abc"]),
    "'M8'": lambda: np.array(["2020-01-01"], "M8[s]"),
}


@pytest.mark.parametrize("kind", ODD)
def test_arrays_of_other_things_are_refused_where_they_are_needed(
    tmp_path: Path, kind: str
) -> None:
    source = tmp_path / "arrays.pt"
    source.write_bytes(pickle.dumps({"w": ARRAYS["f4"], "odd": ODD[kind]()}, protocol=4))
    (warning,) = ema_ckpt.inspect(source).warnings
    assert warning.code == "unsupported" and "'odd'" in warning.message and kind in warning.message
    with pytest.raises(SourceError, match="'odd'"):
        ema_ckpt.consolidate(source, tmp_path / "out.pt")
    ema_ckpt.consolidate(source, tmp_path / "out.pt", exclude=["odd"])


def test_bytes_that_a_pickle_has_as_text_are_refused_with_the_remedy(tmp_path: Path) -> None:
    source = tmp_path / "arrays.pt"
    source.write_bytes(pickle.dumps({"w": ARRAYS["f4"]}, protocol=2))
    assert [w.code for w in ema_ckpt.inspect(source).warnings] == ["unsupported"]
    with pytest.raises(SourceError, match="pickle it again with protocol 4"):
        ema_ckpt.consolidate(source, tmp_path / "out.pt")
    source.write_bytes(pickle.dumps({"w": torch.ones(2)}, protocol=2))
    with pytest.raises(SourceError, match="pickle it again with protocol 4"):
        ema_ckpt.inspect(source)


class Hostile:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("form", ["legacy", "bare", "nested"])
def test_nothing_in_them_runs(tmp_path: Path, form: str) -> None:
    marker = tmp_path / "marker"
    tree: object = {"w": torch.ones(2), "args": Hostile(marker)}
    if form == "nested":  # a file of torch inside a pickle, as a storage is
        inner = io.BytesIO()
        torch.save(Hostile(marker), inner, _use_new_zipfile_serialization=False)

        class Storage:
            def __reduce__(self) -> tuple[object, ...]:
                return torch.storage._load_from_bytes, (inner.getvalue(),)

        tree = {"w": torch.ones(2), "s": Storage()}
    if form == "legacy":
        torch.save(tree, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    else:
        (tmp_path / "x.pt").write_bytes(pickle.dumps(tree, protocol=4))
    with pytest.raises((UnsafeError, SourceError)):
        ema_ckpt.consolidate(tmp_path / "x.pt", tmp_path / "out.pt")
    ema_ckpt_status = ema_ckpt.verify(tmp_path / "x.pt").status if form != "nested" else "damaged"
    assert ema_ckpt_status == "damaged"
    assert not marker.exists()


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["legacy", "tensors", "arrays"])
def test_random_damage_gives_an_error_or_a_catalog(tmp_path: Path, form: str) -> None:
    path = tmp_path / "x.pt"
    if form == "legacy":
        torch.save(TENSORS, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps(TENSORS if form == "tensors" else ARRAYS, protocol=4))
    data, chance = path.read_bytes(), random.Random(0)
    for _ in range(300):
        image = bytearray(data[: chance.randrange(len(data))] if chance.random() < 0.3 else data)
        for _ in range(chance.randrange(4)):
            image[chance.randrange(len(image) or 1) : 1] = bytes([chance.randrange(256)])
        path.write_bytes(image)
        try:
            ema_ckpt.inspect(path)
            ema_ckpt.verify(path)
        except ema_ckpt.EmaCkptError as error:
            assert error.code != "internal"


def test_a_last_storage_that_is_cut_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"a": BASE, "b": BASE[0].clone()}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(RuntimeError):
        torch.load(path)
    found = ema_ckpt.verify(path)
    assert (found.status, found.problems[0].code) == ("damaged", "truncated-file")


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("form", ["zip", "before 1.6"])
def test_only_what_selects_a_quantised_tensor_refuses(tmp_path: Path, form: str) -> None:
    path = tmp_path / "in.pt"
    codes = torch.arange(20, dtype=torch.uint8).reshape(4, 5)
    tensors = {
        "first": BASE,
        "byte": torch._make_per_tensor_quantized_tensor(codes, 0.1, 0),
        "int": torch._make_per_tensor_quantized_tensor(codes.int(), 0.1, 0),
        "nibble": torch._empty_affine_quantized(
            (3, 5), scale=1.0, zero_point=0, dtype=torch.quint4x2
        ),
        "last": BASE[1:3],
    }
    torch.save(tensors, path, _use_new_zipfile_serialization=form == "zip")
    found = {one.name: (one.dtype, one.shape) for one in ema_ckpt.inspect(path).tensors}
    assert (found["byte"], found["nibble"]) == (("quint8", (4, 5)), ("quint4x2", (3, 5)))
    assert ema_ckpt.verify(path).status == "unproven"
    with pytest.raises(SourceError) as caught:
        ema_ckpt.convert(path, tmp_path / "out.pt")
    assert (caught.value.code, caught.value.tensor) == ("unsupported", "byte")
    ema_ckpt.convert(path, tmp_path / "out.pt", exclude=["byte", "int", "nibble"])
    assert_holds(tmp_path / "out.pt", {"first": BASE, "last": BASE[1:3]})


@pytest.mark.parametrize("names", [["old.pt"], ["old_rank_0.pt", "old_rank_1.pt"]])
def test_plain_values_have_no_checksum_in_it(tmp_path: Path, names: list[str]) -> None:
    """Nor have tensors that became values of an unknown class, by one bit of their function."""
    for name in names:
        path = tmp_path / name
        torch.save({"w": BASE, "step": 7}, path, _use_new_zipfile_serialization=False)
        data = path.read_bytes()
        path.write_bytes(data.replace(b"_rebuild_tensor_v2", b"_recuild_tensor_v2"))
    found = ema_ckpt.verify(tmp_path)
    assert (found.status, found.problems) == ("unproven", ())
    torch.save({"step": 7}, tmp_path / names[0], _use_new_zipfile_serialization=False)
    assert ema_ckpt.verify(tmp_path).status == "unproven"


class Net(torch.nn.Module):
    """A module of its own, whose source the form before 1.6 keeps beside its class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())


def test_a_whole_module_in_the_form_before_1_6_is_opaque(tmp_path: Path) -> None:
    net = Net()
    state = {"model": net, "ema": net.state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert b"module" in (tmp_path / "old.pt").read_bytes()
    assert ema_ckpt.verify(tmp_path / "old.pt").status == "unproven"
    (warning,) = ema_ckpt.inspect(tmp_path / "old.pt").warnings
    assert (warning.code, "'model'" in warning.message) == ("opaque", True)
    ema_ckpt.consolidate(tmp_path / "old.pt", tmp_path / "ema.pt")
    found = torch.load(tmp_path / "ema.pt")
    assert all(torch.equal(found[name], tensor) for name, tensor in net.state_dict().items())
