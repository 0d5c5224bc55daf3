"""Interrupted and refused writes: what `--resume` may trust, and what is compared again."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ema_ckpt import EmaCkptError, consolidate, convert, reshard
from tests.checkpoints import save_dcp


def _damage(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "tensor", [torch.randn(3000, 1000), torch.randn(1000, 3000).t()], ids=["plain", "strided"]
)
def test_a_damaged_source_is_refused_every_time(tmp_path: Path, tensor: torch.Tensor) -> None:
    save_dcp(tmp_path / "source", {"model": {"weight": tensor}})
    _damage(tmp_path / "source")
    for _ in range(3):
        for write in (
            lambda: consolidate(tmp_path / "source", tmp_path / "out.safetensors", resume=True),
            lambda: reshard(tmp_path / "source", tmp_path / "out", 2, resume=True),
        ):
            with pytest.raises(EmaCkptError) as caught:
                write()
            assert caught.value.code == "checksum"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def _killed_at(progress_nbytes: int, source: Path, out: Path) -> None:
    """A child process that is killed once it has written so many bytes."""
    written = 0

    def progress(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        if written >= progress_nbytes:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        consolidate(
            source, out, resume=True, threads=1, dtype="bf16", progress=progress, max_memory="4MiB"
        )
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_damage_after_a_killed_run_is_found(tmp_path: Path) -> None:
    save_dcp(
        tmp_path / "source",
        {"model": {"a": torch.randn(1000, 3000).t(), "z": torch.randn(3000, 1000)}},
    )
    _killed_at(6_000_000, tmp_path / "source", tmp_path / "out.safetensors")
    data = bytearray((tmp_path / "source/__0_0.distcp").read_bytes())
    stamp = (tmp_path / "source/__0_0.distcp").stat()
    data[3_000_000] ^= 1  # of what has been written already
    (tmp_path / "source/__0_0.distcp").write_bytes(data)
    os.utime(tmp_path / "source/__0_0.distcp", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(EmaCkptError) as caught:
        consolidate(
            tmp_path / "source", tmp_path / "out.safetensors", resume=True, threads=1, dtype="bf16"
        )
    assert caught.value.code in ("checksum", "resume-mismatch")


@pytest.mark.parametrize("part", ["", "model"], ids=["alone", "a part"])
def test_a_run_is_not_continued_under_other_metadata(tmp_path: Path, part: str) -> None:
    """The data files are as they were, and hold what now belongs to another name."""
    run = tmp_path / "source"
    source = run / part
    names = ("a", "b") if part else ("model.a", "model.b")
    tensors = {name[-1]: torch.randn(1000, 3000) for name in names}
    save_dcp(source, tensors if part else {"model": tensors})
    if part:
        save_dcp(run / "optim", {"state": {"step": torch.tensor(1.0)}})
    _killed_at(3_000_000, run, tmp_path / "out.safetensors")
    metadata = source / ".metadata"
    content = pickle.loads(metadata.read_bytes())
    places = {index.fqn: index for index in content.storage_data}
    first, second = places[names[0]], places[names[1]]
    stored = content.storage_data
    stored[first], stored[second] = stored[second], stored[first]
    metadata.write_bytes(pickle.dumps(content))
    with pytest.raises(EmaCkptError) as caught:
        consolidate(run, tmp_path / "out.safetensors", resume=True, threads=1, dtype="bf16")
    assert caught.value.code == "resume-mismatch"
    assert "the metadata of the source changed" in str(caught.value)
    consolidate(run, tmp_path / "out.safetensors", dtype="bf16")
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["a"], tensors["b"].bfloat16())


def test_a_resumed_cast_of_a_source_with_digests(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(40, 3) for i in range(200)} | {"big": torch.randn(2000, 1000)}
    save_file(tensors, tmp_path / "plain.safetensors")
    consolidate(tmp_path / "plain.safetensors", tmp_path / "source.safetensors")
    _killed_at(1, tmp_path / "source.safetensors", tmp_path / "out.safetensors")
    consolidate(
        tmp_path / "source.safetensors", tmp_path / "out.safetensors", resume=True, threads=1, dtype="bf16",
        max_memory="4MiB",
    )  # fmt: skip
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in tensors.items())


def test_an_object_with_tensors_in_it_goes_to_dcp_alone(tmp_path: Path) -> None:
    """Its storages are records of its own archive; in a torch file their keys would mean other tensors."""
    state = {
        "model": {"w": torch.full((4,), 5.0)},
        "rng": {"pair": (torch.arange(4.0), torch.ones(2))},
    }
    save_dcp(tmp_path / "source", state)
    result = convert(tmp_path / "source", tmp_path / "out.pt")
    assert [item.name for item in result.skipped] == ["rng.pair"]
    assert torch.equal(
        torch.load(tmp_path / "out.pt", weights_only=True)["model"]["w"], state["model"]["w"]
    )
    with pytest.raises(EmaCkptError, match=r"rng\.pair"):
        convert(tmp_path / "source", tmp_path / "strict.pt", strict=True)
    assert convert(tmp_path / "source", tmp_path / "again", to="dcp").skipped == ()


def test_tied_weights_count_once(tmp_path: Path) -> None:
    weight = torch.randn(5, 5)
    torch.save({"a": weight, "b": weight}, tmp_path / "tied.pt")
    assert convert(tmp_path / "tied.pt", tmp_path / "out.safetensors").nbytes == 100
