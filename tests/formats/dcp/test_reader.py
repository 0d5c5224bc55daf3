"""DCP metadata and items: shortcuts against the interpreter, writing against torch, every kind of refusal."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat

import ema_ckpt
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import EmaCkptError, SourceError, UnsafeError
from ema_ckpt.formats.dcp.metadata import parse
from ema_ckpt.formats.dcp.metadata_values import ItemPlace
from ema_ckpt.formats.dcp.metadata_writer import MetadataPickle, StoredItem, StoredTensor
from ema_ckpt.formats.dcp.reader import open_dcp, read_metadata, required_files
from ema_ckpt.storage.files import LocalFiles
from tests.checkpoints import dcp_at, save_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FIXTURES = Path(__file__).parents[3] / "fixtures"
METADATA = sorted(FIXTURES.glob("*/.metadata")) + sorted(FIXTURES.glob("*/*/.metadata"))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_any_protocol_and_pickler(tmp_path: Path, protocol: int) -> None:
    state = {
        "model": {"a.b": torch.randn(3, 4), "n": torch.tensor(3)},
        "step": 3,
        "l": [torch.ones(2), "x"],
    }
    dcp.save(state, checkpoint_id=tmp_path / "c")
    with (tmp_path / "c" / ".metadata").open("rb") as file:
        theirs = pickle.load(file)
    expected = parse((tmp_path / "c" / ".metadata").read_bytes(), "t")
    for pickler in (pickle.dumps, pickle._dumps):  # type: ignore[attr-defined]
        found = parse(pickler(theirs, protocol), "t")
        assert (found.entries, found.items, found.paths) == (
            expected.entries,
            expected.items,
            expected.paths,
        )


def test_entries_say_what_torch_says(tmp_path: Path) -> None:
    state = {"model": {"a.b": torch.randn(3, 4).bfloat16(), "n": torch.tensor(3)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path)
    theirs = dcp.FileSystemReader(tmp_path).read_metadata()
    ours = parse((tmp_path / ".metadata").read_bytes(), "t")
    assert ours.paths == theirs.planner_data
    for name, entry in theirs.state_dict_metadata.items():
        mine = ours.entries[name]
        if mine is None:
            assert type(entry).__name__ == "BytesStorageMetadata"
            continue
        assert mine.shape == tuple(entry.size)
        assert f"torch.{mine.dtype.name}" == str(entry.properties.dtype)
        assert mine.chunks == tuple((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks)
    places = {
        (i.fqn, None if i.offset is None else tuple(i.offset)): s
        for i, s in theirs.storage_data.items()
    }
    assert ours.items == {
        k: ItemPlace(s.relative_path, s.offset, s.length) for k, s in places.items()
    }


SHAPES = st.lists(st.integers(0, 3000), max_size=5).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)


@given(
    st.dictionaries(
        NAMES,
        st.tuples(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "bool"]), SHAPES),
        max_size=4,
    ),
    st.integers(0, 1 << 40),
)
def test_written_metadata_is_read_by_torch_and_by_us(
    tensors: dict[str, tuple[str, tuple[int, ...]]], big: int
) -> None:
    entries: dict[str, StoredTensor | None] = {
        n: StoredTensor(by_name(d), s) for n, (d, s) in tensors.items()
    }
    items = {
        n: tuple(
            StoredItem((k,) * len(s), s, f"__{k}_0.distcp", big + k, 7)
            for k in range(2 if s else 1)
        )
        for n, (_, s) in tensors.items()
    }
    entries["an object"] = None
    items["an object"] = (StoredItem(None, (), "__0_0.distcp", 0, 3),)
    paths = {n: ("tree", n, 5) for n in entries}
    raw = b"".join(MetadataPickle(entries, items, paths).pieces())
    ours = parse(raw, "t")
    theirs = pickle.loads(raw)
    assert theirs.planner_data == paths == ours.paths
    assert list(theirs.state_dict_metadata) == list(entries) == list(ours.entries)
    for name, (dtype, shape) in tensors.items():
        mine, entry = ours.entries[name], theirs.state_dict_metadata[name]
        assert mine is not None
        assert (mine.dtype.name, mine.shape) == (dtype, shape)
        assert (entry.properties.dtype, tuple(entry.size)) == (getattr(torch, dtype), shape)
        assert [tuple(c.offsets) for c in entry.chunks] == [i.offsets for i in items[name]]
    assert {
        (i.fqn, i.offset and tuple(i.offset)): (s.relative_path, s.offset, s.length)
        for i, s in theirs.storage_data.items()
    } == {
        (n, i.offsets or (None if i.offsets is None else torch.Size())): (
            i.file,
            i.offset,
            i.nbytes,
        )
        for n, many in items.items()
        for i in many
    }
    assert {k: (p.file, p.offset, p.nbytes) for k, p in ours.items.items()} == {
        (n, i.offsets): (i.file, i.offset, i.nbytes) for n, many in items.items() for i in many
    }


def save(folder: Path, **state: object) -> LocalFiles:
    dcp.save(state, checkpoint_id=folder)
    return LocalFiles(folder)


def test_strides_come_from_the_item(tmp_path: Path) -> None:
    values = torch.arange(24.0).reshape(2, 3, 4)
    images = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    source = save(
        tmp_path,
        t=values.permute(2, 0, 1),
        e=torch.arange(3.0).expand(5, 3),
        i=images,
        plain=values,
    )
    catalog = open_dcp(source, (".metadata",), "p", "p")
    strides = {t.name: catalog.reader.payloads(t)[0].strides for t in catalog.tensors}
    assert strides["plain"] is None
    assert strides["t"] == (1, 12, 4)
    assert strides["i"] == images.stride()
    source.close()


def test_only_named_files_belong_to_it(tmp_path: Path) -> None:
    source = save(tmp_path, w=torch.ones(3))
    shutil.copy(tmp_path / "__0_0.distcp", tmp_path / "__9_0.distcp")
    needed = required_files(read_metadata(source, (".metadata",)))
    assert list(needed) == ["__0_0.distcp"]
    assert needed["__0_0.distcp"] == source.size("__0_0.distcp")
    source.close()


def edited(folder: Path, change: object) -> LocalFiles:
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)  # type: ignore[operator]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    return LocalFiles(folder)


def replaced(metadata: object, **fields: object) -> None:
    for info in metadata.storage_data.values():  # type: ignore[attr-defined]
        for key, value in fields.items():
            object.__setattr__(info, key, value)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x.distcp", "a/../../x", "", "a\0b", "..", "a//b", "./x"]
)
def test_file_names_stay_in_the_directory(tmp_path: Path, name: str) -> None:
    save(tmp_path, w=torch.ones(3)).close()
    source = edited(tmp_path, lambda m: replaced(m, relative_path=name))
    if not name:
        catalog = open_dcp(source, (".metadata",), "p", "p")
        with pytest.raises(SourceError) as missing:
            catalog.reader.payloads(catalog.tensors[0])
        assert missing.value.code == "incomplete"
        return
    with pytest.raises(UnsafeError) as caught:
        open_dcp(source, (".metadata",), "p", "p")
    assert caught.value.code == "unsafe-path"


def test_extensions_and_other_serializations_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "z", w=torch.ones(3)).close()
    source = edited(tmp_path / "z", lambda m: replaced(m, transform_descriptors=["stream.zstd/1"]))
    catalog = open_dcp(source, (".metadata",), "p", "p")
    with pytest.raises(SourceError, match=r"stream\.zstd/1") as caught:
        catalog.reader.payloads(catalog.tensors[0])
    assert caught.value.code == "unsupported"
    source.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_another_serialization_is_unproven_whatever_it_holds(tmp_path: Path, threads: int) -> None:
    state = {"w": torch.ones(6), "scalar": torch.tensor(3.0), "byte": torch.ones(1).byte()}
    path = tmp_path / "run"
    writer = FileSystemWriter(
        path, serialization_format=SerializationFormat.SAFETENSORS, thread_count=threads
    )
    dcp.save({**state, "empty": torch.empty(0), "step": 3, "l": [1, (2, 3)]}, storage_writer=writer)
    found = ema_ckpt.verify(path)
    assert (found.status, found.problems) == ("unproven", ())
    for name in state:
        with pytest.raises(SourceError, match="SAFETENSORS") as caught:
            ema_ckpt.convert(path, tmp_path / "out.pt", match=[name])
        assert caught.value.code == "unsupported"


def test_a_compressed_checkpoint_is_unproven_whatever_it_holds(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    state = {"w": torch.ones(6), "empty": torch.empty(0, 3), "step": 3, "l": [1, (2, 3)]}
    for folder in (tmp_path / "run", tmp_path / "joined" / "model", tmp_path / "joined" / "ema"):
        dcp.save(state, storage_writer=FileSystemWriter(folder, _extensions=[ZStandard()]))
    for path in (tmp_path / "run", tmp_path / "joined"):
        found = ema_ckpt.verify(path)
        assert (found.status, found.problems) == ("unproven", ())
        assert {"step", "l", "w", "empty"} <= {
            name for name in state if any(repr(name)[1:-1] in w.message for w in found.warnings)
        }
        quick = ema_ckpt.verify(path, quick=True)
        assert quick.problems == ()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda m: m.state_dict_metadata.update(w="no entry"), "unreadable"),
        (lambda m: setattr(m, "storage_data", 3), "unreadable"),
        (
            lambda m: object.__setattr__(m.state_dict_metadata["w"], "size", torch.Size([1 << 62])),
            "out-of-bounds",
        ),
        (lambda m: object.__setattr__(m.state_dict_metadata["w"], "size", [3]), "unreadable"),
        (lambda m: m.planner_data.update(w=("w", 50_000_000)), "out-of-bounds"),
        (lambda m: replaced(m, offset=-5), "out-of-bounds"),
    ],
)
def test_impossible_metadata_is_refused(tmp_path: Path, change: object, code: str) -> None:
    save(tmp_path, w=torch.ones(3)).close()
    source = edited(tmp_path, change)
    with pytest.raises(EmaCkptError) as caught:
        open_dcp(source, (".metadata",), "p", "p")
    assert caught.value.code == code
    source.close()


def first_chunk(metadata: object, **fields: object) -> None:
    for key, value in fields.items():
        object.__setattr__(metadata.state_dict_metadata["model.layer.w"].chunks[0], key, value)  # type: ignore


MALFORMED: dict[str, Callable[[Any], object]] = {
    "a chunk that is no pair": lambda m: m.state_dict_metadata["model.layer.w"].chunks.__setitem__(
        0, ()
    ),
    "a chunk of three": lambda m: m.state_dict_metadata["model.layer.w"].chunks.__setitem__(
        0, ((0, 0), (2, 3), 1)
    ),
    "a chunk of numbers": lambda m: m.state_dict_metadata["model.layer.w"].chunks.__setitem__(
        0, (0, 3)
    ),
    "a chunk of texts": lambda m: m.state_dict_metadata["model.layer.w"].chunks.__setitem__(
        0, ("layer", "")
    ),
    "a chunk of a lower rank": lambda m: first_chunk(
        m, offsets=torch.Size([]), sizes=torch.Size([])
    ),
    "sizes of a lower rank": lambda m: first_chunk(m, sizes=torch.Size([2])),
    "sizes that are a number": lambda m: first_chunk(m, sizes=6),
    "sizes that are truths": lambda m: first_chunk(m, sizes=(True, 3)),
    "offsets that are a text": lambda m: first_chunk(m, offsets="00"),
    "negative sizes": lambda m: first_chunk(m, sizes=torch.Size([-2, 3])),
    "an empty path": lambda m: m.planner_data.update({"model.layer.w": ()}),
    "a path of None": lambda m: m.planner_data.update({"model.layer.w": (None,)}),
    "a storage key that is empty": lambda m: m.storage_data.update(
        {(): next(iter(m.storage_data.values()))}
    ),
    "a storage key of one": lambda m: m.storage_data.update(
        {("b",): next(iter(m.storage_data.values()))}
    ),
    "a storage key of numbers": lambda m: m.storage_data.update(
        {(1, 2): next(iter(m.storage_data.values()))}
    ),
    "a dtype that is no name": lambda m: object.__setattr__(
        m.state_dict_metadata["model.layer.w"].properties, "dtype", 3
    ),
    "a name that is no text": lambda m: m.state_dict_metadata.update(
        {3: m.state_dict_metadata["model.b"]}
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_malformed_metadata_is_damage_for_verify_and_an_error_for_all_else(
    tmp_path: Path, change: Callable[[Any], object]
) -> None:
    dcp_at(tmp_path / "step_1")
    edited(dcp_at(tmp_path / "step_2"), change).close()
    report = ema_ckpt.verify(tmp_path / "step_2")
    assert report.status == "damaged"
    assert {problem.code for problem in report.problems} <= {"unreadable", "out-of-bounds"}
    verbs: list[Callable[[], object]] = [
        lambda: ema_ckpt.inspect(tmp_path / "step_2"),
        lambda: ema_ckpt.diff(tmp_path / "step_2"),
        lambda: ema_ckpt.consolidate(tmp_path / "step_2", tmp_path / "out.safetensors"),
        lambda: ema_ckpt.reshard(tmp_path / "step_2", tmp_path / "out", 2),
    ]
    for verb in verbs:
        with pytest.raises(EmaCkptError) as caught:
            verb()
        assert caught.value.code in ("unreadable", "out-of-bounds")
    assert ema_ckpt.inspect(tmp_path).resolved == str(tmp_path / "step_1")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda m: replaced(m, offset=1 << 40), "truncated-file"),
        (lambda m: replaced(m, length=100), "bad-header"),
        (
            lambda m: object.__setattr__(
                m.state_dict_metadata["w"].properties, "dtype", torch.int32
            ),
            "index-mismatch",
        ),
        (
            lambda m: object.__setattr__(
                m.state_dict_metadata["w"].chunks[0], "sizes", torch.Size([2])
            ),
            "index-mismatch",
        ),
        (lambda m: replaced(m, relative_path="__7_0.distcp"), "missing-file"),
    ],
)
def test_items_that_are_not_what_the_metadata_says(
    tmp_path: Path, change: object, code: str
) -> None:
    save(tmp_path, w=torch.ones(3)).close()
    source = edited(tmp_path, change)
    catalog = open_dcp(source, (".metadata",), "p", "p")
    with pytest.raises(SourceError) as caught:
        catalog.reader.payloads(catalog.tensors[0])
    assert (caught.value.code, caught.value.tensor) == (code, "w")
    source.close()


def test_an_entry_at_the_name_of_another_is_refused(tmp_path: Path) -> None:
    """By name and by path the bytes of two tensors would be exchanged."""
    source = save_dcp(tmp_path / "c", {"model": {"v": torch.ones(2), "w": torch.zeros(2)}})
    metadata = FileSystemReader(source).read_metadata()
    paths = metadata.planner_data
    paths["model.v"], paths["model.w"] = paths["model.w"], paths["model.v"]
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(SourceError, match="where another entry is") as caught:
        ema_ckpt.consolidate(source, tmp_path / "out.safetensors")
    assert caught.value.code == "index-mismatch"
    found = ema_ckpt.verify(source)
    assert (found.status, {p.code for p in found.problems}) == ("damaged", {"index-mismatch"})


@pytest.mark.parametrize("columns_from", [0, 1 << 20])
@pytest.mark.parametrize("lost", ["entry", "chunk"])
def test_what_is_stored_and_no_entry_tells_of_is_not_left_out(
    lost: str, columns_from: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ema_ckpt.formats.dcp.metadata._COLUMNS_FROM_NBYTES", columns_from)
    source = save_dcp(tmp_path / "c", {"model": {"v": torch.ones(2), "w": torch.zeros(0, 2)}})
    metadata = FileSystemReader(source).read_metadata()
    entries = metadata.state_dict_metadata
    if lost == "entry":
        del entries["model.v"], metadata.planner_data["model.v"]
    else:
        entries["model.w"].chunks.clear()
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    assert ema_ckpt.verify(source).status == "damaged"
    for verb in (ema_ckpt.consolidate, ema_ckpt.convert):
        with pytest.raises(SourceError, match="storage_data has a place") as caught:
            verb(source, tmp_path / "out.pt")
        assert caught.value.code == "index-mismatch"


def test_a_name_and_its_path_that_differ_by_a_bit_are_refused_by_every_verb(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "c", {"model": {"v": torch.ones(2), "w": torch.zeros(2)}})
    data = (source / ".metadata").read_bytes()
    (source / ".metadata").write_bytes(data.replace(b"model.w", b"modem.w", 1))
    found = ema_ckpt.verify(source)
    assert (found.status, [p.code for p in found.problems]) == ("damaged", ["index-mismatch"])
    for verb in (ema_ckpt.consolidate, ema_ckpt.convert):
        with pytest.raises(SourceError, match="planner_data places") as caught:
            verb(source, tmp_path / "out.pt")
        assert caught.value.code == "index-mismatch"


def test_names_that_do_not_come_from_paths_lose_no_tensor(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "c", {"a": torch.ones(2), "b": torch.zeros(2)})
    metadata = FileSystemReader(source).read_metadata()
    metadata.planner_data = {"a": ("model", "v"), "b": ("model", "w")}
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    (tree,) = ema_ckpt.inspect(source).trees
    assert (tree.name, tree.tensors) == ("model", 2)
    ema_ckpt.consolidate(source, tmp_path / "out.safetensors")
    written = load_file(tmp_path / "out.safetensors")
    assert {name: value.tolist() for name, value in written.items()} == {"v": [1, 1], "w": [0, 0]}


def test_two_names_in_a_tree_that_are_one_are_refused(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "c", {"a": torch.ones(2), "b": torch.zeros(2)})
    metadata = FileSystemReader(source).read_metadata()
    metadata.planner_data = {"a": ("model", "x.y"), "b": ("model", "x", "y")}
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(SourceError) as caught:
        ema_ckpt.consolidate(source, tmp_path / "out.safetensors")
    assert caught.value.code == "name-collision"


@pytest.mark.parametrize("count", [4, 6_000])
def test_a_name_that_is_given_twice_is_damage(tmp_path: Path, count: int) -> None:
    """A name is pickled once, so that one bit changes it in every table."""
    dcp.save({f"layers.{i}.w": torch.zeros(1) for i in range(count)}, checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    data = bytearray(path.read_bytes())
    data[data.index(b"layers.0.w") + len("layers.")] ^= 1
    path.write_bytes(data)
    found = ema_ckpt.verify(tmp_path, quick=True)
    assert [problem.code for problem in found.problems] == ["unreadable"]
    with pytest.raises(SourceError, match="one key twice"):
        ema_ckpt.consolidate(tmp_path, tmp_path / "out.safetensors")


def test_one_bit_in_a_name_of_our_own_is_damage(tmp_path: Path) -> None:
    """The record beside it is of other bytes then, and still has the name."""
    ema_ckpt.save(tmp_path / "c", model=torch.nn.ModuleDict({"down": torch.nn.Linear(2, 2)}))
    path = tmp_path / "c" / ".metadata"
    data = bytearray(path.read_bytes())
    data[data.index(b"model.down.bias") + len("model.")] ^= 32  # Down
    path.write_bytes(data)
    found = ema_ckpt.verify(tmp_path / "c")
    assert [(p.code, p.tensor) for p in found.problems][:1] == [
        ("index-mismatch", "model.Down.bias")
    ]
    with pytest.raises(SourceError, match=r"Down\.bias"):
        ema_ckpt.consolidate(tmp_path / "c", tmp_path / "out.safetensors")
