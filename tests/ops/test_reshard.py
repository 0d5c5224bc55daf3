"""`reshard` and `convert`: identities, what is left out and said, and what is refused before anything is written."""

from __future__ import annotations

import argparse
import os
import shutil
import warnings
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

import ema_ckpt
from ema_ckpt.core import box
from ema_ckpt.core.box import Box
from ema_ckpt.formats.dcp import writer
from ema_ckpt.ops.results.write import FileEntry
from tests.checkpoints import dcp_at, ema, save_dcp, save_replicas, weights
from tests.formats.writing import raw_bytes

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint16, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def bytes_of(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype, bytes]]:
    """Shape, dtype and row-major bytes of every tensor, by full name."""
    with ema_ckpt.open(path) as ckpt:
        names = ckpt.keys()
        return {
            name: (tuple(ckpt[name].shape), ckpt[name].dtype, raw_bytes(ckpt[name]))
            for name in names
        }


def flat(tree: object, head: str = "") -> dict[str, torch.Tensor]:
    """Tensors of nested dictionaries by dotted name."""
    if isinstance(tree, torch.Tensor):
        return {head: tree}
    items = tree.items() if isinstance(tree, dict) else ()
    return {
        k: v
        for key, value in items
        for k, v in flat(value, f"{head}.{key}" if head else str(key)).items()
    }


def facts(tree: object) -> dict[str, tuple[tuple[int, ...], torch.dtype, bytes]]:
    return {name: (tuple(t.shape), t.dtype, raw_bytes(t)) for name, t in flat(tree).items()}


# Round trips.


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    numel = torch.Size(shape).numel()
    seed = draw(st.integers(0, 1 << 16))
    data = torch.randint(
        0,
        2 if dtype == torch.bool else 256,
        (numel * 16,),
        generator=torch.Generator().manual_seed(seed),
    )
    tensor = data.to(torch.uint8)[: numel * dtype.itemsize].view(dtype).reshape(shape)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)  # stored as it lies
    return tensor


NAMES = st.sampled_from(["w", "b", "layer.0.w", "layer.1.w", "norm.gain", "x/y", "é"])
TREES = st.fixed_dictionaries(
    {"model": st.dictionaries(NAMES, tensors(), max_size=4)},
    optional={"ema": st.dictionaries(NAMES, tensors(), min_size=1, max_size=3)},
)


@pytest.mark.thorough
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(TREES, st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans())
def test_any_chain_of_world_sizes_and_formats_is_the_identity(
    tree: dict, worlds: list[int], by_ranks: bool
) -> None:
    expected = facts(tree)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        at = save_replicas(root / "start", tree, 2) if by_ranks else save_dcp(root / "start", tree)
        for step, world in enumerate(worlds):
            ema_ckpt.reshard(at, root / str(step), world, no_fsync=True)
            at = root / str(step)
            assert bytes_of(at) == expected
        ema_ckpt.convert(at, root / "a.safetensors", no_fsync=True)
        ema_ckpt.convert(
            root / "a.safetensors", root / "b", to="dcp", world_size=worlds[0], no_fsync=True
        )
        ema_ckpt.convert(root / "b", root / "c.pt", no_fsync=True)
        assert bytes_of(root / "a.safetensors") == expected
        assert bytes_of(root / "b") == expected
        assert facts(torch.load(root / "c.pt", weights_only=True)) == expected
        for path in (at, root / "a.safetensors", root / "b", root / "c.pt"):
            assert ema_ckpt.verify(path).status == "sound"


def test_what_several_ranks_store_whole_stays_whole(tmp_path: Path) -> None:
    save_replicas(tmp_path / "src", {"model": weights()}, 3)
    ema_ckpt.reshard(tmp_path / "src", tmp_path / "out", 2)
    metadata = FileSystemReader(tmp_path / "out").read_metadata()
    assert all(len(entry.chunks) == 1 for entry in metadata.state_dict_metadata.values())
    assert {info.relative_path for info in metadata.storage_data.values()} == {"__0_0.distcp"}
    assert (tmp_path / "out" / "__1_0.distcp").stat().st_size == 0


def test_one_rank_and_files_are_split_where_floating_and_no_bookkeeping(tmp_path: Path) -> None:
    tree = {
        "model": {"w": torch.ones(4, 2), "table": torch.arange(4), "scale": torch.tensor(2.0)},
        "ema": ema(),
        "optimizer": {"state": {"w": {"exp_avg": torch.ones(4, 2), "step": torch.tensor(1.0)}}},
        "scheduler": {"lrs": torch.ones(4)},
    }
    torch.save(tree, tmp_path / "src.pt")
    save_dcp(tmp_path / "dcp", tree)
    for source in ("src.pt", "dcp"):
        ema_ckpt.reshard(tmp_path / source, tmp_path / f"{source}.out", 2)
        metadata = FileSystemReader(tmp_path / f"{source}.out").read_metadata().state_dict_metadata
        split = {name for name, entry in metadata.items() if len(getattr(entry, "chunks", ())) > 1}
        assert split == {
            "model.w",
            "ema.weights.layer.w",
            "ema.weights.b",
            "optimizer.state.w.exp_avg",
        }


def test_empty_checkpoint_and_zero_sizes(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "empty.pt")
    ema_ckpt.convert(tmp_path / "empty.pt", tmp_path / "empty.safetensors")
    ema_ckpt.convert(tmp_path / "empty.safetensors", tmp_path / "empty-dcp", world_size=2)
    assert bytes_of(tmp_path / "empty-dcp") == {}
    tree = {
        "a": torch.tensor([]),
        "b": torch.tensor([]),
        "c": torch.zeros(0, 5),
        "d": torch.zeros(8, 0),
    }
    torch.save(tree, tmp_path / "zero.pt")
    ema_ckpt.convert(tmp_path / "zero.pt", tmp_path / "zero", world_size=3)
    assert bytes_of(tmp_path / "zero") == facts(tree)


# Objects, files beside, names with ranks.


def test_few_rows_on_many_ranks_are_planned_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A box for every tensor and rank would be millions, nearly all of them empty."""
    made = []

    def row_box(shape: tuple[int, ...], parts: int, part: int) -> Box:
        made.append(part)
        return box.row_box(shape, parts, part)

    monkeypatch.setattr(writer, "row_box", row_box)
    source = save_dcp(tmp_path / "source", {"model": {f"{i}": torch.ones(2, i) for i in range(5)}})
    ema_ckpt.reshard(source, tmp_path / "out", 3000, dry_run=True)
    assert len(made) <= 5 * 3


def test_objects_are_carried(tmp_path: Path) -> None:
    plain = {"lr": 0.1, "names": ["a", "b"], "none": None, "flags": {"x": True}, "text": "é"}
    save_dcp(tmp_path / "src", {"model": weights(), "train_state": plain, "step": 5})
    ema_ckpt.reshard(tmp_path / "src", tmp_path / "r", 2)
    ema_ckpt.convert(tmp_path / "r", tmp_path / "x.safetensors")
    ema_ckpt.convert(tmp_path / "x.safetensors", tmp_path / "back.pt")
    found = torch.load(tmp_path / "back.pt", weights_only=True)
    assert found["train_state"] == plain
    assert found["step"] == 5


class Odd:
    """A class that no reader knows."""

    def __init__(self) -> None:
        self.value = 3


def test_opaque_objects_are_copied_to_dcp_and_skipped_elsewhere(tmp_path: Path) -> None:
    save_dcp(tmp_path / "src", {"model": weights(), "extra": {"odd": Odd(), "n": 1}})
    done = ema_ckpt.reshard(tmp_path / "src", tmp_path / "r", 2)
    assert [(w.code, "extra.odd" in w.message) for w in done.warnings] == [("opaque", True)]
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "r", tmp_path / "r.pt")
    assert torch.load(tmp_path / "r.pt", weights_only=False)["extra"]["odd"].value == 3
    done = ema_ckpt.convert(tmp_path / "r", tmp_path / "x.pt")
    assert [item.name for item in done.skipped] == ["extra.odd"]
    assert torch.load(tmp_path / "x.pt", weights_only=True)["extra"] == {"n": 1}
    with pytest.raises(ema_ckpt.EmaCkptError, match=r"extra\.odd"):
        ema_ckpt.convert(tmp_path / "r", tmp_path / "y.pt", strict=True)
    assert not (tmp_path / "y.pt").exists()


def test_an_argument_namespace_is_skipped_and_never_made(tmp_path: Path) -> None:
    torch.save({"model": weights(), "args": argparse.Namespace(lr=1)}, tmp_path / "src.pt")
    done = ema_ckpt.convert(tmp_path / "src.pt", tmp_path / "out", world_size=2)
    assert [(item.name, "Namespace" in item.reason) for item in done.skipped] == [("args", True)]
    assert bytes_of(tmp_path / "out") == facts({"model": weights()})


class Evil:
    """Runs a command when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"touch {self.marker}",))


@pytest.mark.parametrize("kind", ["dcp", "pt"])
def test_unsafe_objects_are_refused_and_can_be_left_out(tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "marker"
    tree = {"model": weights(), "hook": Evil(marker)}
    source = tmp_path / "src.pt"
    if kind == "dcp":
        source = save_dcp(tmp_path / "src", tree)
    else:
        torch.save(tree, source)
    with pytest.raises(ema_ckpt.EmaCkptError, match="--exclude 'hook'") as caught:
        ema_ckpt.reshard(source, tmp_path / "out", 2)
    assert caught.value.code == "unsafe-pickle"
    assert not (tmp_path / "out").exists()
    ema_ckpt.reshard(source, tmp_path / "out", 2, exclude=["hook"])
    assert bytes_of(tmp_path / "out") == facts({"model": weights()})
    assert not marker.exists()


def test_files_beside_are_listed_and_strict_refuses(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "src", {"model": weights()})
    for rank in range(2):
        torch.save({"rng": rank}, source / f"rng_state_{rank}.pth")
    done = ema_ckpt.reshard(source, tmp_path / "out", 1)
    assert [item.name for item in done.skipped] == ["rng_state_0.pth", "rng_state_1.pth"]
    with pytest.raises(ema_ckpt.EmaCkptError, match=r"rng_state_0\.pth"):
        ema_ckpt.reshard(source, tmp_path / "strict", 1, strict=True)
    assert not (tmp_path / "strict").exists()


NEEDED = {
    "meta.pt": b"\x80\x02cos\nsystem\n.",
    "common.pt": b"not even a pickle",
    "metadata.json": b"{}",
    "config.json": b"[1]",
}


def test_files_that_the_owner_needs_go_along(tmp_path: Path) -> None:
    """Lightning's `meta.pt`, Megatron-core's `common.pt` and `metadata.json`, a model's configuration."""
    source = save_dcp(tmp_path / "src", {"model": weights()})
    for name, data in NEEDED.items():
        (source / name).write_bytes(data)
    (source / "notes.txt").write_text("mine")
    for number in range(2):  # our own output may be replaced
        done = ema_ckpt.reshard(source, tmp_path / "out", 2, overwrite=bool(number))
        assert [item.name for item in done.skipped] == ["notes.txt"]
        for name, data in NEEDED.items():
            assert (tmp_path / "out" / name).read_bytes() == data
            assert FileEntry(name, len(data)) in done.files
    dry = ema_ckpt.convert(source, tmp_path / "again", dry_run=True)
    assert {entry.path for entry in dry.files} > NEEDED.keys()
    assert ema_ckpt.verify(tmp_path / "out").status == "sound"


def test_files_that_the_owner_needs_stay_behind_across_formats(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "src", {"model": weights()})
    for name, data in NEEDED.items():
        (source / name).write_bytes(data)
    for target in ("out.safetensors", "out.pt"):
        done = ema_ckpt.convert(source, tmp_path / target)
        assert {item.name for item in done.skipped} == NEEDED.keys()
    hf = ema_ckpt.consolidate(source, tmp_path / "hf").target
    (Path(hf) / "config.json").write_bytes(b"[2]")
    (Path(hf) / "generation_config.json").write_bytes(b"[3]")
    same = ema_ckpt.convert(hf, tmp_path / "hf2", to="safetensors")
    assert not same.skipped
    assert (tmp_path / "hf2/generation_config.json").read_bytes() == b"[3]"
    other = ema_ckpt.convert(hf, tmp_path / "dcp")
    assert {item.name for item in other.skipped} == {"config.json", "generation_config.json"}
    with pytest.raises(ema_ckpt.EmaCkptError, match=r"config\.json"):
        ema_ckpt.convert(hf, tmp_path / "strict", strict=True)


def test_somebody_elses_configuration_is_not_overwritten(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "src", {"model": weights()})
    target = ema_ckpt.reshard(source, tmp_path / "out", 2).target
    (Path(target) / "config.json").write_text("mine")
    with pytest.raises(ema_ckpt.EmaCkptError, match=r"config\.json") as error:
        ema_ckpt.reshard(source, tmp_path / "out", 2, overwrite=True)
    assert error.value.code == "foreign-files"


def test_keys_with_a_rank_are_kept_and_told(tmp_path: Path) -> None:
    tree = {"model": weights(), "rng": {"rank_0": torch.arange(3), "rank_1": torch.arange(3) + 7}}
    save_dcp(tmp_path / "src", tree)
    done = ema_ckpt.reshard(tmp_path / "src", tmp_path / "out", 1)
    assert [w.code for w in done.warnings] == ["rank-keyed"]
    assert "rng.rank_1" in done.warnings[0].message
    assert bytes_of(tmp_path / "out") == facts(tree)


def test_parts_are_no_strangers_to_each_other(tmp_path: Path) -> None:
    save_dcp(tmp_path / "src" / "model", weights())
    save_dcp(tmp_path / "src" / "optim", {"state": {"b": {"exp_avg": torch.ones(2)}}})
    done = ema_ckpt.reshard(tmp_path / "src", tmp_path / "out", 2, strict=True)
    assert not done.skipped
    assert bytes_of(tmp_path / "out").keys() == {
        "model.layer.w",
        "model.b",
        "optim.state.b.exp_avg",
    }


# Ties and views.


def tied() -> dict[str, torch.Tensor]:
    embed, buffer = torch.arange(12.0).reshape(4, 3), torch.arange(10.0)
    return {
        "embed.weight": embed,
        "head.weight": embed,
        "left": buffer[:6],
        "right": buffer[4:],
        "twin": embed.clone(),
    }


def test_ties_are_kept_once_and_recorded(tmp_path: Path) -> None:
    torch.save({"model": tied()}, tmp_path / "src.pt")
    done = ema_ckpt.convert(tmp_path / "src.pt", tmp_path / "x.safetensors")
    assert done.ties == {"model.head.weight": "model.embed.weight"}  # equal values alone are no tie
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert "model.head.weight" not in file.keys()  # noqa: SIM118
        assert torch.equal(file.get_tensor("model.right"), tied()["right"])
    ema_ckpt.convert(tmp_path / "x.safetensors", tmp_path / "back.pt")
    ema_ckpt.convert(tmp_path / "src.pt", tmp_path / "same.pt")
    for name in ("back.pt", "same.pt"):
        found = torch.load(tmp_path / name, weights_only=True)["model"]
        assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
        assert found["embed.weight"].data_ptr() != found["twin"].data_ptr()
        assert facts(found) == facts(tied())


def test_ties_are_written_twice_to_dcp_and_where_expanded(tmp_path: Path) -> None:
    torch.save({"model": tied()}, tmp_path / "src.pt")
    expected = facts({"model": tied()})
    ema_ckpt.convert(tmp_path / "src.pt", tmp_path / "dcp", world_size=2)
    done = ema_ckpt.convert(tmp_path / "src.pt", tmp_path / "x.safetensors", expand_ties=True)
    ema_ckpt.convert(tmp_path / "src.pt", tmp_path / "x.pt", expand_ties=True)
    assert not done.ties
    assert bytes_of(tmp_path / "dcp") == bytes_of(tmp_path / "x.safetensors") == expected
    found = torch.load(tmp_path / "x.pt", weights_only=True)["model"]
    assert found["embed.weight"].data_ptr() != found["head.weight"].data_ptr()


# Selection, dtypes, names.


def test_a_chosen_ema_brings_its_settings(tmp_path: Path) -> None:
    save_dcp(tmp_path / "src", {"model": weights(), "ema": ema(), "step": 4})
    ema_ckpt.reshard(tmp_path / "src", tmp_path / "out", 2, tree=["ema"], match=["ema.weights.b"])
    found = ema_ckpt.inspect(tmp_path / "out")
    assert {t.name for t in found.tensors} == {
        "ema.weights.b",
        "ema.num_updates",
        "ema.samples_seen",
    }
    assert [o.name for o in found.objects] == ["ema.config"]
    assert found.ema["ema"]["num_updates"] == 3


def test_casts_touch_weights_alone_and_warn_of_a_low_average(tmp_path: Path) -> None:
    optimizer = {"state": {"b": {"exp_avg": torch.ones(2)}}}
    save_dcp(tmp_path / "src", {"model": weights(), "ema": ema(), "optimizer": optimizer})
    done = ema_ckpt.reshard(
        tmp_path / "src", tmp_path / "out", 2, dtype="bf16", keep_dtype=["model.b"]
    )
    kinds = {t.name: t.dtype for t in ema_ckpt.inspect(tmp_path / "out").tensors}
    assert kinds == {
        "model.layer.w": "bfloat16", "model.b": "float32", "ema.weights.layer.w": "bfloat16",
        "ema.weights.b": "bfloat16", "ema.num_updates": "int64", "ema.samples_seen": "int64",
        "optimizer.state.b.exp_avg": "float32",
    }  # fmt: skip
    assert [w.code for w in done.warnings] == ["ema-low-precision"]
    with ema_ckpt.open(tmp_path / "out") as ckpt:
        assert torch.equal(ckpt["ema.weights.layer.w"], ema()["weights"]["layer.w"].bfloat16())


def test_convert_strips_wrapper_prefixes_and_lists_them(tmp_path: Path) -> None:
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in weights().items()}
    torch.save({"model": wrapped}, tmp_path / "src.pt")
    done = ema_ckpt.convert(tmp_path / "src.pt", tmp_path / "out.pt")
    assert done.renamed == {f"model.module._orig_mod.{name}": f"model.{name}" for name in weights()}
    assert facts(torch.load(tmp_path / "out.pt", weights_only=True)) == facts({"model": weights()})
    ema_ckpt.reshard(tmp_path / "src.pt", tmp_path / "kept", 2)
    assert bytes_of(tmp_path / "kept") == facts({"model": wrapped})


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"to": "zarr"}, "usage"),
        ({"to": "pt"}, "usage"),
        ({"world_size": 0}, "usage"),
        ({"tree": ["emma"]}, "unknown-tree"),
        ({"match": ["nothing.*"]}, "empty-selection"),
    ],
)
def test_refusals_write_nothing(tmp_path: Path, arguments: dict, code: str) -> None:
    save_dcp(tmp_path / "src", {"model": weights(), "ema": ema()})
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        ema_ckpt.convert(tmp_path / "src", tmp_path / "out", **arguments)
    assert caught.value.code == code
    assert sorted(os.listdir(tmp_path)) == ["src"]


def test_onto_itself_is_refused(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "src", {"model": weights()})
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        ema_ckpt.reshard(source, source, 2, overwrite=True)
    assert caught.value.code == "target-is-source"
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


# Interruptions.


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "src", {"model": weights()})

    def touch(_nbytes: int) -> None:
        os.utime(source / "__0_0.distcp")

    with pytest.raises(ema_ckpt.EmaCkptError, match=r"__0_0\.distcp") as caught:
        ema_ckpt.reshard(source, tmp_path / "out", 2, progress=touch)
    assert caught.value.code == "source-changed"
    assert sorted(os.listdir(tmp_path)) == ["src"]


class Stop(Exception):
    """Ends a run as a crash would, its stage left for `--resume`."""


@pytest.mark.parametrize(("change", "world_size"), [("source", 2), ("plan", 3), ("plan", 1)])
def test_a_stopped_run_is_not_continued_as_another(
    tmp_path: Path, change: str, world_size: int
) -> None:
    source = save_dcp(
        tmp_path / "src", {"model": {f"t{i}": torch.full((300_000,), float(i)) for i in range(8)}}
    )

    def stop(_nbytes: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        ema_ckpt.reshard(source, tmp_path / "out", 2, resume=True, progress=stop)
    assert not (tmp_path / "out").exists()
    if change == "source":
        os.utime(source / "__0_0.distcp", ns=(1, 1))
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        ema_ckpt.reshard(source, tmp_path / "out", world_size, resume=True)
    assert caught.value.code == "resume-mismatch"
    ema_ckpt.reshard(source, tmp_path / "out", 3)
    assert ema_ckpt.verify(tmp_path / "out", against=source).status == "sound"


def test_overwrite_leaves_no_files_of_a_larger_world(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "src", {"model": weights()})
    ema_ckpt.reshard(source, tmp_path / "out", 4)
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        ema_ckpt.reshard(source, tmp_path / "out", 2)
    assert caught.value.code == "target-exists"
    ema_ckpt.reshard(source, tmp_path / "out", 2, overwrite=True)
    assert sorted(path.name for path in (tmp_path / "out").glob("*.distcp")) == [
        "__0_0.distcp",
        "__1_0.distcp",
    ]


@pytest.mark.slow
def test_items_above_four_gigabytes(tmp_path: Path) -> None:
    """zip64, written and read: by this package, by zipfile, by torch."""
    rows = (1 << 32) // 1024 + 5
    tensor = torch.zeros(rows, 1024, dtype=torch.uint8)
    tensor[0, 0], tensor[-1, -1], tensor[rows // 2] = 1, 2, 3
    torch.save({"model": {"big": tensor, "small": torch.ones(3)}}, tmp_path / "src.pt")
    expected = hash_of(tensor)
    try:
        ema_ckpt.reshard(tmp_path / "src.pt", tmp_path / "dcp", 1, no_fsync=True)
        (tmp_path / "src.pt").unlink()
        metadata = FileSystemReader(tmp_path / "dcp").read_metadata()
        info = next(
            info for index, info in metadata.storage_data.items() if index.fqn == "model.big"
        )
        assert info.length > 1 << 32
        with (
            (tmp_path / "dcp" / info.relative_path).open("rb") as file,
            zipfile.ZipFile(Span(file, info)) as archive,
        ):
            assert archive.testzip() is None
        assert ema_ckpt.verify(tmp_path / "dcp").status == "sound"
        ema_ckpt.convert(tmp_path / "dcp", tmp_path / "back.pt", no_fsync=True)
        shutil.rmtree(tmp_path / "dcp")
        assert (
            hash_of(torch.load(tmp_path / "back.pt", weights_only=True, mmap=True)["model"]["big"])
            == expected
        )
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)


def hash_of(tensor: torch.Tensor) -> str:
    import hashlib

    return hashlib.sha256(tensor.numpy()).hexdigest()


class Span:
    """A part of a file as a file: what a zip reader needs."""

    def __init__(self, file: object, info: object) -> None:
        self.file, self.start, self.nbytes, self.at = file, info.offset, info.length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.nbytes)[whence]
        return self.at

    def read(self, nbytes: int = -1) -> bytes:
        nbytes = self.nbytes - self.at if nbytes < 0 else min(nbytes, self.nbytes - self.at)
        self.file.seek(self.start + self.at)
        data = self.file.read(nbytes)
        self.at += len(data)
        return data


def test_state_beside_any_checkpoint_is_told(tmp_path: Path) -> None:
    tensors, state = {"a": torch.ones(2)}, {"s": torch.ones(3)}
    hugging_face, diffusers, actor = (
        tmp_path / "checkpoint-7",
        tmp_path / "checkpoint-500",
        tmp_path / "run/actor",
    )
    for folder in (hugging_face, diffusers / "unet", diffusers / "unet_ema", actor):
        folder.mkdir(parents=True)
    for folder in (hugging_face / "1_Pooling", hugging_face / "runs", actor / "huggingface"):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    torch.save(tensors, hugging_face / "pytorch_model.bin")
    save_file(tensors, hugging_face / "model.safetensors")
    save_file(tensors, hugging_face / "ema.safetensors")
    for name in ("config.json", "README.md", "LICENSE", "tokenizer.json", "trainer_state.json"):
        (hugging_face / name).write_text("{}")
    for folder in ("unet", "unet_ema"):
        save_file(tensors, diffusers / folder / "diffusion_pytorch_model.safetensors")
    for rank in range(2):
        torch.save(tensors, actor / f"model_world_size_2_rank_{rank}.pt")
    for place in (hugging_face, diffusers, actor):
        torch.save(state, place / "optimizer.bin")
        torch.save(state, place / "rng_state_0.pth")
    expected = {
        hugging_face: ["config.json", "optimizer.bin", "rng_state_0.pth", "trainer_state.json"],
        diffusers: ["optimizer.bin", "rng_state_0.pth"],
        actor: ["optimizer.bin", "rng_state_0.pth"],
        actor.parent: ["actor/optimizer.bin", "actor/rng_state_0.pth"],
        hugging_face / "model.safetensors": [],
    }
    for number, (source, names) in enumerate(expected.items()):
        done = ema_ckpt.reshard(source, tmp_path / f"out{number}", 2)
        assert sorted(item.name for item in done.skipped) == names
        if names:
            with pytest.raises(ema_ckpt.EmaCkptError, match="--strict"):
                ema_ckpt.convert(source, tmp_path / "strict.safetensors", strict=True)


@pytest.mark.parametrize("verb", ["convert", "consolidate"])
@pytest.mark.parametrize("target", ["out", "out.safetensors", "out.pt"])
def test_every_file_beside_a_model_is_written_or_named(
    verb: str, target: str, tmp_path: Path
) -> None:
    """In `files`, `skipped` or the one warning `left-out`; `--strict` minds only what is skipped."""
    source, out = tmp_path / "model", tmp_path / target
    source.mkdir()
    save_file({"a": torch.ones(2)}, source / "model.safetensors")
    beside = "config.json generation_config.json tokenizer.json tokenizer_config.json merges.txt README.md".split()
    for name in (*beside, ".gitattributes"):
        (source / name).write_text("{}")
    args = {"to": "safetensors"} if (verb, target) == ("convert", "out") else {}
    done = getattr(ema_ckpt, verb)(source, out, **args)
    (warning,) = [w for w in done.warnings if w.code == "left-out"]
    told = {item.file for item in done.skipped}
    told |= {name for name in beside if repr(name) in warning.message}
    there = set(os.listdir(out)) if out.is_dir() else set()
    assert told | there >= {*beside}
    assert not told & there
    assert "model.safetensors" not in warning.message.partition(": ")[2]
    assert ".gitattributes" not in warning.message
    if not done.skipped:
        getattr(ema_ckpt, verb)(source, tmp_path / f"strict-{target}", strict=True, **args)
    named = getattr(ema_ckpt, verb)(source / "model.safetensors", tmp_path / "named.safetensors")
    assert not named.warnings


def test_files_beside_a_hugging_face_target_are_kept(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    for number in range(2):
        ema_ckpt.convert(
            tmp_path / "a.safetensors", tmp_path / "hf", to="safetensors", overwrite=bool(number)
        )
        (tmp_path / "hf/config.json").write_text("{}")
    assert sorted(os.listdir(tmp_path / "hf")) == [
        "config.json",
        "ema_ckpt.json",
        "model.safetensors",
    ]


def test_whole_files_of_torchs_hugging_face_writer(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4, 3), "v": torch.randn(2)}
    writer = dcp.HuggingFaceStorageWriter(
        str(tmp_path / "hf"), fqn_to_index_mapping={"w": 1, "v": 2}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, storage_writer=writer)
    done = ema_ckpt.convert(tmp_path / "hf", tmp_path / "out.safetensors")
    assert (done.tensors, done.skipped) == (2, ())
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    (tmp_path / "hf/model.safetensors.index.json").unlink()
    with pytest.raises(ema_ckpt.EmaCkptError):
        ema_ckpt.convert(tmp_path / "hf", tmp_path / "again.safetensors")


@pytest.mark.parametrize("name", ["llama-3.1", "v1.2", "out.d", "weights.gguf.dcp"])
def test_any_other_name_is_a_directory(name: str, tmp_path: Path) -> None:
    source = dcp_at(tmp_path / "src")
    assert ema_ckpt.convert(source, tmp_path / "new" / name).format == "dcp"
    assert (tmp_path / "new" / name / ".metadata").exists()


@pytest.mark.parametrize("name", ["w.npz", "w.h5", "w.onnx", "w.gguf", "w.zip", "W.GGUF"])
def test_a_foreign_ending_is_no_format(name: str, tmp_path: Path) -> None:
    source = dcp_at(tmp_path / "src")
    with pytest.raises(ema_ckpt.EmaCkptError, match="--to") as error:
        ema_ckpt.convert(source, tmp_path / name)
    assert error.value.code == "usage"
    assert ema_ckpt.convert(source, tmp_path / name, to="dcp").format == "dcp"
