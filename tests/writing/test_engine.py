"""The engine: any layout, budget and number of workers gives the same bytes; a failure anywhere stops all."""

from __future__ import annotations

import random
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.write_plan import OutputTensor
from ema_ckpt.formats.dcp.reader import open_dcp
from ema_ckpt.formats.dcp.writer import lay_out
from ema_ckpt.formats.safetensors.writer import lay_out as lay_out_safetensors
from ema_ckpt.storage.files import LocalFiles
from ema_ckpt.writing.engine import run
from ema_ckpt.writing.journal import Journal
from ema_ckpt.writing.options import WriteOptions
from ema_ckpt.writing.output_files import OutputFiles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def truth() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    state: dict[str, torch.Tensor] = {
        "large": torch.randn(1100, 1300),
        "transposed": torch.randn(700, 900).t(),
        "cube": torch.randn(40, 50, 60).permute(2, 0, 1),
        "half": torch.randn(900, 501).half(),
        "empty": torch.zeros(0, 7),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "flag": torch.tensor([True, False]),
        "count": torch.tensor(7),
    }
    state |= {f"small.{i}": torch.randn(random.Random(i).randrange(1, 40), 5) for i in range(300)}
    return state


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, truth: dict[str, torch.Tensor]) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    dcp.save(dict(truth), checkpoint_id=folder / "whole")
    return folder / "whole"


@pytest.fixture(scope="module")
def resharded(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The same cut into rows for 5 ranks, so that runs and bands both have something to join."""
    out = tmp_path_factory.mktemp("resharded")
    source = LocalFiles(checkpoint)
    catalog = open_dcp(source, (".metadata",), "p", "p")
    entries = [OutputTensor(t.name, t.path, t, t.dtype) for t in catalog.tensors]
    plan = lay_out(entries, [], [bool(e.source.shape) for e in entries], 5, source)
    with closing(OutputFiles(out, plan.files)) as outputs:
        run(catalog, plan, outputs, WriteOptions())
    source.close()
    return out


def consolidated(
    folder: Path, out: Path, options: WriteOptions, journal: Journal | None = None
) -> dict[str, torch.Tensor]:
    source = LocalFiles(folder)
    try:
        catalog = open_dcp(source, (".metadata",), "p", "p")
        target = lay_out_safetensors(
            [OutputTensor(t.name, t.path, t, t.dtype) for t in catalog.tensors]
        )
        with closing(OutputFiles(out, target.files)) as outputs:
            outcome = run(catalog, target, outputs, options, journal)
    finally:
        source.close()
    found = load_file(out)
    for piece, crc in zip(target.items, outcome.crcs, strict=True):
        name = piece.output.name
        raw = (
            found[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if found[name].numel()
            else b""
        )
        assert crc == outcome.digests[name] == zlib.crc32(raw), name
    return found


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("budget", [4 << 20, 64 << 20])
def test_same_bytes_for_any_workers_and_budget(
    tmp_path: Path,
    truth: dict[str, torch.Tensor],
    checkpoint: Path,
    resharded: Path,
    threads: int,
    budget: int,
) -> None:
    for folder in (checkpoint, resharded):
        found = consolidated(
            folder, tmp_path / folder.name, WriteOptions(threads=threads, budget_nbytes=budget)
        )
        assert found.keys() == truth.keys()
        for name, tensor in truth.items():
            assert torch.equal(found[name], tensor), name
            assert found[name].dtype == tensor.dtype


def test_casts_equal_torchs_and_count_overflow(
    tmp_path: Path, truth: dict[str, torch.Tensor], resharded: Path
) -> None:
    from ema_ckpt.core.dtypes import by_name

    source = LocalFiles(resharded)
    catalog = open_dcp(source, (".metadata",), "p", "p")
    half = by_name("bfloat16")
    entries = [
        OutputTensor(t.name, t.path, t, half if t.dtype.is_castable else t.dtype)
        for t in catalog.tensors
    ]
    plan = lay_out_safetensors(entries)
    with closing(OutputFiles(tmp_path / "out", plan.files)) as outputs:
        outcome = run(catalog, plan, outputs, WriteOptions(threads=2))
    source.close()
    assert outcome.overflow == {}
    for name, tensor in load_file(tmp_path / "out").items():
        expected = (
            truth[name].to(torch.bfloat16) if truth[name].is_floating_point() else truth[name]
        )
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("threads", [1, 3])
def test_a_flipped_bit_stops_all_workers_and_names_file_and_tensor(
    tmp_path: Path, resharded: Path, threads: int
) -> None:
    import shutil

    damaged = tmp_path / "damaged"
    shutil.copytree(resharded, damaged)
    source = LocalFiles(damaged)
    catalog = open_dcp(source, (".metadata",), "p", "p")
    victim = next(t for t in catalog.tensors if t.name == "large")
    payload = catalog.reader.payloads(victim)[3]
    source.close()
    raw = bytearray((damaged / payload.file).read_bytes())
    raw[payload.offset + payload.nbytes // 2] ^= 0x10
    (damaged / payload.file).write_bytes(raw)
    with pytest.raises(SourceError) as caught:
        consolidated(damaged, tmp_path / "out", WriteOptions(threads=threads))
    assert (caught.value.code, caught.value.tensor, caught.value.file) == (
        "checksum",
        "large",
        payload.file,
    )
    with pytest.raises(
        AssertionError, match="large"
    ):  # --no-verify copies it; the digest is that of what was written
        found = consolidated(damaged, tmp_path / "out", WriteOptions(threads=threads, verify=False))
        original = consolidated(resharded, tmp_path / "good", WriteOptions())
        assert torch.equal(found["large"], original["large"]), "large"


def test_finished_ranges_are_not_read_again(
    tmp_path: Path, truth: dict[str, torch.Tensor], checkpoint: Path
) -> None:
    """The journal of a finished run makes the next one write nothing again; what it wrote, it compares with the source."""
    import shutil

    source_folder, stage = tmp_path / "source", tmp_path / "stage"
    shutil.copytree(checkpoint, source_folder)
    stage.mkdir()
    journal = Journal(stage, stage / "out", {})
    first = consolidated(source_folder, stage / "out", WriteOptions(threads=2), journal)
    journal.close()
    for file in source_folder.glob("*.distcp"):
        raw = np.fromfile(file, np.uint8)
        source = LocalFiles(source_folder)
        catalog = open_dcp(source, (".metadata",), "p", "p")
        for tensor in catalog.tensors:
            for payload in catalog.reader.payloads(tensor):
                raw[payload.offset : payload.offset + payload.nbytes] = 0
        source.close()
        raw.tofile(file)
    journal = Journal(stage, stage / "out", {})
    assert journal.completed()
    with pytest.raises(SourceError) as caught:
        consolidated(source_folder, stage / "out", WriteOptions(threads=2), journal)
    assert caught.value.code == "checksum"
    again = consolidated(
        source_folder, stage / "out", WriteOptions(threads=2, verify=False), journal
    )
    journal.close()
    assert all(torch.equal(again[name], first[name]) for name in truth)
