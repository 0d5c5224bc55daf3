"""Files of which each rank wrote one: a family, or a set of torch's HuggingFaceStorageWriter."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.discovery.locate import locate_checkpoint
from tests.checkpoints import safetensors_at, torch_at, weights

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize("stem", ["rank_3", "m-rank-3", "rank3", "m.rank_3", "m_rank3_x"])
@pytest.mark.parametrize("suffix", [".pt", ".bin", ".ckpt", ".pth", ".pth.tar"])
def test_one_file_alone_is_read_with_a_warning(tmp_path: Path, stem: str, suffix: str) -> None:
    path = torch_at(tmp_path / f"{stem}{suffix}")
    for named in (path, tmp_path):
        result = ema_ckpt.inspect(named)
        assert {tensor.name for tensor in result.tensors} == weights().keys()
        assert [w.code for w in result.warnings] == ["unchecked"]
        assert path.name in result.warnings[0].message
    torch_at(path.with_name(path.name.replace("3", "0")))
    with pytest.raises(EmaCkptError) as caught:
        ema_ckpt.inspect(path)
    assert caught.value.code == "incomplete"
    assert path.name.replace("3", "*") in str(caught.value)


@pytest.mark.parametrize(
    "name", ["m_world_size_4_rank_3.pt", "m_rank_3_world_size_4.bin", "world-size-2-rank-0.ckpt"]
)
def test_a_name_that_tells_of_others_is_refused(tmp_path: Path, name: str) -> None:
    path = torch_at(tmp_path / name)
    for named in (path, tmp_path):
        with pytest.raises(EmaCkptError, match="are missing") as caught:
            ema_ckpt.consolidate(named, tmp_path / "out.safetensors")
        assert caught.value.code == "incomplete"


@pytest.mark.parametrize("layout", ["torch-2.9.1", "torch-2.15.0"])
@pytest.mark.parametrize("name", ["rank0.pt", "m-rank-0.bin", "m.rank_0.ckpt"])
def test_pieces_alone_are_refused_where_they_are_named(
    tmp_path: Path, layout: str, name: str
) -> None:
    family = FIXTURES / "rank-files" / layout
    (tmp_path / name).write_bytes(next(family.glob("*rank_0.pt")).read_bytes())
    with pytest.raises(EmaCkptError, match="are missing") as caught:
        ema_ckpt.inspect(tmp_path / name)
    assert (caught.value.code, caught.value.file) == ("incomplete", name)
    codes = [warning.code for warning in ema_ckpt.inspect(tmp_path).warnings]
    assert codes[0] == "incomplete" and set(codes[1:]) == {"hole"}


@pytest.mark.parametrize("name", ["model_world_size_1_rank_0.pt", "model_rank_0_world_size_1.bin"])
def test_the_file_of_the_only_rank_is_the_whole(tmp_path: Path, name: str) -> None:
    path = torch_at(tmp_path / name)
    for named in (path, tmp_path):
        assert not ema_ckpt.inspect(named).warnings


def test_shards_of_ranks_are_one_set(tmp_path: Path) -> None:
    names = [f"shard-0000{rank}-model-0000{rank}-of-00003.safetensors" for rank in (1, 2, 3)]
    for name in names:
        safetensors_at(tmp_path / name)
    found = locate_checkpoint(str(tmp_path))
    assert (found.format, found.names) == ("safetensors", tuple(names))
    pattern = tmp_path / "shard-*-model-*-of-00003.safetensors"
    assert locate_checkpoint(str(pattern)).names == tuple(names)
    for name in names:
        with pytest.raises(EmaCkptError, match=r"shard-\*-model-\*-of-00003") as caught:
            locate_checkpoint(str(tmp_path / name))
        assert caught.value.code == "incomplete"


def test_a_family_behind_a_url(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    try:
        for rank in range(2):
            source = torch_at(tmp_path / f"{rank}.pt")
            memory.put(str(source), f"/rank-sets/ema_rank_{rank}.bin")
        for path in ("memory://rank-sets", "memory://rank-sets/ema_rank_*.bin"):
            assert ema_ckpt.inspect(path).world_size == 2
        with pytest.raises(EmaCkptError, match=r"'memory://rank-sets/ema_rank_\*\.bin'"):
            ema_ckpt.inspect("memory://rank-sets/ema_rank_1.bin")
    finally:
        memory.rm("/rank-sets", recursive=True)
