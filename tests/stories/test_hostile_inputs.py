"""Inputs of a few bytes that promise much, and a machine that refuses: soon, in one line, never a wrong verdict."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from ema_ckpt import verify
from tests.checkpoints import dcp_at, save_dcp

REPO = Path(__file__).parents[2]
FAR = "__1000000000000000000_0.distcp"


def command(*words: object, **how: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ema_ckpt", *map(str, words)]
    return subprocess.run(
        argv, cwd=REPO, capture_output=True, text=True, timeout=120, check=False, **how
    )


def one_line(ended: subprocess.CompletedProcess[str]) -> bool:
    errors = [line for line in ended.stderr.splitlines() if not line.startswith("Warning: ")]
    return len(errors) == 1 and errors[0].startswith("Error: ") and len(errors[0]) < 5000


# ---------------------------------------------------------------- ranks that a name promises


@pytest.fixture
def far_rank(tmp_path: Path) -> Path:
    """A complete checkpoint whose only data file is said to be of rank 10^18."""
    path = dcp_at(tmp_path / "far")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    places = metadata.storage_data
    metadata.storage_data = {k: replace(v, relative_path=FAR) for k, v in places.items()}
    (path / "__0_0.distcp").rename(path / FAR)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_ranks_are_not_made_up(options: tuple[str, ...], far_rank: Path, tmp_path: Path) -> None:
    ended = command("convert", far_rank, tmp_path / "out", "--to", "dcp", *options)
    assert ended.returncode == 2
    assert one_line(ended), ended.stderr
    assert "give --world-size" in ended.stderr
    assert not (tmp_path / "out").exists()


def test_a_given_world_size_or_another_format_goes(far_rank: Path, tmp_path: Path) -> None:
    for words in (("--to", "dcp", "--world-size", "2"), ("--to", "safetensors")):
        out = tmp_path / words[1]
        assert command("convert", far_rank, out, *words).returncode == 0
        assert command("verify", out, "--against", far_rank).returncode == 0


# ---------------------------------------------------------------- views that expand


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A tensor of 2^40 elements that is stored as one."""
    state = {"model": {"w": torch.zeros(1).expand(2**40), "b": torch.ones(3)}}
    torch.save(state, tmp_path / "wide.pt")
    return tmp_path / "wide.pt"


@pytest.mark.parametrize("verb", ["consolidate", "convert", "diff"])
def test_an_expanded_view_is_refused_soon(verb: str, wide: Path, tmp_path: Path) -> None:
    other = wide if verb == "diff" else tmp_path / "out.safetensors"
    ended = command(verb, wide, other)
    assert ended.returncode == 2
    assert one_line(ended), ended.stderr
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "code"), [((), 0), (("--values",), 0), (("--quick",), 0), (("--against", ""), 3)]
)
def test_an_expanded_view_is_verified_by_what_is_stored(
    options: tuple[str, ...], code: int, wide: Path
) -> None:
    """Bytes that are not read are not proven, and never called damaged."""
    words = [word or str(wide) for word in options]
    ended = command("verify", wide, *words, "--json")
    assert ended.returncode == code
    assert not json.loads(ended.stdout)["problems"]


def test_a_copy_is_not_compared_with_an_expanded_view(wide: Path, tmp_path: Path) -> None:
    """That the source's tensor is not read is no damage of the copy, under its name or another."""
    state = torch.load(wide, weights_only=True)
    for name in ("w", "x"):
        torch.save({"model": {name: state["model"]["w"], "b": torch.ones(3)}}, tmp_path / "copy.pt")
        found = verify(tmp_path / "copy.pt", against=wide)
        codes = {(problem.code, problem.tensor) for problem in found.problems}
        assert codes <= (
            {("index-mismatch", "model.x"), ("incomplete", "model.w")} if name == "x" else set()
        )


def test_the_rest_beside_an_expanded_view_is_written(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "rest.pt"
    assert command("consolidate", wide, out, "--exclude", "w").returncode == 0
    assert torch.equal(torch.load(out, weights_only=True)["b"], torch.ones(3))


# ---------------------------------------------------------------- a machine that refuses


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize("verb", ["verify", "verify --quick", "inspect"])
def test_a_shard_that_may_not_be_read_is_no_damage(verb: str, tmp_path_factory) -> None:
    folder = Path("/tmp") / f"ema-ckpt-nobody-{os.getpid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    try:
        path = dcp_at(folder / "c")
        for place in (path, *path.iterdir()):
            place.chmod(0o755)
        (path / "__0_0.distcp").chmod(0)
        name, *options = verb.split()
        code = (
            "import os, sys; from ema_ckpt.cli.main import script\n"
            "import ema_ckpt.cli.commands, ema_ckpt.ops.verify, ema_ckpt.ops.consolidate, ema_ckpt.ops.diff, ema_ckpt.ops.inspect\n"
            "import ema_ckpt.formats.dcp.reader, ema_ckpt.formats.torch_file.writer, ema_ckpt.cli.output, ema_ckpt.cli.progress\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534); os.chdir('/')\n"
            "script()"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code, name, path, *options],
            cwd=REPO, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ended.returncode == 2, ended.stdout + ended.stderr
        assert "damaged" not in ended.stdout
        assert "Permission denied" in ended.stderr
    finally:
        shutil.rmtree(folder)


# ---------------------------------------------------------------- one text, referred to over and over


@pytest.mark.parametrize("kind", ["texts", "texts in dicts", "keys", "bytes"])
@pytest.mark.parametrize(
    "verb",
    [
        ("convert", "out.pt"),
        ("convert", "out.safetensors"),
        ("convert", "out"),
        ("reshard", "out", "--world-size", "2"),
    ],
    ids=lambda verb: f"{verb[0]} {verb[1]}",
)
def test_one_long_text_is_not_written_a_thousand_times(
    kind: str, verb: tuple[str, ...], tmp_path: Path
) -> None:
    text = "a" * 10**6
    several = {
        "texts": [text] * 1000,
        "texts in dicts": [{"text": text} for _ in range(1000)],
        "keys": [{text: 1} for _ in range(1000)],
        "bytes": [text.encode()] * 1000,
    }[kind]
    source = tmp_path / "source.pt"
    torch.save({"model": {"w": torch.ones(3)}, "n": several}, source)
    assert source.stat().st_size < 3 * 10**6
    ended = command(verb[0], source, tmp_path / verb[1], *verb[2:])
    assert ended.returncode == 2
    assert one_line(ended), ended.stderr[:2000]
    assert re.search("the same texts are referred to .*over and over", ended.stderr)
    assert re.search("take more than [0-9]{8,9} bytes, the limit", ended.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


def test_an_object_of_a_dcp_with_one_long_text_is_not_written(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3)}, "n": (("a" * 10**6,) * 10,) * 100}
    save_dcp(tmp_path / "source", state)
    ended = command("convert", tmp_path / "source", tmp_path / "out.pt", "--strict")
    assert ended.returncode != 0
    assert one_line(ended), ended.stderr[:2000]
    ended = command("convert", tmp_path / "source", tmp_path / "out.pt")
    assert ended.returncode == 0
    assert "skipped n" in ended.stdout + ended.stderr
    assert (tmp_path / "out.pt").stat().st_size < 10**6


# ---------------------------------------------------------------- pieces, dimensions and containers


def rewritten(path: Path, change: Callable[[Metadata], object]) -> Path:
    save_dcp(path, {"model": {"w": torch.arange(12.0).reshape(3, 4)}, "step": 3})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    return path


def one_piece_many_times(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["model.w"]
    entry.chunks[:] = entry.chunks * 1000
    metadata.state_dict_metadata.update((f"model.{number}", entry) for number in range(20_000))


def one_piece_of_one_tensor(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["model.w"]
    entry.chunks[:] = entry.chunks * 300_000


def many_dimensions(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["model.w"]
    entry.size = torch.Size([0, *[2**40] * 60_000])
    entry.chunks[:] = [ChunkStorageMetadata(torch.Size([0] * 60_001), entry.size)]


def many_dimensions_of_many_pieces(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["model.w"]
    entry.size, corner = torch.Size([1] * 100_000), torch.Size([0] * 100_000)
    entry.chunks[:] = [ChunkStorageMetadata(corner, entry.size) for _ in range(10_000)]


def many_containers(metadata: Metadata) -> None:
    metadata.planner_data["model.w"] = ("model", *[0] * 300_000)


@pytest.mark.parametrize("verb", ["verify", "convert"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (one_piece_many_times, "listed over and over"),
        (one_piece_of_one_tensor, "listed over and over"),
        (many_dimensions, "impossible shape"),
        (many_dimensions_of_many_pieces, "over and over"),
        (many_containers, "nested more than 100 deep"),
    ],
)
def test_metadata_of_a_megabyte_is_refused_soon(
    verb: str, change: Callable[[Metadata], object], problem: str, tmp_path: Path
) -> None:
    source = rewritten(tmp_path / "source", change)
    assert (source / ".metadata").stat().st_size < 1_100_000
    began = time.monotonic()
    ended = command(verb, source, *([tmp_path / "out.pt"] if verb == "convert" else []))
    assert ended.returncode in (1, 2)
    assert problem in ended.stdout + ended.stderr
    assert len(ended.stdout + ended.stderr) < 2000
    assert time.monotonic() - began < 30


def test_paths_through_one_long_key_take_its_memory_once(tmp_path: Path) -> None:
    def change(metadata: Metadata) -> None:
        key = "x" * 500_000
        for number in range(10_000):
            name = f"w{number}"
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata["model.w"]
            metadata.planner_data[name] = (key, name)

    source = rewritten(tmp_path / "source", change)
    ended = command("verify", source, preexec_fn=limit_memory)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "damaged" in ended.stdout


@pytest.mark.parametrize("sizes", [[0, *[2**40] * 60_000], [2**40] * 60_000])
def test_a_header_of_many_dimensions_is_refused_soon(sizes: list[int], tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": sizes, "data_offsets": [0, 0]}}).encode()
    source = tmp_path / "source.safetensors"
    source.write_bytes(len(header).to_bytes(8, "little") + header)
    began = time.monotonic()
    ended = command("convert", source, tmp_path / "out.pt")
    assert ended.returncode == 2
    assert one_line(ended), ended.stderr[:2000]
    assert "impossible shape" in ended.stderr
    assert time.monotonic() - began < 5


def test_shapes_of_no_elements_that_torch_has_are_read(tmp_path: Path) -> None:
    state = {"a": torch.empty(0, 2**40), "b": torch.empty(2**62, 0), "c": torch.empty(1, 0, 3)}
    torch.save(state, tmp_path / "source.pt")
    assert command("convert", tmp_path / "source.pt", tmp_path / "out.pt").returncode == 0
    found = torch.load(tmp_path / "out.pt")
    assert {name: one.shape for name, one in found.items()} == {
        name: one.shape for name, one in state.items()
    }


# ---------------------------------------------------------------- values that a pickle uses again

COUNT = 200_000
PUT, GET = b"q\0", b"h\0"  # under number 0 of the memo, and from there
LIST_OF_NUMBERS = b"](" + b"K\0" * COUNT + b"e" + PUT + b"0"
TUPLE_OF_NUMBERS = b"(" + b"K\0" * COUNT + b"t" + PUT + b"0"


def pickled_text(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


LONG_TEXT = pickled_text("x" * 500_000) + PUT + b"0"
LONG_NUMBER = b"\x8b" + (300_000).to_bytes(4, "little") + b"\x7f" * 300_000 + PUT + b"0"
CALL_AGAIN = PUT.replace(b"\0", b"\1") + b"0](" + (b"h\1" + GET + b"\x85R") * COUNT + b"e."
LEAVES = b"".join(pickled_text(f"k{number}") + b"K\1" for number in range(60_000))
USED_AGAIN = {
    "a tuple as a key": TUPLE_OF_NUMBERS + b"}(" + (GET + b"N") * COUNT + b"u.",
    "a number as a key": LONG_NUMBER + b"}(" + (GET + b"N") * COUNT + b"u.",
    "a tuple as an item": TUPLE_OF_NUMBERS + b"\x8f(" + GET * COUNT + b"\x90.",
    "text in a key": LONG_TEXT + b"}(" + b"(" + GET * COUNT + b"tNu.",
    "text before names": b"}" + pickled_text("x" * 500_000) + b"}(" + LEAVES + b"us.",
    "a set of a list": LIST_OF_NUMBERS + b"cbuiltins\nset\n" + CALL_AGAIN,
    "a torch.Size of a list": LIST_OF_NUMBERS + b"ctorch\nSize\n" + CALL_AGAIN,
    "a torch.device of text": LONG_TEXT + b"ctorch\ndevice\n" + CALL_AGAIN,
}


@pytest.mark.parametrize("kind", USED_AGAIN)
def test_what_a_pickle_uses_over_and_over_is_refused_soon(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source.pt"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("source/data.pkl", b"\x80\x02" + USED_AGAIN[kind])
        archive.writestr("source/version", "3\n")
    assert source.stat().st_size < 2_000_000
    began = time.monotonic()
    ended = command("convert", source, tmp_path / "out.safetensors", preexec_fn=limit_memory)
    assert ended.returncode == 2
    assert one_line(ended), ended.stderr[:2000]
    assert "over and over" in ended.stderr
    assert time.monotonic() - began < 20


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))


def test_one_tensor_in_very_many_places_is_refused_soon(tmp_path: Path) -> None:
    one = torch.ones(1)
    torch.save([one] * 500_000, tmp_path / "source.pt")
    ended = command("verify", tmp_path / "source.pt")
    assert ended.returncode == 2
    assert "the same tensors are referred to over and over" in ended.stderr


def test_tensors_and_texts_that_are_used_in_several_places_are_read(tmp_path: Path) -> None:
    one, text = torch.ones(2), "x" * 1000
    state = {f"w{number}": one for number in range(2000)} | {(text, number): 1 for number in "ab"}
    torch.save(state, tmp_path / "source.pt")
    assert command("convert", tmp_path / "source.pt", tmp_path / "out.pt").returncode == 0
    found = torch.load(tmp_path / "out.pt")
    assert found.keys() == state.keys()


@pytest.mark.parametrize("place", ["groups", "items", "dtype", "file", "version"])
def test_placements_that_are_listed_over_and_over_are_refused_soon(
    place: str, tmp_path: Path
) -> None:
    deep: Any = ["x"]
    for _ in range(60):
        deep = [deep, deep]
    data = {"global_shape": [1], "dtype": "float32", "global_offsets": [[0]]}
    data |= {"local_sizes": [[1]], "local_offsets": [[0]]}
    if place == "dtype":
        data["dtype"] = deep
    group = {"sharding_metadata": {"type": "default_tensor_v1", "data": data}, "ranks": (0,)}
    groups = [group] * (30_000 if place in ("groups", "items") else 1)
    paths = {f'["w{n}"]': groups for n in range(30_000 if place == "groups" else 1)}
    layout = {"file_path": deep, "serialization_format": {"type": "TorchSerialization"}}
    item = {"nested_path_to_metadata": paths}
    item["rank_to_layout_info"] = {0: layout if place == "file" else None}
    names = [f"m{n}" for n in range(30_000 if place == "items" else 1)]
    document = {"metadata": dict.fromkeys(names, item), "world_size": 1}
    document["version"] = deep if place == "version" else "2.0"
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(document, 4))
    assert (tmp_path / "metadata.pkl").stat().st_size < 1_000_000
    began = time.monotonic()
    ended = command("verify", tmp_path, preexec_fn=limit_memory)
    assert ended.returncode in (1, 2)
    assert 0 < len(ended.stdout + ended.stderr) < 2000
    assert "Traceback" not in ended.stderr
    assert time.monotonic() - began < 20
