"""`.metadata` of planners that keep more than torch does."""

from __future__ import annotations

import enum
import io
import pickle
import re
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, SavePlan, WriteItem, WriteItemType

import ema_ckpt
from ema_ckpt import EmaCkptError
from tests.checkpoints import save_dcp


def rewritten(path: Path, change: Any) -> Path:
    save_dcp(path, {"model": {"w": torch.arange(6.0)}})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (path / ".metadata").write_bytes(pickle.dumps(change(metadata)))
    return path


def with_plans(metadata: Any) -> Any:
    # megatron-core 0.12 (`FileSystemWriterAsync`) keeps the plans of all ranks.
    items = [
        WriteItem(MetadataIndex("a"), WriteItemType.BYTE_IO),
        WriteItem(MetadataIndex("w", torch.Size([0]), 0), WriteItemType.SHARD),
    ]
    metadata.all_local_plans = [SavePlan(items, storage_data={"a": 1}, planner_data={"w": ("w",)})]
    metadata.kinds = [LoadItemType.TENSOR, BytesStorageMetadata()]
    return metadata


def derived(metadata: Any, name: str) -> Any:
    """Make the root an instance of a class that no reader here can import."""
    module = types.ModuleType("megatron_like")
    sys.modules[module.__name__] = module

    @dataclass
    class Derived(Metadata):
        mcore_data: dict[str, Any] = field(default_factory=dict)

    Derived.__module__, Derived.__qualname__ = module.__name__, name
    setattr(module, name, Derived)
    return Derived(**vars(metadata), mcore_data={"w": {"shape": torch.Size([6])}})


def with_places(metadata: Any, **more: Any) -> Any:
    """Places of a class of another package, with torch's fields, as OLMo-core writes (3.0)."""
    module = types.ModuleType("olmo_like")
    sys.modules[module.__name__] = module

    @dataclass
    class Place:
        relative_path: str
        offset: int
        length: int

    Place.__module__, Place.__qualname__ = module.__name__, "_StorageInfo"
    module._StorageInfo = Place
    for key, place in metadata.storage_data.items():
        fields = {
            "relative_path": place.relative_path,
            "offset": place.offset,
            "length": place.length,
        }
        metadata.storage_data[key] = Place(**{**fields, **more})
    return metadata


CHANGES = {
    "places of another class": with_places,
    "a derived class with places of another": lambda metadata: with_places(derived(metadata, "M")),
    "the ranks' plans": with_plans,
    "a derived class": lambda metadata: derived(metadata, "MCoreMetadata"),
    "another derived class with plans": lambda metadata: with_plans(derived(metadata, "Mine")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_planning_classes_and_derived_roots_are_read(name: str, tmp_path: Path) -> None:
    path = rewritten(tmp_path / "c", CHANGES[name])
    sys.modules.pop("megatron_like", None)
    assert ema_ckpt.verify(path).status == "sound"
    ema_ckpt.consolidate(path, tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["w"].tolist() == [0, 1, 2, 3, 4, 5]


class Calls:
    def __reduce__(self) -> Any:
        return (print, ("called",))


def test_a_call_among_the_plans_is_still_unsafe(tmp_path: Path) -> None:
    def change(metadata: Any) -> Any:
        metadata.all_local_plans = [SavePlan([Calls()])]
        return metadata

    path = rewritten(tmp_path / "c", change)
    with pytest.raises(EmaCkptError) as caught:
        ema_ckpt.inspect(path)
    assert caught.value.code == "unsafe-pickle"


def test_an_instance_without_the_fields_is_no_metadata(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "c", lambda metadata: SavePlan([]))
    with pytest.raises(EmaCkptError, match="no DCP metadata"):
        ema_ckpt.inspect(path)


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"length": "all"}, "unreadable"),
        ({"offset": -1}, "out-of-bounds"),
        ({"relative_path": "../x"}, "unsafe-path"),
    ],
)
def test_places_of_another_class_are_checked_as_torchs_are(
    tmp_path: Path, more: dict[str, Any], code: str
) -> None:
    path = rewritten(tmp_path / "run", lambda metadata: with_places(metadata, **more))
    with pytest.raises(EmaCkptError) as caught:
        ema_ckpt.consolidate(path, tmp_path / "out.pt")
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("written", "damaged"),
    [
        (b"_StorageInfo", b"_StorageInfn"),
        (b"checkpoint.filesystem", b"checkpoint.filesysteM"),
        (b"torch.distributed.checkpoint.filesystem", b"torbh.distributed.checkpoint.filesystem"),
        (b"TensorStorageMetadata", b"DensorStorageMetadata"),
        (b"StorageMeta", b"StorageMetq"),
        (b"\x08Metadata", b"\x08MetaDat`"),
        (b"torch.strided", b"torch.stridee"),
        (b"_MEM_FORMAT_ENCODING\x94\x93\x94K\x00", b"_MEM_FORMAT_ENCODING\x94\x93\x94K\x04"),
        (b"\x80\x04\x95", b"\x80\x04\x95\xff\xff\xff"),
    ],
)
def test_what_torch_cannot_read_is_damaged(tmp_path: Path, written: bytes, damaged: bytes) -> None:
    path = save_dcp(tmp_path / "run", {"model": {"w": torch.arange(6.0)}, "step": 3})
    data = (path / ".metadata").read_bytes()
    assert written in data
    data = data.replace(written, damaged)
    with pytest.raises(
        (pickle.UnpicklingError, ImportError, AttributeError, LookupError, ValueError)
    ):
        pickle.loads(data)
    (path / ".metadata").write_bytes(data)
    assert ema_ckpt.verify(path).status == "damaged"
    with pytest.raises(EmaCkptError) as caught:
        ema_ckpt.consolidate(path, tmp_path / "out.pt")
    assert caught.value.code == "unreadable"


@pytest.mark.parametrize("count", [2, 6000])
def test_a_memory_format_that_is_none_is_damaged(tmp_path: Path, count: int) -> None:
    """Of a later tensor, whose properties are references; with many tensors they are columns."""
    state = {f"layers.{number}.w": torch.arange(6.0) for number in range(count)}
    path = save_dcp(tmp_path / "run", {"model": state})
    data = (path / ".metadata").read_bytes()
    found = [*re.finditer(rb"h(.)\x89t\x94b", data, re.DOTALL)][-1]
    data = data[: found.start(1)] + b"\x00" + data[found.end(1) :]
    with pytest.raises(RuntimeError):
        pickle.loads(data)
    (path / ".metadata").write_bytes(data)
    assert ema_ckpt.verify(path).status == "damaged"


def test_a_field_whose_name_is_no_text_is_damaged(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "run", lambda metadata: metadata)
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data.replace(b"\x8c\x05index\x94", b"K\x05\x94", 1))
    assert ema_ckpt.verify(path).status == "damaged"


def test_a_bit_in_the_name_of_a_tree_is_damaged(tmp_path: Path) -> None:
    """A pickle holds it once, so the paths of all tensors of the tree have the same wrong letter."""
    tensors = {"embed": torch.ones(2), "head": torch.ones(3)}
    path = save_dcp(tmp_path / "run", {"model": tensors, "ema": tensors})
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data.replace(b"\x05model", b"\x05modem"))
    found = ema_ckpt.verify(path)
    assert found.status == "damaged"
    assert {problem.tensor for problem in found.problems} == {"model.embed", "model.head"}
    with pytest.raises(EmaCkptError, match="planner_data places") as caught:
        ema_ckpt.consolidate(path, tmp_path / "out.pt", tree="modem")
    assert caught.value.code == "index-mismatch"


def test_a_bit_in_the_name_of_the_paths_is_damaged(tmp_path: Path) -> None:
    """Nothing would tell then where the name of a tree ends."""
    path = save_dcp(tmp_path / "run", {"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}})
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data.replace(b"planner_data", b"planner_dada"))
    assert ema_ckpt.verify(path).status == "damaged"


class PicklerOfPython3112(pickle.Pickler):
    """Pickles the members of an enum by name, as Python 3.11.2 of Debian 12 does."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def pickled_by_name(path: Path) -> None:
    buffer = io.BytesIO()
    PicklerOfPython3112(buffer, 4).dump(pickle.loads((path / ".metadata").read_bytes()))
    (path / ".metadata").write_bytes(buffer.getvalue())


@pytest.mark.parametrize("count", [2, 6000])
def test_memory_formats_that_are_pickled_by_name_are_read(tmp_path: Path, count: int) -> None:
    state = {f"layers.{number}.w": torch.full((6,), number) for number in range(count)}
    path = save_dcp(tmp_path / "run", {"model": state})
    pickled_by_name(path)
    assert b"getattr" in (path / ".metadata").read_bytes()
    assert ema_ckpt.verify(path).status == "sound"
    ema_ckpt.consolidate(path, tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt")["layers.1.w"], state["layers.1.w"])


def test_plans_that_are_pickled_by_name_are_read(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "run", with_plans)
    pickled_by_name(path)
    assert ema_ckpt.verify(path).status == "sound"


@pytest.mark.parametrize(
    ("written", "damaged"),
    [
        (b"TORCH_CONTIGUOUS_FORMAT", b"TORCH_CONTIGUOUS_FORMAU"),
        (b"getattr", b"setattr"),
        (b"getattr", b"hasattr"),
    ],
)
def test_names_of_memory_formats_that_torch_lacks_are_damaged(
    tmp_path: Path, written: bytes, damaged: bytes
) -> None:
    path = save_dcp(tmp_path / "run", {"model": {"w": torch.arange(6.0)}})
    pickled_by_name(path)
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data.replace(written, damaged))
    assert ema_ckpt.verify(path).status == "damaged"


def test_an_enum_in_an_object_is_opaque_however_it_is_pickled(tmp_path: Path) -> None:
    class ByName(enum.Enum):
        A = 0

        def __reduce_ex__(self, _protocol: Any) -> Any:
            return getattr, (enum.Enum, "A")

    path = save_dcp(tmp_path / "run", {"model": {"w": torch.ones(2)}, "kind": ByName.A})
    assert ema_ckpt.verify(path).status == "sound"
    with ema_ckpt.open(path) as checkpoint:
        assert repr(checkpoint.objects["kind"]) == "<global enum.Enum.A>"


def test_what_lies_in_a_class_is_not_called(tmp_path: Path) -> None:
    class Calls:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "marker",)

    path = save_dcp(tmp_path / "run", {"model": {"w": torch.ones(2)}, "kind": Calls()})
    assert b"getattr" in (path / "__0_0.distcp").read_bytes()
    found = ema_ckpt.verify(path)
    assert [problem.code for problem in found.problems] == ["unsafe-pickle"]
    assert not (tmp_path / "marker").exists()
