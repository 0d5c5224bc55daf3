"""Storages that a pickle names several times, against torch."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import ema_ckpt
from ema_ckpt.formats.pickle.tensors import load_tensor


class Storage:
    def __init__(self, kind: type, numel: int) -> None:
        self.id = ("storage", kind, "0", "cpu", numel)


class View:
    """What torch rebuilds from a storage, from element 0 on."""

    def __init__(self, storage: Storage, *dtype: torch.dtype) -> None:
        self.storage, self.dtype = storage, dtype

    def __reduce__(self):
        rebuild = torch._utils._rebuild_tensor_v3 if self.dtype else torch._utils._rebuild_tensor_v2
        return rebuild, (self.storage, 0, (4,), (1,), False, OrderedDict(), *self.dtype)


def write(path: Path, value: object) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, one: object) -> object:
            return one.id if isinstance(one, Storage) else None

    data = io.BytesIO()
    Pickler(data, 2).dump(value)
    write_archive(path, data.getvalue())


def write_archive(path: Path, data: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", bytes(range(16)))
        archive.writestr("archive/version", "3\n")


HALF = View(Storage(torch.HalfStorage, 8))
FLOAT = View(Storage(torch.FloatStorage, 4))
UINT16 = View(Storage(torch.UntypedStorage, 16), torch.uint16)


@pytest.mark.parametrize("first", [HALF, UINT16])
def test_a_storage_of_two_types_is_refused(tmp_path: Path, first: View) -> None:
    """torch gives every tensor the type that it meets first, whatever the others say."""
    path = tmp_path / "two.pt"
    write(path, {"a": first, "b": FLOAT})
    assert torch.load(path)["b"].dtype != torch.float32, "or there is nothing to guard against"
    with pytest.raises(ema_ckpt.SourceError, match="in one place and") as caught:
        ema_ckpt.open(path)
    assert caught.value.code == "unreadable"
    assert ema_ckpt.verify(path).status == "damaged"


def test_a_storage_of_one_type_is_read_as_torch_does(tmp_path: Path) -> None:
    path = tmp_path / "one.pt"
    write(path, {"a": FLOAT, "b": View(Storage(torch.FloatStorage, 4), torch.float16)})
    expected = torch.load(path)
    with ema_ckpt.open(path) as checkpoint:
        for name in ("a", "b"):
            assert checkpoint[name].dtype == expected[name].dtype
            assert checkpoint[name].equal(expected[name])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16], ids=str)
@pytest.mark.parametrize("is_view_first", [False, True])
def test_a_view_of_the_bytes_shares_the_storage(
    tmp_path: Path, dtype: torch.dtype, is_view_first: bool
) -> None:
    """torch types the storage as bytes for the view, and not at all for what it is a view of."""
    path = tmp_path / "view.pt"
    weights = torch.arange(16, dtype=torch.uint8).view(dtype)
    names = ("codes", "weights") if is_view_first else ("weights", "codes")
    value = {"weights": weights, "codes": weights.view(torch.uint8)}
    torch.save({name: value[name] for name in names}, path)
    expected = torch.load(path)
    assert ema_ckpt.verify(path).status == "sound"
    ema_ckpt.convert(path, tmp_path / "out.pt")
    copied = torch.load(tmp_path / "out.pt")
    for name in names:
        assert copied[name].dtype == expected[name].dtype
        assert copied[name].view(torch.uint8).equal(expected[name].view(torch.uint8))


def test_a_storage_of_two_types_before_zip_files(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    value = {"a": torch.zeros(4), "b": torch.zeros(2, dtype=torch.float64)}
    torch.save(value, path, _use_new_zipfile_serialization=False)
    raw = path.read_bytes()
    keys = [str(one.untyped_storage()._cdata).encode() for one in value.values()]
    assert all(key in raw for key in keys)
    path.write_bytes(raw.replace(keys[1], keys[0].ljust(len(keys[1]))[: len(keys[1])]))
    with pytest.raises(ema_ckpt.SourceError, match="in one place and"):
        ema_ckpt.open(path)


def test_a_storage_of_a_class_that_torch_has_not_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "foreign.pt"
    write(path, {"a": FLOAT})
    with zipfile.ZipFile(path) as archive:
        data = archive.read("archive/data.pkl")
    write_archive(path, data.replace(b"FloatStorage", b"ComplexHalfStorage"))
    with ema_ckpt.open(path) as checkpoint:
        with pytest.raises(ema_ckpt.SourceError) as caught:
            checkpoint["a"]
        with pytest.raises(ema_ckpt.SourceError):
            checkpoint.state_dict("")
    assert caught.value.code == "unsupported"


class Wrapped:
    """A tensor that consists of others, as torchao's do."""

    def __reduce__(self):
        kind = torch.masked.MaskedTensor
        args = (kind, torch.float32, (4,), (1,), 0, torch.strided, "cpu", False)
        build = torch._utils._rebuild_wrapper_subclass
        return torch._tensor._rebuild_from_type_v2, (build, kind, args, {})


def test_a_tensor_subclass_is_refused_by_its_name() -> None:
    with pytest.raises(ema_ckpt.SourceError, match=r"torch\.masked\.\S*MaskedTensor") as caught:
        load_tensor(pickle.dumps(Wrapped(), 2), "__0_0.distcp")
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize(
    ("enum", "code"),
    [
        ("torchao.quantization\nKernelPreference", "unsupported"),
        ("torchao.utils\nos.system", "unsafe-pickle"),
        ("another.package\nKernelPreference", "unsafe-pickle"),
        ("torch.hub\nload", "unsafe-pickle"),
    ],
)
def test_settings_of_a_weight_of_torchao_may_be_its_enums_and_nothing_else(enum, code):
    """Wrapped tensors are not read, but those of torchao hide no code to be warned of."""
    wrapper = "ctorch._utils\n_rebuild_wrapper_subclass\nctorchao.quantization\nFloat8Tensor\n"
    pickled = f"ctorch._tensor\n_rebuild_from_type_v2\n({wrapper}(c{enum}\n(Vauto\ntRt}}tR."
    with pytest.raises(ema_ckpt.SourceError) as caught:
        load_tensor(pickled.encode(), "__0_0.distcp")
    assert caught.value.code == code
