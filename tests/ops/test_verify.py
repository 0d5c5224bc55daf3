"""verify: honest checkpoints pass, planted damage of every kind is found, and nothing is ever executed."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    SavePlan,
)

import ema_ckpt
from ema_ckpt import EmaCkptError, verify
from ema_ckpt.ops import verify_against
from tests.checkpoints import dcp_at, save_dcp
from tests.distributed import launcher

REPO = Path(__file__).parents[2]

UNPROVEN = {
    "dcp/fsdp2-w2-crc-off", "hf/one-file", "hf/sharded", "safetensors/dtypes.safetensors",
    "safetensors/net-and-ema.safetensors", "safetensors/plain.safetensors", "safetensors/tied-save-model.safetensors",
    "torch/crc-off.pt", "rank-files/torch-checkpointing",
}  # fmt: skip
HONEST = sorted(
    f"{folder}/{path.name}"
    for folder in ("dcp", "hf", "rank-files", "safetensors", "torch")
    for path in (REPO / "fixtures" / folder).iterdir()
)

# What verify must say of each: code, tensor, file. None where the damage is to no single one.
W, FILE = "ema.weights.w", "__1_0.distcp"
DAMAGED = {
    "hole": ("hole", W, None),
    "hole-inside": ("hole", W, None),
    "no-storage": ("incomplete", W, None),
    "overlap": ("overlap", W, FILE),
    "overlap-and-hole": ("overlap", W, FILE),
    "out-of-bounds": ("out-of-bounds", W, FILE),
    "negative-offset": ("out-of-bounds", W, FILE),
    "missing-file": ("missing-file", "model.w", FILE),
    "missing-metadata": ("missing-metadata", None, ".metadata"),
    "truncated-by-one": ("truncated-file", "ema.samples_seen", FILE),
    "truncated-by-half": ("truncated-file", W, FILE),
    "truncated-to-nothing": ("truncated-file", "model.w", FILE),
    "metadata-truncated": ("unreadable", None, ".metadata"),
    "metadata-empty": ("unreadable", None, ".metadata"),
    "wrong-metadata": ("unreadable", None, ".metadata"),
    "deep-metadata": ("unreadable", None, ".metadata"),
    "laughs-metadata": ("unreadable", None, ".metadata"),
    "flipped-byte": ("checksum", W, FILE),
    "flipped-pickle": ("checksum", W, FILE),
    "zip-header-zeroed": ("bad-header", W, FILE),
    "zip-directory-zeroed": ("bad-header", W, FILE),
    "duplicate-zip-record": ("bad-header", W, FILE),
    "item-of-other-shape": ("index-mismatch", W, FILE),
    "item-of-other-dtype": ("index-mismatch", W, FILE),
    "item-reads-past-storage": ("out-of-bounds", W, FILE),
    "item-beyond-file": ("truncated-file", W, FILE),
    "item-negative-offset": ("out-of-bounds", W, ".metadata"),
    "huge-list-index": ("out-of-bounds", W, ".metadata"),
    "huge-size": ("index-mismatch", W, "__0_0.distcp"),
    "overflowing-size": ("out-of-bounds", W, ".metadata"),
    "hostile-metadata": ("unsafe-pickle", None, ".metadata"),
    "hostile-metadata-eval": ("unsafe-pickle", None, ".metadata"),
    "hostile-metadata-inst": ("unsafe-pickle", None, ".metadata"),
    "hostile-metadata-obj": ("unsafe-pickle", None, ".metadata"),
    "hostile-metadata-dotted": ("unsafe-pickle", None, ".metadata"),
    "hostile-rank-metadata": ("unsafe-pickle", None, "__0.metadata"),
    "hostile-tensor-item": ("unsafe-pickle", W, FILE),
    "hostile-object-item": ("unsafe-pickle", "note.text", FILE),
    "hostile-ema-config": ("unsafe-pickle", "ema.config", FILE),
    "hostile-ema-counter": ("unsafe-pickle", "ema.num_updates", FILE),
    "path-absolute": ("unsafe-path", None, "/etc/passwd"),
    "path-parent": ("unsafe-path", None, "../base/__1_0.distcp"),
    "path-device": ("unsafe-path", "model.w", FILE),
    "hf-missing-shard": ("missing-file", None, "model-00002-of-00002.safetensors"),
    "hf-truncated-shard": ("truncated-file", "c", "model-00002-of-00002.safetensors"),
    "hf-tensor-elsewhere": ("index-mismatch", "a", "model-00002-of-00002.safetensors"),
    "hf-tensor-nowhere": ("index-mismatch", "d", "model-00002-of-00002.safetensors"),
    "hf-not-json": ("bad-header", None, "model.safetensors.index.json"),
    "hf-key-twice": ("bad-header", None, "model.safetensors.index.json"),
    "hf-path-parent": ("unsafe-path", None, "../hf-missing-shard/model-00001-of-00002.safetensors"),
    "hole.safetensors": ("bad-header", "c", "hole.safetensors"),
    "overlap.safetensors": ("bad-header", "c", "overlap.safetensors"),
    "key-twice.safetensors": ("bad-header", None, "key-twice.safetensors"),
    "trailing-bytes.safetensors": ("bad-header", None, "trailing-bytes.safetensors"),
    "truncated-by-one.safetensors": ("truncated-file", "c", "truncated-by-one.safetensors"),
    "flipped-byte.pt": ("checksum", "model.a", "flipped-byte.pt"),
    "truncated-by-one.pt": ("bad-header", None, "truncated-by-one.pt"),
    "short-storage.pt": ("bad-header", "model.a", "short-storage.pt"),
    "record-twice.pt": ("bad-header", None, "record-twice.pt"),
    "not-a-zip.pt": ("bad-header", None, "not-a-zip.pt"),
    "name-collision.pt": ("name-collision", "model.a.b", None),
    "hostile.pt": ("unsafe-pickle", "args", "hostile.pt"),
    "hostile-inst.pt": ("unsafe-pickle", None, "hostile-inst.pt"),
    "hostile-in-tensors.pt": ("unsafe-pickle", "model.d", "hostile-in-tensors.pt"),
}


@pytest.fixture(autouse=True)
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file that hostile checkpoints make when they are executed: it must never be there."""
    path = tmp_path / "marker"
    monkeypatch.setenv("EMA_CKPT_MARKER", str(path))
    yield
    assert not path.exists()


@pytest.mark.parametrize("name", HONEST)
def test_honest_checkpoints_pass(name: str, fixtures: Path) -> None:
    found = verify(fixtures / name)
    assert not found.problems
    assert found.status == ("unproven" if name in UNPROVEN else "sound")
    assert (found.unchecked_bytes > 0) == (name in UNPROVEN)


def test_all_payload_of_a_checkpoint_counts(fixtures: Path) -> None:
    """Tensor data as torch counts it, plus the pickles that are objects."""
    path = fixtures / "dcp" / "replicated-w4"
    entries = FileSystemReader(path).read_metadata().state_dict_metadata.values()
    tensors = sum(
        e.size.numel() * e.properties.dtype.itemsize for e in entries if hasattr(e, "size")
    )
    objects = 0
    for item in items_of(path):
        with zipfile.ZipFile(io.BytesIO(item[2])) as archive:
            names = archive.namelist()
            if not any("/data/" in name for name in names):
                objects += sum(
                    archive.getinfo(name).file_size for name in names if name.endswith("data.pkl")
                )
    assert verify(path).checked_bytes == tensors + objects


@pytest.mark.parametrize("name", sorted(DAMAGED))
def test_planted_damage_is_found(name: str, fixtures: Path) -> None:
    found = verify(fixtures / "nasty" / name)
    assert found.status == "damaged"
    assert DAMAGED[name] in [
        (problem.code, problem.tensor, problem.file) for problem in found.problems
    ]


def test_every_nasty_fixture_ends_in_a_verdict_or_an_error(fixtures: Path) -> None:
    for path in sorted((fixtures / "nasty").iterdir()):
        try:
            status = verify(path).status
        except EmaCkptError as error:
            assert error.code == "unsupported", path.name
        else:
            assert status in ("sound", "unproven", "damaged")


@pytest.mark.parametrize("quick", [False, True])
def test_the_choice_of_a_step_is_logged(
    quick: bool, tmp_path: Path, fixtures: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (9, 10):
        shutil.copytree(fixtures / "dcp/fsdp2-w2", tmp_path / f"step_{step}")
    caplog.set_level("INFO", "ema_ckpt")
    verify(tmp_path, quick=quick)
    assert caplog.messages == [f"reading step_10, the newest complete of 2 steps in {tmp_path}"]


def test_the_message_tells_how_much_is_covered(tmp_path: Path) -> None:
    """Rows 0-1 of four, in metadata edited by hand."""
    path = save_dcp(tmp_path / "c", {"model": {"w": torch.arange(16.0).reshape(4, 4)}})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    chunk = metadata.state_dict_metadata["model.w"].chunks[0]
    chunk.sizes = torch.Size([2, 4])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    problems = verify(path).problems
    assert next(p.code for p in problems if p.tensor == "model.w") == "hole"
    assert "8 of 16 elements covered" in problems[0].message


def test_a_short_file_tells_what_is_cut_off_where_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({name: torch.ones(8) for name in "abc"}, path)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    (problem,) = verify(path).problems
    head = f"m.safetensors: expected at least {size} bytes, found {size - 1}: the file is truncated; cut off: "
    remedy = "; copy the file again, or use another copy of the checkpoint"
    assert problem.message == f"{head}'c' (at bytes {size - 32} to {size}){remedy}"
    os.truncate(path, size - 33)
    assert (
        f"; cut off: 'b', 'c' ('b' at bytes {size - 64} to {size - 32}); "
        in verify(path).problems[0].message
    )


def test_a_short_file_names_the_objects_that_it_lacks(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "c", {"model": {"w": torch.ones(4)}, "note": "before all tensors"})
    os.truncate(path / "__0_0.distcp", 100)
    found = [p for p in verify(path).problems if p.code == "truncated-file"]
    assert len(found) == 1
    assert "; cut off: 'model.w', 'note' ('model.w' at bytes " in found[0].message


def test_shards_without_an_index_are_damage(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({"w": torch.ones(2)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    found = verify(tmp_path)
    index = "model.safetensors.index.json"
    assert [(p.code, p.file) for p in found.problems] == [("missing-metadata", index)]


# ---------------------------------------------------------------- flips


def items_of(path: Path) -> list[tuple[str, int, bytes]]:
    """File, offset and bytes of every item, from torch's own metadata."""
    metadata = FileSystemReader(path).read_metadata()
    found = []
    for info in metadata.storage_data.values():
        raw = (path / info.relative_path).read_bytes()
        found.append(
            (info.relative_path, info.offset, raw[info.offset : info.offset + info.length])
        )
    return found


def zip_ranges(raw: bytes, base: int = 0) -> list[tuple[int, int]]:
    """Where the records of an archive lie, by way of Python's zipfile."""
    ranges = []
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        for info in archive.infolist():
            name_size = int.from_bytes(
                raw[info.header_offset + 26 : info.header_offset + 28], "little"
            )
            extra_size = int.from_bytes(
                raw[info.header_offset + 28 : info.header_offset + 30], "little"
            )
            start = info.header_offset + 30 + name_size + extra_size
            assert raw[start : start + info.file_size] == archive.read(info)
            if info.file_size:
                ranges.append((base + start, info.file_size))
    return ranges


def flip_everywhere(path: Path, places: list[tuple[str, int, int]], count: int, seed: int) -> None:
    """Flip one random bit of the given ranges at a time; each must be found, with its file named."""
    chance = random.Random(seed)
    weights = [nbytes for _, _, nbytes in places]
    for _ in range(count):
        file, start, nbytes = chance.choices(places, weights)[0]
        at, bit = start + chance.randrange(nbytes), 1 << chance.randrange(8)
        target = path / file if file else path
        with open(target, "r+b") as stream:
            stream.seek(at)
            byte = stream.read(1)[0]
            stream.seek(at)
            stream.write(bytes([byte ^ bit]))
            stream.flush()
            found = verify(path, threads=1)
            assert found.status == "damaged", (file, at, bit)
            assert any(p.file == target.name for p in found.problems), (file, at, found.problems)
            stream.seek(at)
            stream.write(bytes([byte]))
    assert verify(path).status == "sound"


@pytest.mark.parametrize(
    ("name", "count"), [("dcp/fsdp2-w4", 200), ("dcp/objects-w2", 50), ("dcp/strided-w2", 50)]
)
def test_every_flipped_bit_of_a_dcp_is_found(
    name: str, count: int, fixtures: Path, tmp_path: Path
) -> None:
    shutil.copytree(fixtures / name, tmp_path / "c")
    places = [
        (f, a, n) for f, offset, raw in items_of(tmp_path / "c") for a, n in zip_ranges(raw, offset)
    ]
    flip_everywhere(tmp_path / "c", places, count, seed=len(name))


@pytest.mark.parametrize("name", ["views.pt", "model-ema.ckpt"])
def test_every_flipped_bit_of_a_torch_file_is_found(
    name: str, fixtures: Path, tmp_path: Path
) -> None:
    path = shutil.copy(fixtures / "torch" / name, tmp_path / name)
    flip_everywhere(path, [("", a, n) for a, n in zip_ranges(path.read_bytes())], 50, seed=3)


def test_every_flipped_bit_of_rank_files_is_found(fixtures: Path, tmp_path: Path) -> None:
    shutil.copytree(fixtures / "rank-files" / "replicas", tmp_path / "c")
    files = sorted((tmp_path / "c").iterdir())
    places = [(file.name, a, n) for file in files for a, n in zip_ranges(file.read_bytes())]
    flip_everywhere(tmp_path / "c", places, 50, seed=6)


def test_every_flipped_bit_of_our_safetensors_is_found(fixtures: Path, tmp_path: Path) -> None:
    """The format has no checksums; what this package writes carries digests."""
    out = tmp_path / "ema.safetensors"
    ema_ckpt.consolidate(fixtures / "dcp" / "fsdp2-w4", out, "ema")
    header = 8 + int.from_bytes(out.read_bytes()[:8], "little")
    flip_everywhere(out, [("", header, out.stat().st_size - header)], 50, seed=4)


def test_every_flipped_bit_of_our_shards_is_found(fixtures: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    ema_ckpt.consolidate(fixtures / "dcp" / "fsdp2-w4", out, "ema", max_shard_size=400)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    places = []
    for file in files:
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        places.append((file.name, header, file.stat().st_size - header))
    flip_everywhere(out, places, 50, seed=5)


# ---------------------------------------------------------------- files


def test_swapped_rank_files_are_found_by_digest(tmp_path: Path) -> None:
    """Both files are right in themselves and of one layout: their own checksums cannot tell."""
    source = save_dcp(tmp_path / "one", {"model": {"w": torch.arange(24.0).reshape(4, 6)}})
    out = tmp_path / "two"
    ema_ckpt.reshard(source, out, world_size=2)
    assert verify(out).status == "sound"
    (out / "__0_0.distcp").rename(out / "aside")
    (out / "__1_0.distcp").rename(out / "__0_0.distcp")
    (out / "aside").rename(out / "__1_0.distcp")
    found = verify(out)
    assert found.status == "damaged"
    assert [(p.code, p.tensor) for p in found.problems] == [("checksum", "model.w")] * 2
    assert "another save's" in found.problems[0].message


def test_an_item_of_no_bytes_that_should_hold_elements_is_damage(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "one", {"model": {"w": torch.ones(3), "none": torch.ones(0)}})
    metadata = FileSystemReader(source).read_metadata()
    for index, place in metadata.storage_data.items():
        if index.fqn == "model.w":
            metadata.storage_data[index] = replace(place, length=0)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    for quick in (False, True):
        found = verify(source, quick=quick)
        assert found.status == "damaged"
        assert [(p.code, p.tensor) for p in found.problems] == [("bad-header", "model.w")]


def test_swapped_shards_are_found(tmp_path: Path) -> None:
    state = {"a": torch.arange(8.0), "b": torch.arange(8.0) + 1}
    torch.save(state, tmp_path / "s.pt")
    out = tmp_path / "hf"
    ema_ckpt.consolidate(tmp_path / "s.pt", out, max_shard_size=32)
    one, two = sorted(out.glob("*.safetensors"))
    save_file({"a": load_file(one)["a"]}, one)
    assert verify(out).status == "sound"
    save_file({"a": load_file(two)["b"]}, one)
    assert [(p.code, p.tensor, p.file) for p in verify(out).problems] == [
        ("checksum", "a", one.name)
    ]


def test_a_moved_checkpoint_stays_sound(fixtures: Path, tmp_path: Path) -> None:
    ema_ckpt.reshard(fixtures / "dcp" / "fsdp2-w4", tmp_path / "a", world_size=3)
    shutil.move(tmp_path / "a", tmp_path / "elsewhere")
    assert verify(tmp_path / "elsewhere").status == "sound"


def test_stale_files_are_named(fixtures: Path, tmp_path: Path) -> None:
    found = verify(fixtures / "dcp" / "stale-w4-then-w2")
    assert found.status == "sound"
    stale = [w.message for w in found.warnings if w.code == "stale-file"]
    assert [message.partition(":")[0] for message in stale] == ["__2_0.distcp", "__3_0.distcp"]
    shutil.copytree(fixtures / "hf" / "sharded", tmp_path / "hf")
    save_file({"old": torch.ones(3)}, tmp_path / "hf" / "model-00009-of-00009.safetensors")
    assert [
        w.message.partition(":")[0]
        for w in verify(tmp_path / "hf").warnings
        if w.code == "stale-file"
    ] == ["model-00009-of-00009.safetensors"]


def test_empty_files_of_idle_ranks_are_fine(fixtures: Path, tmp_path: Path) -> None:
    path = fixtures / "dcp" / "idle-ranks-w4"
    assert any(not file.stat().st_size for file in path.glob("*.distcp"))
    found = verify(path)
    assert found.status == "sound"
    assert not found.warnings


def test_nothing_stops_at_the_first_problem(fixtures: Path, tmp_path: Path) -> None:
    """Damage in several tensors, files and ways at once: each is named."""
    path = tmp_path / "c"
    shutil.copytree(fixtures / "nasty" / "base", path)
    for file, offset, raw in items_of(path):
        start, _ = max(zip_ranges(raw, offset), key=lambda place: place[1])
        data = bytearray((path / file).read_bytes())
        data[start] ^= 1
        (path / file).write_bytes(data)
    (path / "__0_0.distcp").unlink()
    found = verify(path)
    by_code = {
        code: {p.tensor for p in found.problems if p.code == code}
        for code in ("missing-file", "checksum")
    }
    assert by_code["missing-file"]
    assert {"model.w", "ema.weights.w", "ema.num_updates"} <= by_code["checksum"]


def test_a_broken_shard_does_not_hide_the_others(fixtures: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    ema_ckpt.consolidate(fixtures / "dcp" / "fsdp2-w4", out, "ema", max_shard_size=400)
    first, *_, last = sorted(out.glob("*.safetensors"))
    first.write_bytes(b"\xff" * 200)
    raw = bytearray(last.read_bytes())
    raw[-1] ^= 1
    last.write_bytes(raw)
    found = {(p.code, p.file) for p in verify(out).problems}
    assert {("bad-header", first.name), ("checksum", last.name)} <= found


def test_replicas_that_differ_are_told(tmp_path: Path) -> None:
    """Two ranks that each kept their own copy, as without collectives; the copies may agree or not."""
    for name, value in (("same", 1.0), ("other", 2.0)):
        path = tmp_path / name
        for rank, held in ((0, 1.0), (1, value)):
            one = save_dcp(tmp_path / f"{name}{rank}", {"model": {"w": torch.full((4,), held)}})
            metadata = pickle.loads((one / ".metadata").read_bytes())
            for index, info in metadata.storage_data.items():
                metadata.storage_data[index] = replace(info, relative_path=f"__{rank}_0.distcp")
            path.mkdir(exist_ok=True)
            shutil.move(one / "__0_0.distcp", path / f"__{rank}_0.distcp")
            (path / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))
        found = verify(path)
        assert found.status == "sound"
        codes = [w.code for w in found.warnings if "placement" not in w.message]
        assert codes == ([] if name == "same" else ["replicas-differ"])


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64"],
)
def test_values(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    good = torch.linspace(-3, 3, 37).to(kind)
    bad, zero = good.clone(), torch.zeros(5).to(kind)
    zero[2] = -0.0
    bad[7] = torch.tensor(float("nan")).to(kind)
    endless = good.clone()
    has_infinity = dtype != "float8_e4m3fn"
    if has_infinity:
        endless[3] = torch.tensor(float("-inf")).to(kind)
    path = save_dcp(
        tmp_path / "c", {"model": {"good": good, "bad": bad, "zero": zero, "endless": endless}}
    )
    assert verify(path).status == "sound"
    found = verify(path, values=True)
    expected = [("non-finite", "model.bad")] + [("non-finite", "model.endless")] * has_infinity
    assert [(p.code, p.tensor) for p in found.problems] == expected
    assert "1 NaN and 0 infinite of 37" in found.problems[0].message
    assert [(w.code, "'model.zero'" in w.message) for w in found.warnings] == [("all-zero", True)]


def test_absurd_magnitudes_and_integers(tmp_path: Path) -> None:
    state = {
        "huge": torch.tensor([1.0, -1e38]),
        "large": torch.tensor([1.0, 1e20]),
        "ints": torch.full((3,), 2**62),
        "none": torch.zeros(3, dtype=torch.int32),
    }
    found = verify(save_dcp(tmp_path / "c", {"model": state}), values=True)
    assert found.status == "sound"
    assert [(w.code, "'model.huge'" in w.message) for w in found.warnings] == [("overflow", True)]


def test_values_of_strided_and_sharded_tensors(fixtures: Path) -> None:
    for name in ("strided-w1", "strided-w2", "fsdp2-tp-2x2", "dtypes-w2"):
        assert not verify(fixtures / "dcp" / name, values=True).problems


# ---------------------------------------------------------------- against


def test_tensors_that_cannot_be_put_together_leave_the_rest_compared(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for rank in range(2):
        tensors = {"w": torch.full((2, 3), float(rank)), "norm": torch.ones(3)}
        torch.save(tensors, ranks / f"consolidated.0{rank}.pth")
    save_file({"w": torch.ones(4, 3), "norm": torch.ones(3)}, tmp_path / "copy.safetensors")
    for copy in (ranks, tmp_path / "copy.safetensors"):
        found = verify(copy, against=ranks)
        assert (found.status, found.problems) == ("unproven", ())
        assert any("different plain tensor on each rank" in str(one) for one in found.warnings)
    save_file({"w": torch.ones(4, 3), "norm": torch.zeros(3)}, tmp_path / "copy.safetensors")
    found = verify(tmp_path / "copy.safetensors", against=ranks)
    assert [(one.code, one.tensor) for one in found.problems] == [("checksum", "norm")]


def test_a_conversion_is_proven(fixtures: Path, tmp_path: Path) -> None:
    source = fixtures / "dcp" / "fsdp2-w4"
    ema_ckpt.consolidate(source, tmp_path / "a.safetensors")
    ema_ckpt.consolidate(source, tmp_path / "b.pt", "model")
    ema_ckpt.reshard(source, tmp_path / "c", world_size=3)
    ema_ckpt.convert(source, tmp_path / "d.safetensors")
    ema_ckpt.consolidate(source, tmp_path / "e.safetensors", dtype="bf16")
    for out in sorted(tmp_path.iterdir()):
        found = verify(out, against=source)
        assert (found.status, found.problems) == ("sound", ()), out.name


def test_a_copy_by_other_tools_is_proven(tmp_path: Path) -> None:
    """Without digests of its own, against torch's checksums in column shards and strided items."""
    source = dcp_at(tmp_path / "c")
    loaded = {"layer.w": torch.arange(6.0).reshape(2, 3) + 0.5, "b": torch.full((2,), 7.5)}
    save_file(loaded, tmp_path / "hand.safetensors")
    assert verify(tmp_path / "hand.safetensors").status == "unproven"
    assert verify(tmp_path / "hand.safetensors", against=source).status == "sound"


def test_renamed_tensors_are_found_by_their_bytes(tmp_path: Path) -> None:
    source = dcp_at(tmp_path / "c")
    ema_ckpt.consolidate(source, tmp_path / "r.safetensors", rename=["layer.=block."])
    found = verify(tmp_path / "r.safetensors", against=source)
    assert found.status == "sound"
    assert [w.code for w in found.warnings if "under other names" in w.message] == ["renamed"]
    ema_ckpt.consolidate(source, tmp_path / "s.safetensors")
    found = verify(tmp_path / "s.safetensors", against=source)
    assert "renamed" not in [warning.code for warning in found.warnings]


@pytest.mark.parametrize("renames", [["emb=tok", "head=lm"], ["head=lm"], ["emb=tok"]])
def test_a_tied_average_is_found_under_each_of_its_new_names(
    renames: list[str], tmp_path: Path
) -> None:
    model = torch.nn.ModuleDict(
        {n: torch.nn.Linear(3, 3, bias=False) for n in ("emb", "mid", "head")}
    )
    model["head"].weight = model["emb"].weight
    averages = ema_ckpt.ShardedEMA(model, 0.9)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    state = {"model": model.state_dict(), "ema": averages.state_dict()}
    torch.save(state, tmp_path / "c.pt")
    out = tmp_path / "r.safetensors"
    ema_ckpt.consolidate(tmp_path / "c.pt", out, rename=renames, expand_ties=True)
    copied = load_file(tmp_path / "r.safetensors")
    assert len(copied) == 3
    assert verify(tmp_path / "r.safetensors", against=tmp_path / "c.pt").status == "sound"
    copied["more.weight"] = copied["mid.weight"].clone()
    save_file(copied, tmp_path / "more.safetensors")
    found = verify(tmp_path / "more.safetensors", against=tmp_path / "c.pt")
    assert [(p.code, p.tensor) for p in found.problems] == [("index-mismatch", "more.weight")]


@pytest.mark.parametrize(
    "options",
    [{}, {"tree": "model"}, {"dtype": "bf16"}, {"tree": "model", "dtype": "bf16"}],
    ids=["average", "live", "cast", "live-cast"],
)
def test_a_tree_whose_names_were_all_changed_is_found_by_its_bytes(
    options: dict[str, Any], tmp_path: Path
) -> None:
    weights = {f"net.{i}.{part}": torch.randn(3, 2) for i in range(3) for part in "ab"}
    live = {name: tensor + 1 for name, tensor in weights.items()}
    moments = {i: {"exp_avg": tensor * 2} for i, tensor in enumerate(weights.values())}
    optimizer = {"state": moments, "param_groups": [{"params": list(moments)}]}
    torch.save({"model": live, "ema": weights, "optimizer": optimizer}, tmp_path / "c.pt")
    out = tmp_path / "r.safetensors"
    renames = ["net.0=first", "net.1=second", "net.2=third"]
    ema_ckpt.consolidate(tmp_path / "c.pt", out, rename=renames, **options)
    assert verify(out, against=tmp_path / "c.pt").status == "sound"

    copied = load_file(out)
    changed = copied["second.a"] + 7
    save_file(copied | {"second.a": changed}, tmp_path / "changed.safetensors")
    found = verify(tmp_path / "changed.safetensors", against=tmp_path / "c.pt")
    assert ("index-mismatch", "second.a") in [(p.code, p.tensor) for p in found.problems]
    del copied["second.a"]
    save_file(copied, tmp_path / "lost.safetensors")
    found = verify(tmp_path / "lost.safetensors", against=tmp_path / "c.pt")
    assert [p.code for p in found.problems] == ["incomplete"]


@pytest.mark.parametrize("prefixes", [("model.", ""), ("", "net."), ("model.", "net.")])
def test_weights_exchanged_below_another_prefix_differ(
    prefixes: tuple[str, str], tmp_path: Path
) -> None:
    before, after = prefixes
    weights = {f"{i}.weight": torch.randn(3, 2) for i in range(4)}
    save_file({before + name: weights[name] for name in weights}, tmp_path / "a.safetensors")
    save_file({after + name: weights[name] for name in weights}, tmp_path / "b.safetensors")
    assert verify(tmp_path / "b.safetensors", against=tmp_path / "a.safetensors").status == "sound"
    weights["1.weight"], weights["2.weight"] = weights["2.weight"], weights["1.weight"]
    save_file({after + name: weights[name] for name in weights}, tmp_path / "c.safetensors")
    found = verify(tmp_path / "c.safetensors", against=tmp_path / "a.safetensors")
    expected = [("checksum", f"{after}{i}.weight") for i in (1, 2)]
    assert [(p.code, p.tensor) for p in found.problems] == expected


@pytest.mark.parametrize("tree", ["model", "ema"])
def test_a_tree_under_the_name_of_another_differs(tree: str, tmp_path: Path) -> None:
    trees = {name: {f"{i}.weight": torch.randn(2) for i in range(3)} for name in ("model", "ema")}
    state = {f"{name}.{key}": value for name in trees for key, value in trees[name].items()}
    save_file(state, tmp_path / "a.safetensors")
    other = trees["model" if tree == "ema" else "ema"]
    save_file({f"{tree}.{k}": v for k, v in other.items()}, tmp_path / "b.safetensors")
    found = verify(tmp_path / "b.safetensors", against=tmp_path / "a.safetensors")
    assert [(p.code, p.tensor) for p in found.problems] == [
        ("checksum", f"{tree}.{i}.weight") for i in range(3)
    ]


def test_exchanged_weights_differ_beside_a_renamed_one(tmp_path: Path) -> None:
    state = {f"{name}.{part}": torch.randn(2) for name in ("model", "ema") for part in "abc"}
    save_file(state, tmp_path / "a.safetensors")
    copied = {"ema.a": state["ema.b"], "ema.b": state["ema.a"], "ema.renamed": state["ema.c"]}
    save_file(copied, tmp_path / "b.safetensors")
    found = verify(tmp_path / "b.safetensors", against=tmp_path / "a.safetensors")
    assert [p.tensor for p in found.problems if p.code == "checksum"] == ["ema.a", "ema.b"]


@pytest.mark.parametrize("tree", ["model", "ema"])
def test_equal_tensors_of_another_tree_are_no_part_of_a_copy(tree: str, tmp_path: Path) -> None:
    state = {
        f"{name}.{part}": torch.zeros(2) if part == "bias" else torch.randn(2)
        for name in ("model", "ema")
        for part in ("weight", "bias", "scale")
    }
    save_file(state, tmp_path / "a.safetensors")
    copied = {name: tensor for name, tensor in state.items() if name.startswith(tree)}
    save_file(copied | {"more": torch.zeros(2)}, tmp_path / "more.safetensors")
    found = verify(tmp_path / "more.safetensors", against=tmp_path / "a.safetensors")
    assert [p.code for p in found.problems] == ["incomplete"]
    copied["renamed"] = copied.pop(f"{tree}.bias")
    save_file(copied, tmp_path / "b.safetensors")
    assert verify(tmp_path / "b.safetensors", against=tmp_path / "a.safetensors").status == "sound"


@pytest.mark.parametrize("trees", [["model"], ["ema"], ["model", "ema"]])
@pytest.mark.parametrize("keep_prefixes", [False, True])
def test_trees_without_their_wrapper_prefixes_are_whole(
    trees: list[str], keep_prefixes: bool, tmp_path: Path
) -> None:
    weights = [f"module.{i}.weight" for i in range(3)]
    state = {name: {w: torch.randn(2) for w in weights} for name in ("model", "ema", "teacher")}
    torch.save(state, tmp_path / "a.pt")
    out = tmp_path / "b.safetensors"
    ema_ckpt.convert(tmp_path / "a.pt", out, tree=trees, keep_prefixes=keep_prefixes)
    found = verify(out, against=tmp_path / "a.pt")
    assert (found.status, found.problems) == ("sound", ())
    copied = load_file(out)
    lost = min(copied)
    del copied[lost]
    save_file(copied, tmp_path / "c.safetensors")
    found = verify(tmp_path / "c.safetensors", against=tmp_path / "a.pt")
    assert [problem.code for problem in found.problems] == ["incomplete"]


def test_a_renamed_copy_of_one_of_many_trees_is_compared_with_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"part{i}_ema.{k}.w": torch.tensor([i, k]) for i in range(60) for k in range(2)}
    save_file(state, tmp_path / "a.safetensors")
    copied = {f"x{k}.w": state[f"part7_ema.{k}.w"] for k in range(2)}
    save_file(copied, tmp_path / "b.safetensors")
    asked: list[object] = []
    problems = verify_against._Match.problems.fget
    monkeypatch.setattr(
        verify_against._Match, "problems", property(lambda m: asked.append(m) or problems(m))
    )
    assert verify(tmp_path / "b.safetensors", against=tmp_path / "a.safetensors").status == "sound"
    assert 60 <= len(asked) < 60 * 10


def test_trees_that_were_all_renamed_are_found_beside_one_that_keeps_its_inner_names(
    tmp_path: Path,
) -> None:
    state = {f"{name}.{i}.weight": torch.randn(2) for name in ("model", "ema") for i in range(3)}
    save_file(state, tmp_path / "a.safetensors")
    out = tmp_path / "b.safetensors"
    ema_ckpt.convert(tmp_path / "a.safetensors", out, rename=["model.=", "ema=average"])
    assert verify(out, against=tmp_path / "a.safetensors").status == "sound"
    copied = load_file(out)
    copied["0.weight"], copied["1.weight"] = copied["1.weight"], copied["0.weight"]
    save_file(copied, tmp_path / "c.safetensors")
    found = verify(tmp_path / "c.safetensors", against=tmp_path / "a.safetensors")
    assert ("checksum", "0.weight") in [(p.code, p.tensor) for p in found.problems]


@pytest.mark.parametrize("change", ["value", "lost", "extra", "shape"])
def test_a_wrong_conversion_is_refuted(change: str, tmp_path: Path) -> None:
    source = dcp_at(tmp_path / "c")
    state = {"layer.w": torch.arange(6.0).reshape(2, 3) + 0.5, "b": torch.full((2,), 7.5)}
    expected = {
        "value": ("checksum", "b"),
        "lost": ("incomplete", "b"),
        "extra": ("index-mismatch", "x"),
        "shape": ("checksum", "layer.w"),
    }
    if change == "value":
        state["b"][1] = 7.25
    elif change == "lost":
        del state["b"]
    elif change == "extra":
        state["x"] = torch.ones(9)
    else:
        state["layer.w"] = state["layer.w"].reshape(3, 2)
    save_file(state, tmp_path / "out.safetensors")
    found = verify(tmp_path / "out.safetensors", against=source)
    assert found.status == "damaged"
    assert [(p.code, p.tensor) for p in found.problems] == [expected[change]]


@pytest.mark.parametrize("is_cast_the_copy", [True, False])
def test_a_counter_that_was_cast_too_is_damage(is_cast_the_copy: bool, tmp_path: Path) -> None:
    """`{name: t.half() for …}` casts a whole number, which no verb does."""
    state = {"w": torch.arange(6.0), "num_batches_tracked": torch.tensor(3)}
    save_file(state, tmp_path / "a.safetensors")
    save_file({name: t.half() for name, t in state.items()}, tmp_path / "b.safetensors")
    origin, copy = ("a", "b") if is_cast_the_copy else ("b", "a")
    found = verify(tmp_path / f"{copy}.safetensors", against=tmp_path / f"{origin}.safetensors")
    assert found.status == "damaged"
    (problem,) = found.problems
    assert (problem.code, problem.tensor) == ("checksum", "num_batches_tracked")
    assert ("int64" if is_cast_the_copy else "float16") in problem.message


# ---------------------------------------------------------------- the command


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ema_ckpt", "verify", *map(str, arguments)]
    return subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, check=False, env=os.environ.copy()
    )


@pytest.mark.parametrize(
    ("name", "code", "status"),
    [
        ("dcp/fsdp2-w4", 0, "sound"),
        ("nasty/flipped-byte", 1, "damaged"),
        ("hf/sharded", 3, "unproven"),
        ("nasty/missing-metadata", 1, "damaged"),
        ("nasty/hostile-metadata", 1, "damaged"),
    ],
)
def test_exit_codes_and_json(name: str, code: int, status: str, fixtures: Path) -> None:
    ended = run(fixtures / name, "--json")
    assert ended.returncode == code
    document = json.loads(ended.stdout)
    assert document["status"] == status
    fields = "path resolved status checked_bytes unchecked_bytes problems warnings"
    assert set(document) == set(fields.split())
    assert all(
        set(problem) == {"code", "tensor", "file", "message"} for problem in document["problems"]
    )


@pytest.mark.parametrize("what", ["absent", "nothing", "text.txt", "pipe"])
def test_no_checkpoint_is_trouble(what: str, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    os.mkfifo(tmp_path / "pipe")
    ended = run(tmp_path / what, "--json")
    assert ended.returncode == 2
    assert json.loads(ended.stdout)["error"]["code"] in ("not-found", "not-a-checkpoint")


def test_neither_torch_nor_numpy_is_imported(fixtures: Path) -> None:
    code = (
        "import sys, ema_ckpt\n"
        f"for name in ('dcp/fsdp2-w4', 'torch/plain.pt', 'hf/sharded'): ema_ckpt.verify({str(fixtures)!r} + '/' + name)\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_workers_agree(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records longer than a segment are summed by several workers and joined."""
    monkeypatch.setattr("ema_ckpt.analysis.checksum_pass._SEGMENT_NBYTES", 1000)
    monkeypatch.setattr("ema_ckpt.analysis.checksum_pass._BATCH_NBYTES", 2000)
    state = {f"t{i}": torch.randn(37, 61 + i) for i in range(8)}
    path = save_dcp(tmp_path / "c", {"model": state})
    found = verify(path, threads=threads)
    assert found.status == "sound"
    assert found.checked_bytes == sum(t.numel() * 4 for t in state.values())
    raw = bytearray((path / "__0_0.distcp").read_bytes())
    needle = state["t5"].numpy().tobytes()
    raw[raw.index(needle) + len(needle) - 1] ^= 128
    (path / "__0_0.distcp").write_bytes(raw)
    assert [(p.code, p.tensor) for p in verify(path, threads=threads).problems] == [
        ("checksum", "model.t5")
    ]


@pytest.mark.parametrize("part", ["", "ema/"])
@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_a_shard_that_does_not_tell_what_it_holds_is_damaged(
    part: str, damage: str, fixtures: Path, tmp_path: Path
) -> None:
    home = tmp_path / "whole"
    for folder in {"": [""], "ema/": ["model", "ema"]}[part]:
        home.mkdir(exist_ok=True)
        ema_ckpt.consolidate(
            fixtures / "tiny-lm", home / folder, max_shard_size="200kB", overwrite=not folder
        )
    assert verify(home).status == "sound"
    shard = home / f"{part}model-00002-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[3] ^= 2 if damage == "flipped" else 0
    shard.write_bytes({"empty": b"", "cut": data[:100], "flipped": data}[damage])
    found = verify(home, values=True)
    assert found.status == "damaged"
    (problem,) = found.problems
    assert (problem.code, problem.file) == ("truncated-file", f"{part}{shard.name}")
    assert "model.layers" in problem.message


@pytest.mark.parametrize(
    ("rank", "with_data"), [(0, True), (1, True), (2, True), (0, False), (1, False)]
)
def test_a_rank_whose_own_metadata_is_missing_is_named(
    rank: int, with_data: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "step_13"
    launcher.run(3, _save_without_collectives, str(folder))
    assert verify(folder).status == "sound"
    (folder / f"__{rank}.metadata").unlink()
    if not with_data:
        (folder / f"__{rank}_0.distcp").unlink()
    (problem,) = verify(folder).problems
    assert (problem.code, problem.file) == ("missing-metadata", f"__{rank}.metadata")
    with pytest.raises(EmaCkptError, match=rf"step_13: '__{rank}\.metadata': missing"):
        ema_ckpt.latest(tmp_path / "runs")
    with pytest.raises(EmaCkptError, match=rf"__{rank}\.metadata") as caught:
        ema_ckpt.consolidate(folder, tmp_path / "out.pt")
    assert caught.value.code == "missing-metadata"


def _save_without_collectives(folder: str) -> None:
    rank = dist.get_rank()
    tree = {"model": {f"expert{rank}": torch.full((4,), float(rank)), "shared": torch.ones(3)}}
    dcp.save(tree, storage_writer=FileSystemWriter(folder), use_collectives=False)


@pytest.mark.parametrize(
    ("old", "new", "place", "status"),
    [
        (b"ema.weights.w", b"ema.weights.v", 1, "damaged"),  # the key in planner_data
        (b"weights", b"weighty", 1, "damaged"),  # an element of its path
        (b"ema.weights.w", b"ema.weights.v", 0, "damaged"),  # the key of the entry
        (b"note.text", b"note.texu", 0, "damaged"),  # and of an object's
        (b"TensorStorageMetadata", b"TensorStorageMetadatb", 0, "unproven"),
        (b"float32", b"gloat32", 0, "damaged"),
    ],
)
def test_metadata_that_contradicts_itself(
    old: bytes, new: bytes, place: int, status: str, fixtures: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(fixtures / "nasty/base", tmp_path / "c")
    data = (folder / ".metadata").read_bytes()
    at = -1
    for _ in range(place + 1):
        at = data.index(old, at + 1)
    (folder / ".metadata").write_bytes(data[:at] + new + data[at + len(old) :])
    assert verify(folder).status == status


def test_a_digest_of_what_is_not_there(fixtures: Path, tmp_path: Path) -> None:
    for name, left_out in (("full", ()), ("part", ("model.*norm*",))):
        ema_ckpt.reshard(fixtures / "tiny-lm", tmp_path / name, 2, exclude=left_out)
    record = json.loads((tmp_path / "full/ema_ckpt.json").read_text())
    for key in ("describes", "chunks", "crc32"):  # as records once were
        del record[key]
    (tmp_path / "part/ema_ckpt.json").write_text(json.dumps(record))
    found = verify(tmp_path / "part")
    assert found.status == "damaged"
    assert {p.code for p in found.problems} == {"index-mismatch"}
    assert all(
        "norm" in str(p.tensor) and "delete ema_ckpt.json" in p.message for p in found.problems
    )


def test_a_record_is_ignored_after_a_save_over_a_directory_of_ours(tmp_path: Path) -> None:
    save_dcp(tmp_path / "a", {"model": {"w": torch.ones(3)}})
    ema_ckpt.reshard(tmp_path / "a", tmp_path / "r", 1)
    save_dcp(tmp_path / "r", {"model": {"w": torch.zeros(3)}})
    found = verify(tmp_path / "r")
    assert (found.status, [warning.code for warning in found.warnings]) == ("sound", ["stale-file"])
    result = ema_ckpt.consolidate(tmp_path / "r", tmp_path / "out.pt")
    assert [warning.code for warning in result.warnings] == ["stale-file"]
    assert torch.load(tmp_path / "out.pt")["w"].tolist() == [0, 0, 0]
    (tmp_path / "r/ema_ckpt.json").unlink()
    assert not verify(tmp_path / "r").warnings


def test_nothing_is_no_conversion_of_something(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    torch.save({}, tmp_path / "empty.pt")
    (problem,) = verify(tmp_path / "empty.pt", against=tmp_path / "a.pt").problems
    assert problem.code == "incomplete"


@pytest.mark.parametrize("field", ["name of version", "folder", "method", "flags"])
def test_a_directory_of_an_archive_that_torch_would_not_load(field: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.randn(4)}, path)
    data = bytearray(path.read_bytes())
    record = {"name of version": b"x/version", "folder": b"x/data/0"}.get(field, b"x/data/0")
    at = data.rfind(record)  # in the central directory
    data[{"name of version": at + 6, "folder": at, "method": at - 36, "flags": at - 38}[field]] ^= 1
    path.write_bytes(data)
    assert verify(path).status == "damaged"
    with pytest.raises(RuntimeError):
        torch.load(path, weights_only=True)


class Renaming(DefaultSavePlanner):
    """Stores everything under other names, as planners of users' own may."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [
            replace(item, index=replace(item.index, fqn=f"r_{item.index.fqn}"))
            for item in plan.items
        ]
        self.plan = replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(replace(index, fqn=index.fqn.removeprefix("r_")))


class Shifted(Renaming):
    """Numbers layers by the stage of a pipeline: all names are one character away from those of the state dict."""

    def create_local_plan(self) -> SavePlan:
        plan = DefaultSavePlanner.create_local_plan(self)
        moved = {
            name: name.replace("layers.0", "layers.4").replace("layers.1", "layers.5")
            for name in self.mappings
        }
        self.mappings = {moved[name]: path for name, path in self.mappings.items()}
        items = [
            replace(item, index=replace(item.index, fqn=moved[item.index.fqn]))
            for item in plan.items
        ]
        self.plan = replace(plan, items=items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: Any) -> Any:
        name = index.fqn.replace("layers.4", "layers.0").replace("layers.5", "layers.1")
        return DefaultSavePlanner.lookup_object(self, replace(index, fqn=name))


@pytest.mark.filterwarnings("ignore")
def test_what_a_stage_of_a_pipeline_renumbered_is_sound(tmp_path: Path) -> None:
    tree = {"layers": {str(n): {"w": torch.full((3,), float(n))} for n in range(2)}}
    dcp.save(tree, checkpoint_id=tmp_path / "c", planner=Shifted(), no_dist=True)
    assert verify(tmp_path / "c").status == "sound"


@pytest.mark.filterwarnings("ignore")
def test_what_a_planner_renamed_is_sound(tmp_path: Path) -> None:
    dcp.save(
        {"w": torch.ones(3), "v": torch.ones(2)},
        checkpoint_id=tmp_path / "c",
        planner=Renaming(),
        no_dist=True,
    )
    assert verify(tmp_path / "c").status == "sound"


class Unknown:
    """A class of metadata that is not known yet."""


@pytest.mark.parametrize(
    "change", ["object without a place", "place without a chunk", "unknown class"]
)
def test_lists_of_metadata_that_do_not_fit(change: str, tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "c", {"w": torch.ones(4), "v": torch.ones(2), "step": 1})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    places, entries = metadata.storage_data, metadata.state_dict_metadata
    if change == "object without a place":
        metadata.storage_data = {
            index: place for index, place in places.items() if index.fqn != "step"
        }
    elif change == "place without a chunk":
        odd = replace(next(index for index in places if index.fqn == "w"), offset=torch.Size([2]))
        places[odd] = places[next(index for index in places if index.fqn == "w")]
    else:
        metadata.state_dict_metadata = dict.fromkeys(entries, Unknown())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    found = verify(folder)
    if change == "unknown class":
        assert found.status == "unproven"
        assert found.unchecked_bytes
        done = ema_ckpt.convert(folder, tmp_path / "out.safetensors")
        assert sorted(item.name for item in done.skipped) == ["step", "v", "w"]
    else:
        assert {p.code for p in found.problems} == {
            "incomplete" if "object" in change else "index-mismatch"
        }


def test_a_record_of_other_files_says_nothing(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(3)}}, tmp_path / "p.pt")
    ema_ckpt.consolidate(tmp_path / "p.pt", tmp_path / "hf")
    save_dcp(tmp_path / "hf", {"z": torch.ones(3)})
    assert verify(tmp_path / "hf").status == "sound"


def test_what_is_unproven_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "w.safetensors")
    result = verify(tmp_path / "w.safetensors")
    assert result.status == "unproven"
    assert "'a', 'b'" in result.warnings[-1].message


def test_a_place_that_holds_a_plain_value_is_no_tensors(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "c", {"w": torch.ones(4), "step": 1})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    places = metadata.storage_data
    step = next(place for index, place in places.items() if index.fqn == "step")
    metadata.storage_data = {i: step if i.fqn == "w" else place for i, place in places.items()}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for quick in (False, True):
        found = verify(folder, quick=quick)
        assert found.status == "damaged"
        assert [(p.code, p.tensor) for p in found.problems] == [("index-mismatch", "w")]
    with pytest.raises(EmaCkptError) as caught:
        ema_ckpt.convert(folder, tmp_path / "out.pt")
    assert caught.value.code == "index-mismatch"
